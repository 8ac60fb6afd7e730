"""Other libraries, where they can be imported: DeepGEMM for the products of ragged rows (on a copy
of the rows that is padded as it needs), Transformer Engine's ops for the MLP, both also with FP8
blocks, SonicMoE for the layer. Where one is missing or refuses, the report says why.

A case says in `operands` what they may use; each maker here returns a function and what turns the
results of that into torch's, to be compared with those.
"""

import os
from functools import partial

import moire
import torch

from .case import no_grad


def join(case):
    """Adds to a case whatever can take it."""
    for name, make in makers(case.operands.get("kind")).items():
        try:
            case.run[name], case.comparable[name] = make(case.operands)
        except Exception as e:  # import errors, and whatever a constructor does not like
            case.absent[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"


def makers(kind):
    return _MAKERS.get(kind, {})


def _padded(tensors, *matrices):
    """Copies whose groups begin at the multiples that DeepGEMM needs, and whose group a row is."""
    import deep_gemm

    alignment = deep_gemm.get_mk_alignment_for_contiguous_layout()
    copies, owners, start = [[] for _ in matrices], [], 0
    for e, count in enumerate(tensors.splits):
        padding = -count % alignment
        for copy, matrix in zip(copies, matrices):
            copy += [matrix[start : start + count], matrix.new_zeros(padding, matrix.shape[1])]
        owners += [e] * count + [-1] * padding
        start += count
    owners = torch.tensor(owners, dtype=torch.int32, device=matrices[0].device)
    return *map(torch.cat, copies), owners


def _deep_gemm(operands):
    import deep_gemm

    rows, owners = _padded(operands["tensors"], operands["a"])
    multiply = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    if operands["is_transposed"]:
        multiply = deep_gemm.m_grouped_bf16_gemm_nn_contiguous

    def run():
        d = rows.new_empty(len(rows), operands["n"])
        multiply(rows, operands["w"], d, owners)
        return [d]

    return run, partial(_without_padding, owners)


def _deep_gemm_fp8(operands):
    import deep_gemm

    a, w = operands["a"].rowwise, operands["w"].rowwise
    codes, scales, owners = _padded(operands["tensors"], a.data.view(torch.uint8), a.scales)
    codes, e4m3 = codes.view(torch.float8_e4m3fn), w.data.view(torch.float8_e4m3fn)

    def run():
        d = torch.empty(len(codes), operands["n"], dtype=torch.bfloat16, device=codes.device)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes, scales), (e4m3, w.scales), d, owners)
        return [d]

    return run, partial(_without_padding, owners)


def _without_padding(owners, results):
    return [d[owners >= 0] for d in results]


def _transformer_engine(operands, recipe=None, are_kept=False, adds=False):
    """Weights are packed, as one parameter: its listed ones are 64 experts at most. Of a recipe
    they are quantised at each call, or `are_kept` in FP8. `adds`: to ours' main_grad."""
    os.environ.setdefault("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import ops

    x, w1, w2, probs = (operands[k] for k in ("x", "w1", "w2", "probs"))
    options = {"bias": False, "device": x.device, "dtype": x.dtype, "single_grouped_weight": True}
    layers = []
    for w in (w1, w2):
        experts, columns, k = w.shape
        with te.quantized_model_init(enabled=are_kept, recipe=recipe):
            layer = ops.GroupedLinear(
                experts, k, columns, accumulate_into_main_grad=adds, **options
            )
        _set_weights(layer.weight, w.detach())
        if adds:
            layer.weight.main_grad, layer.weight.grad_added_to_main_grad = w.main_grad, False
        layers.append(layer)
    mlp = ops.Sequential(layers[0], ops.ScaledSwiGLU(), layers[1])
    splits = torch.tensor(operands["tensors"].splits, device=x.device)

    def forward():
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            return [mlp(x, splits, probs, splits)]

    def comparable(results):
        if len(results) == 1 or adds:
            return results[:1]
        grads = [getattr(g, "rowwise_data", g).view(w.shape) for g, w in zip(results[1:], (w1, w2))]
        return [results[0], *grads, results[3]]

    leaves = [x, layers[0].weight, layers[1].weight, probs]
    return _finished(operands, forward, leaves), comparable


@torch.no_grad()
def _set_weights(parameter, weights):
    for part, weight in zip(parameter.quantized_tensors, weights):
        if parameter.quantizer is None:
            part.copy_(weight)
        else:
            part.copy_from_storage(parameter.quantizer(weight))


def _transformer_engine_fp8(operands, **how):
    from transformer_engine.common.recipe import Float8BlockScaling

    return _transformer_engine(operands, Float8BlockScaling(), **how)


def _sonic_moe(operands):
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    x, router, w1, w2, k = (operands[n] for n in ("x", "router", "w1", "w2", "top_k"))
    interleaved = moire.interleave_glu_tensor(w1.detach(), 1, 1).requires_grad_()
    is_inference = operands["grad_y"] is None

    def forward():
        stream = torch.cuda.current_stream().cuda_stream
        weights = interleaved.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
        layer = (x, router, *weights, k, stream, ActivationType.SWIGLU, is_inference)
        return [moe_TC_softmax_topk_layer(*layer)[0]]

    def comparable(results):
        if is_inference:
            return results
        grad_w1 = moire.deinterleave_glu_tensor(results[2], 1, 1)
        return [*results[:2], grad_w1, results[3]]

    return _finished(operands, forward, [x, router, interleaved, w2]), comparable


def _finished(operands, forward, leaves):
    """With the backward where the case has a gradient for it."""
    grad_y = operands["grad_y"]
    if grad_y is None:
        return no_grad(forward)
    return lambda: torch.autograd.grad(forward()[0], leaves, grad_y)


MODULES = {
    "rows": "deep_gemm",
    "fp8 rows": "deep_gemm",
    "mlp": "transformer_engine",
    "mlp backward": "transformer_engine",
    "fp8 mlp": "transformer_engine",
    "layer": "sonicmoe",
}
_TE = "Transformer Engine"
_ADDED = f"{_TE}, FP32 added"
_MAKERS = {
    "rows": {"DeepGEMM, padded": _deep_gemm},
    "fp8 rows": {"DeepGEMM, padded": _deep_gemm_fp8},
    "mlp": {_TE: _transformer_engine},
    "mlp backward": {_TE: _transformer_engine, _ADDED: partial(_transformer_engine, adds=True)},
    "fp8 mlp": {
        _TE: _transformer_engine_fp8,
        f"{_TE}, weights kept": partial(_transformer_engine_fp8, are_kept=True),
        _ADDED: partial(_transformer_engine_fp8, are_kept=True, adds=True),
    },
    "layer": {"SonicMoE": _sonic_moe},
}
