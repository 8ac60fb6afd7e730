"""The functions on NumPy arrays: the same bits as on Torch tensors, and without Torch at all."""

import subprocess
import sys
from pathlib import Path

import moire
import numpy as np
import pytest
import torch
import truth

ROOT = Path(__file__).resolve().parents[2]


def values(generator):
    t = {
        "x": truth.draw(generator, 9, 12),
        "w1": truth.draw(generator, 3, 32, 12),
        "w2": truth.draw(generator, 3, 12, 16),
        "b1": truth.draw(generator, 3, 32),
        "b2": truth.draw(generator, 3, 12),
        "probs": torch.rand(9, generator=generator),
    }
    return t, {k: v.numpy() for k, v in t.items()}


def test_every_function_gives_the_bits_of_torch(generator):
    t, n = values(generator)
    splits = [4, 0, 5]
    topk_idx = torch.randint(-1, 4, (9, 2), generator=generator)
    weights = torch.rand(9, 2, generator=generator)

    def everything(v, idx, w):
        groups = moire.Groups(splits=splits)
        x, w1, w2, extra = v["x"], v["w1"], v["w2"], {k: v[k] for k in ("b1", "b2", "probs")}
        plan = moire.make_plan(idx, 3)
        rows, probs = moire.permute(x, plan, topk_weights=w)
        listed = [w1[g] for g in range(3)]
        return [
            moire.grouped_linear(x, w1, groups, bias=v["b1"], scale=v["probs"]),
            moire.grouped_linear(x, listed, groups),
            moire.grouped_mlp(x, w1, w2, groups, act="geglu_tanh", layout=8, **extra),
            moire.moe(x, w1, w2, idx, w, b1=v["b1"], b2=v["b2"]),
            moire.glu(w1[0], layout=1),
            moire.interleave_glu_tensor(w1, 8, 1),
            *plan,
            rows,
            probs,
            moire.permute(x, plan),
            moire.unpermute(rows, plan, weights=w),
            *moire.router(v["b2"], 4, kind="sigmoid", normalize=True),
            groups.splits,
        ]

    of_torch = everything(t, topk_idx, weights)
    of_numpy = everything(n, topk_idx.numpy(), weights.numpy())
    for a, b in zip(of_torch, of_numpy):
        b = torch.from_numpy(b) if isinstance(b, np.ndarray) else b
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert all(isinstance(b, np.ndarray) for b in of_numpy[:-1])


def test_bf16_is_ml_dtypes(generator):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    t, _ = values(generator)
    groups = moire.Groups(splits=[4, 0, 5])
    of_torch = moire.grouped_linear(t["x"].bfloat16(), t["w1"].bfloat16(), groups)
    x, w = (t[k].bfloat16().view(torch.int16).numpy().view(ml_dtypes.bfloat16) for k in ("x", "w1"))
    of_numpy = moire.grouped_linear(x, w, groups)
    assert of_numpy.dtype == ml_dtypes.bfloat16
    assert np.array_equal(of_numpy.view(np.int16), of_torch.view(torch.int16).numpy())
    cast = moire.grouped_linear(
        t["x"].numpy(), t["w1"].numpy(), groups, compute_dtype=ml_dtypes.bfloat16
    )
    assert cast.dtype == np.float32 and np.array_equal(cast, of_torch.float().numpy())


def test_strided_arrays(generator):
    _, n = values(generator)
    groups = moire.Groups(splits=[4, 0, 5])
    wanted = moire.grouped_linear(n["x"], n["w1"], groups)
    for strided in (
        np.asfortranarray(n["x"]),
        np.repeat(n["x"], 2, 0)[::2],
        n["x"][::-1].copy()[::-1],
    ):
        assert np.array_equal(moire.grouped_linear(strided, n["w1"], groups), wanted)


def packed_field(rows, columns):
    """[rows, columns] whose rows lie one byte further apart than whole elements do."""
    return np.zeros(rows, np.dtype([("field", np.float32, (columns,)), ("tag", np.uint8)]))


