"""Arguments of the right type with a wrong value or shape: the kind of error, and its sentence."""

import moire
import pytest
import torch

X, W1, W2 = torch.ones(6, 8), torch.ones(2, 20, 8), torch.ones(2, 8, 10)
G = moire.Groups(splits=[2, 4])
IDX, WEIGHTS = torch.zeros(6, 1, dtype=torch.int64), torch.ones(6, 1)


def mlp(**changes):
    values = {"x": X, "w1": W1, "w2": W2, "groups": G, **changes}
    return moire.grouped_mlp(**values)


def linear(**changes):
    return moire.grouped_linear(**{"x": X, "w": W1, "groups": G, **changes})


def route(**changes):
    return moire.moe(
        **{"x": X, "w1": W1, "w2": W2, "topk_idx": IDX, "topk_weights": WEIGHTS, **changes}
    )


INVALID = [
    (lambda: linear(x=X[0]), "grouped_linear: x is [8], must have rank 2"),
    (
        lambda: linear(x=[[1.0]]),
        "grouped_linear: x is a list, must be a Torch tensor or a NumPy array",
    ),
    (lambda: linear(x=torch.ones(6, 7)), "grouped_linear: x is fp32 [6, 7]"),
    (lambda: linear(x=X.bfloat16()), "the dtypes must be equal"),
    (
        lambda: linear(w=W1[0]),
        "grouped_linear: w is [20, 8]; needs [groups, out, in] or a list of matrices",
    ),
    (
        lambda: linear(w=[W1]),
        "grouped_linear: w[0] is [2, 20, 8]; a list holds one matrix per group",
    ),
    (lambda: linear(w=[]), "grouped_linear: w is an empty list"),
    (lambda: linear(w=[W1[0], W1[0, 1:]]), "w[1] is float32 [19, 8] but w[0] is float32 [20, 8]"),
    (lambda: linear(w=W1[:1]), "grouped_linear: there are 2 splits but w has 1 experts"),
    (
        lambda: linear(groups=[2, 4]),
        "grouped_linear: groups is a list, must be moire.Groups(splits=...)",
    ),
    (lambda: linear(groups=moire.Groups(splits=[2, 5])), "past the capacity 6"),
    (lambda: linear(bias=torch.ones(2, 19)), "grouped_linear: bias is fp32 [2, 19]"),
    (
        lambda: linear(scale=torch.ones(5), bias=torch.ones(2, 20)),
        "grouped_linear: scale is fp32 [5]",
    ),
    (lambda: linear(row_idx=torch.tensor([0, 1, 2, 3, 4, 6])), "row_idx[5] is 6"),
    (lambda: linear(row_idx=torch.ones(6)), "row_idx is fp32 [6]"),
    (lambda: linear(weight_layout="io"), "weight_layout is 'io', must be one of out_in, in_out"),
    (lambda: linear(tail="keep"), "tail is 'keep', must be one of zero, untouched"),
    (lambda: linear(out=torch.ones(6, 21)), "grouped_linear: y is fp32 [6, 21]"),
    (
        lambda: linear(out=torch.ones(20, 6).t()),
        "output y is not contiguous, and outputs are not copied",
    ),
    (
        lambda: linear(out=X.new_empty(6, 20).to("meta")),
        "but y is on meta; all must be on one device",
    ),
    (lambda: linear(recipe="int4"), "recipe is 'int4', must be one of as_stored, bf16, fp16, fp32"),
    (lambda: linear(recipe="bf16"), "recipe 'bf16' needs bfloat16 operands, found float32"),
    (
        lambda: linear(bias=torch.ones(2, 20).numpy()),
        "grouped_linear: bias is a NumPy array, must be a Torch tensor as the first array is",
    ),
    (lambda: mlp(w1=torch.ones(2, 19, 8)), "grouped_mlp: w1 is fp32 [2, 19, 8]"),
    (
        lambda: mlp(w2=torch.ones(2, 8, 9)),
        "grouped_mlp: w2 is fp32 [2, 8, 9], needs [G, N, F] = [2, 8, 10]",
    ),
    (lambda: mlp(probs=torch.ones(5)), "grouped_mlp: probs is fp32 [5], needs [capacity] = [6]"),
    (lambda: mlp(b1=torch.ones(20)), "grouped_mlp: b1 is fp32 [20]"),
    (lambda: mlp(act="tanh"), "act is 'tanh', must be one of swiglu, clamped_swiglu, geglu_tanh"),
    (lambda: mlp(act=moire.Activation("clamped_swiglu")), "limit"),
    (lambda: mlp(layout=3), "block"),
    (lambda: mlp(layout="up"), "layout is 'up', must be 'halves', a block size (1, 8, 32, ...)"),
    (lambda: moire.GluLayout(-1), "GluLayout: block is -1"),
    (
        lambda: moire.GluLayout(0, "down_first"),
        "order is 'down_first', must be one of gate_first, up_first",
    ),
    (lambda: moire.Activation("relu"), "Activation: kind is 'relu'"),
    (lambda: route(topk_idx=IDX + 3), "topk_idx"),
    (lambda: route(topk_idx=IDX[:, 0]), "make_plan: topk_idx is [6], must be [T, k]"),
    (
        lambda: route(topk_weights=WEIGHTS[:4]),
        "moe: topk_weights is [4, 1] and topk_idx [6, 1], must both be [T, k]",
    ),
    (lambda: route(topk_idx=WEIGHTS), "permute_plan: topk_idx is fp32 [6, 1]"),
    (lambda: moire.glu(torch.ones(4, 7)), "glu: z is [4, 7], must be [rows, 2F]"),
    (lambda: moire.glu(torch.ones(2, 4, 7)), "glu: z is [8, 7], must be [rows, 2F]"),
    (lambda: moire.glu(torch.ones(())), "glu: z is [], must be [rows, 2F]"),
    (
        lambda: moire.glu(torch.ones(2, 4, 6), groups=moire.Groups(splits=[8])),
        "glu: z is [2, 4, 6], must be [rows, 2F]",
    ),
    (
        lambda: moire.glu(torch.ones(2, 4, 6), torch.ones(8)),
        "glu: probs is [8] but z is [2, 4, 6], must be [2, 4]",
    ),
    (lambda: moire.glu(torch.ones(4, 6), torch.ones(3)), "glu: probs is fp32 [3]"),
    (
        lambda: moire.router(torch.ones(4, 6), 7),
        "router: k is 7, must be at most the 6 experts",
    ),
    (
        lambda: moire.router(torch.ones(4, 6), 2, kind="top"),
        "router: kind is 'top', must be one of softmax, sigmoid",
    ),
    (
        lambda: moire.permute(X, None),
        "permute: plan is None, must be what moire.make_plan returns",
    ),
    (
        lambda: moire.grouped_mm(X, W1, torch.tensor([2, 6])),
        "a is [6, 8] but b_t is [2, 20, 8]: 8 and 20 must be equal",
    ),
    (
        lambda: moire.grouped_mm(X, W1.transpose(1, 2), torch.tensor([6])),
        "b_t has 2 groups but offs has 1",
    ),
    (
        lambda: moire.settings(num_threads=0).__enter__(),
        "settings: num_threads is 0, must be an integer, 1 to 4096",
    ),
]


