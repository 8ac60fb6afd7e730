"""Calls of each function that tapes.py makes again: the function, and what it is given."""

import moire
import torch

G, H, F, K = 3, 64, 32, 2
SPLITS = [5, 0, 7]
ROWS = sum(SPLITS)
ON = {"device": "cpu"}  # where tensors are made: `device` of conftest.py is a mode, which watches


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, **ON).to(dtype)


def groups_of(splits=SPLITS):
    return moire.Groups(splits=torch.tensor(splits, **ON), capacity=sum(splits))


def of_linear(**options):
    def make(dtype):
        given = {"x": normal(ROWS, H, dtype=dtype), "w": normal(G, F, H, dtype=dtype)}
        return moire.grouped_linear, {**given, "groups": groups_of(), **options}

    return make


def of_mlp(listed=False, biases=False, probs=False, **options):
    def make(dtype):
        x, w1, w2 = (normal(*s, dtype=dtype) for s in ((ROWS, H), (G, 2 * F, H), (G, H, F)))
        given = {"x": x, "w1": w1, "w2": w2, "groups": groups_of()}
        if listed:
            given.update({w: [t.clone() for t in given[w]] for w in ("w1", "w2")})
        if biases:
            given.update(b1=normal(G, 2 * F, dtype=dtype), b2=normal(G, H, dtype=dtype))
        if probs:
            given.update(probs=torch.rand(ROWS, **ON))
        return moire.grouped_mlp, {**given, **options}

    return make


def of_moe(planned=False, **options):
    def make(dtype):
        tokens = 6
        topk_idx = torch.randint(0, G, (tokens, K), **ON)
        given = {"x": normal(tokens, H, dtype=dtype), "topk_weights": torch.rand(tokens, K, **ON)}
        given.update(w1=normal(G, 2 * F, H, dtype=dtype), w2=normal(G, H, F, dtype=dtype))
        given.update(topk_idx=topk_idx, plan=moire.make_plan(topk_idx, G) if planned else None)
        return moire.moe, {**given, **options}

    return make


def of_router(**options):
    def make(dtype):
        return moire.router, {"logits": torch.randn(8, 5, **ON), "k": 2, **options}

    return make


def of_unpermute(dtype):
    plan = moire.make_plan(torch.randint(0, G, (6, K), **ON), G)
    given = {"rows": normal(6 * K, H, dtype=dtype), "weights": torch.rand(6, K, **ON)}
    return moire.unpermute, {**given, "plan": plan}


def of_copies(kept, **options):
    """An MLP whose weights have 8-bit forms beside them, as modules keep."""

    def make(dtype):
        function, given = of_mlp(recipe="mxfp8", probs=True, **options)(dtype)
        for w in ("w1", "w2"):
            weight = given[w].detach()
            copy = moire.quantize(weight, columnwise=True) if kept else moire.PreparedWeight(weight)
            given[f"{w}_quantized"] = copy
        return function, given

    return make


CLAMPED = moire.Activation.clamped_swiglu(7.0, 1.702, 1.0)
CASES = {
    "linear": of_linear(),
    "linear of 8 bits": of_linear(recipe="mxfp8"),
    "mlp": of_mlp(),
    "mlp of lists": of_mlp(listed=True),
    "mlp with biases and probs": of_mlp(biases=True, probs=True, act=CLAMPED),
    "mlp, interleaved": of_mlp(layout=moire.GluLayout(block=16), save_act=True),
    "mlp without z": of_mlp(save_z=False),
    "mlp of 8 bits": of_mlp(recipe=moire.Recipe("fp8_block"), probs=True),
    "mlp of copies": of_copies(kept=True),
    "mlp of prepared weights": of_copies(kept=False),
    "moe": of_moe(),
    "moe of a plan": of_moe(planned=True),
    "moe of 8 bits": of_moe(recipe="mxfp8", save_act=True),
    "router": of_router(normalize=True),
    "unpermute": of_unpermute,
}
