"""What torch.utils.flop_counter counts of moire's products."""

import moire
import pytest
import torch
import truth
from moire import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

pytestmark = pytest.mark.usefixtures("device")

H, F, ROWS, SPLITS = 64, 128, 64, [40, 0, 20]
PRODUCT = 2 * ROWS * H * F  # of all rows with one matrix [F, H]


def counted(call):
    with FlopCounterMode(display=False) as mode:
        result = call()
    return mode.get_total_flops() / PRODUCT, result


@pytest.mark.skipif(
    torch.ops.moire.grouped_mlp not in flop_registry,
    reason="this torch registers overloads, which its counter does not look up",
)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize(
    "recipe", [None, "mxfp8", "fp8_block", moire.Recipe("mxfp8", dequantized_weights=True)]
)
def test_each_product_counts_as_one_of_all_rows(generator, recipe, packed, delayed):
    mlp = nn.GroupedMLP(3, H, F, recipe=recipe, packed=packed, delay_wgrad_compute=delayed)
    x = truth.draw(generator, ROWS, H)
    for wants_x in (False, True):
        for _ in range(2):  # also of calls that would be made again
            x.requires_grad_(wants_x)
            forward, y = counted(lambda: mlp(x, SPLITS))
            backward, _ = counted(lambda y=y: (y.sum().backward(), mlp.backward_dw()))
            assert (forward, backward) == (3, 6 if wants_x else 4)
    mlp.fc1.requires_grad_(False)
    x.requires_grad_(False)
    y = mlp(x, SPLITS)
    assert counted(lambda: (y.sum().backward(), mlp.backward_dw()))[0] == 1


def test_a_call_without_rows_counts_nothing():
    layer, x = nn.GroupedLinear(3, H, F), torch.zeros(0, H, requires_grad=True)
    assert counted(lambda: layer(x, [0, 0, 0]).sum().backward())[0] == 0