@pytest.mark.parametrize("call, message", INVALID, ids=[m[:50] for _, m in INVALID])
def test_invalid_argument(call, message):
    with pytest.raises(moire.InvalidArgument) as e:
        call()
    assert message in str(e.value)
    assert isinstance(e.value, ValueError) and e.value.code == moire.Code.INVALID_ARGUMENT


UNSUPPORTED = [
    (lambda: linear(x=X.double(), w=W1.double()), "grouped_linear: "),
    (
        lambda: linear(x=X.to(torch.complex64)),
        "x is complex64 [6, 8], needs float32, bfloat16 or float16",
    ),
    (
        lambda: moire.grouped_mm(W1, W1),
        "the ragged forms are 2-D x 3-D (ragged rows) and 2-D x 2-D",
    ),
    (
        lambda: moire.grouped_mm(X, W1, torch.tensor([6]), bias=X),
        "bias is not supported, as in torch",
    ),
    (lambda: moire.interleave_glu_tensor(torch.ones(8, dtype=torch.complex128), 2), "complex128"),
]


@pytest.mark.parametrize("call, message", UNSUPPORTED, ids=[m[:50] for _, m in UNSUPPORTED])
def test_unsupported(call, message):
    with pytest.raises((moire.Unsupported, moire.InvalidArgument)) as e:
        call()
    assert message in str(e.value)


def test_an_error_leaves_outputs_untouched():
    out = torch.full((6, 8), 3.0)
    with pytest.raises(moire.InvalidArgument):
        mlp(probs=torch.ones(5), out=out)
    assert (out == 3).all()


def test_errors_survive_pickling():
    import pickle

    for error in (moire.InvalidArgument(10, "a"), moire.Unsupported(20, "b"), moire.Error(60, "c")):
        back = pickle.loads(pickle.dumps(error))
        assert (
            type(back) is type(error) and back.code == error.code and back.message == error.message
        )