@pytest.mark.parametrize("rank", [2, 3])
def test_rows_that_are_no_whole_elements_apart_are_read_as_they_lie(generator, rank):
    _, n = values(generator)
    groups = moire.Groups(splits=[4, 0, 5])
    wanted = moire.grouped_linear(n["x"], n["w1"], groups)
    source = n["x"] if rank == 2 else n["w1"]
    rows = source.reshape(-1, source.shape[-1])
    packed = packed_field(*rows.shape)
    packed["field"] = rows
    strided = packed.reshape(source.shape[:-1])["field"]
    assert strided.strides[-2] % strided.itemsize == 1
    operands = (strided, n["w1"]) if rank == 2 else (n["x"], strided)
    assert np.array_equal(moire.grouped_linear(*operands, groups), wanted)


def test_rows_that_are_no_whole_elements_apart_are_not_written(generator):
    _, n = values(generator)
    groups = moire.Groups(splits=[4, 0, 5])
    packed = packed_field(9, 32)
    packed["tag"] = 7
    before = packed.copy()
    with pytest.raises(moire.InvalidArgument, match="output y is not contiguous"):
        moire.grouped_linear(n["x"], n["w1"], groups, out=packed["field"])
    assert (packed == before).all()


def test_gradients_are_there_as_functions(generator):
    """NumPy users call the backward themselves."""
    t, n = values(generator)
    groups = moire.Groups(splits=[4, 0, 5])
    leaves = {k: t[k].clone().requires_grad_() for k in ("x", "w1", "w2")}
    moire.grouped_mlp(*leaves.values(), groups).sum().backward()
    ones = np.ones((9, 12), np.float32)
    grads = moire.grouped_mlp_backward(ones, n["x"], n["w1"], n["w2"], groups)
    for k in leaves:
        assert np.array_equal(getattr(grads, k), leaves[k].grad.numpy())


def test_kinds_do_not_mix(generator):
    t, n = values(generator)
    with pytest.raises(
        moire.InvalidArgument, match="bias is a Torch tensor, must be a NumPy array"
    ):
        moire.grouped_linear(n["x"], n["w1"], moire.Groups(splits=[9, 0, 0]), bias=t["b1"])
    with pytest.raises(moire.InvalidArgument, match="w is a Torch tensor, must be a NumPy array"):
        moire.grouped_linear(n["x"], t["w1"], moire.Groups(splits=[9, 0, 0]))


WITHOUT_TORCH = """
import pickle
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "ml_dtypes"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, ROOT)
import numpy as np
import moire
groups = moire.Groups(splits=[2, 3])
x, w1, w2 = (np.ones(shape, np.float32) for shape in ((5, 4), (2, 12, 4), (2, 4, 6)))
y = moire.grouped_mlp(x, w1, w2, groups)
assert y.shape == (5, 4) and isinstance(groups.offsets, np.ndarray)
np.testing.assert_allclose(y, 6 * 4 * 4 / (1 + np.exp(-4.0)), rtol=1e-6)
assert [s["op"] for s in moire.explain(moire.glu, np.ones((2, 4), np.float32))] == ["glu"]
t = moire.quantize(x, groups, columnwise=True)
assert t.rowwise.data.dtype == np.uint8 and t.element == "e4m3"
assert np.array_equal(t.dequantize(), x) and np.array_equal(t[1].dequantize(), x[2:])
assert np.array_equal(moire.quantize(x, groups).requantize().dequantize(direction="columnwise"), x)
for copied in (t.clone(), pickle.loads(pickle.dumps(t))):
    assert copied.element == "e4m3" and np.array_equal(copied.dequantize(), x)
try:
    moire.nn
except ModuleNotFoundError as e:
    assert "moire.nn needs torch" in str(e), e
else:
    raise SystemExit("moire.nn was imported")
try:
    moire.grouped_mlp([1.0], None, None, groups)
except moire.InvalidArgument as e:
    assert str(e) == "grouped_mlp: x is a list, must be a NumPy array", e
assert "torch" not in sys.modules
print("fine")
"""


def test_import_without_torch():
    code = WITHOUT_TORCH.replace("ROOT", repr(str(ROOT / "python")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr
