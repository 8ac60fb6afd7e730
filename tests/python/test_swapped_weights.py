"""Parameters with 8-bit copies whose content Torch swaps for another's, and what they carry."""

import copy
import io
import pickle

import moire
import pytest
import torch
import truth
import truth_fp8
from moire import nn

pytestmark = pytest.mark.usefixtures("device")

E, H, SPLITS = 3, 40, [33, 0, 7]


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


SWAPS = {
    "to": lambda layer, other: layer.to(layer._all("weight")[0].device),
    "bfloat16": lambda layer, other: layer.bfloat16(),
    "load_state_dict": lambda layer, other: layer.load_state_dict(other.state_dict()),
    "swap_tensors": lambda layer, other: [
        torch.utils.swap_tensors(*both) for both in zip(layer.parameters(), other.parameters())
    ],
}


@pytest.mark.parametrize("how", SWAPS)
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block"])
@pytest.mark.parametrize("packed", [True, False])
def test_copies_are_those_of_what_the_parameters_are_now(generator, swapping, how, recipe, packed):
    layer, other = (nn.GroupedLinear(E, H, H, recipe=recipe, packed=packed) for _ in range(2))
    x = truth.draw(generator, 40, H)
    for module in (layer, other):
        module(x, SPLITS).sum().backward()
    SWAPS[how](layer, other)
    for module in (layer, other):
        given = x.to(next(module.parameters()).dtype)
        weights = [w.detach() for w in module._all("weight")]
        weights = weights[0] if packed else weights
        wanted = moire.grouped_linear(given, weights, moire.Groups(splits=SPLITS), recipe=recipe)
        assert torch.equal(module(given, SPLITS), wanted)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "dict": lambda w: (other := w.detach().clone(), vars(other).update(vars(w)))[0],
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.detach])
def test_a_copy_of_a_weight_is_another_weight(generator, how, kind):
    cache, weight = moire.WeightCache("mxfp8"), kind(truth.draw(generator, E, H, H))
    tensor = cache.get(weight, version=1)
    other = COPIES[how](weight)
    other.data = truth.draw(generator, E, H, H)
    wanted = moire.quantize(other.detach(), columnwise=True)
    truth_fp8.assert_same_bytes(cache.get(other, version=1), wanted)
    assert cache.get(weight, version=1) is tensor and len(set(cache._entries.values())) == 2
    del weight
    cache.get(other, version=2)
    assert set(cache._entries.values()) == {cache._of([other])}


def test_files_of_a_weight_load_as_weights_only(generator):
    weight, file = torch.nn.Parameter(truth.draw(generator, E, H, H)), io.BytesIO()
    moire.WeightCache("mxfp8").get(weight, version=1)
    torch.save({"weight": weight}, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], weight)
