"""Other libraries, where they can be imported: DeepGEMM for the products of ragged rows (on a copy
of the rows that is padded as it needs), Transformer Engine's ops for the MLP, both also with FP8
blocks, SonicMoE for the layer. Where one is missing or refuses, the report says why.

A case says in `operands` what they may use; each function here returns {name: function}.
"""

import moire
import torch

from .case import no_grad


def join(case):
    """Adds to a case whatever can take it."""
    for name, make in _MAKERS.get(case.operands.get("kind"), {}).items():
        try:
            case.run[name] = make(case.operands)
        except Exception as e:  # import errors, and whatever a constructor does not like
            case.absent[name] = f"{type(e).__name__}: {str(e).splitlines()[0][:200]}"


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

    return run


def _deep_gemm_fp8(operands):
    import deep_gemm

    a, w = operands["a"].rowwise, operands["w"].rowwise
    codes, scales, owners = _padded(operands["tensors"], a.data.view(torch.uint8), a.scales)
    codes, e4m3 = codes.view(torch.float8_e4m3fn), w.data.view(torch.float8_e4m3fn)

    def run():
        d = torch.empty(len(codes), operands["n"], dtype=torch.bfloat16, device=codes.device)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((codes, scales), (e4m3, w.scales), d, owners)
        return [d]

    return run


def _transformer_engine(operands, recipe=None):
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch import ops

    x, w1, w2, probs = (operands[k] for k in ("x", "w1", "w2", "probs"))
    options = {"bias": False, "device": x.device, "dtype": x.dtype}
    experts, double_width, hidden = w1.shape
    fc1 = ops.GroupedLinear(experts, hidden, double_width, **options)
    fc2 = ops.GroupedLinear(experts, double_width // 2, hidden, **options)
    for layer, weights in ((fc1, w1), (fc2, w2)):
        for e, weight in enumerate(weights.detach()):
            getattr(layer, f"weight{e}").data.copy_(weight)
    mlp = ops.Sequential(fc1, ops.ScaledSwiGLU(), fc2)
    splits = torch.tensor(operands["tensors"].splits, device=x.device)

    def forward():
        with te.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
            return [mlp(x, splits, probs, splits)]

    return _finished(operands, forward, [x, *fc1.parameters(), *fc2.parameters(), probs])


def _transformer_engine_fp8(operands):
    """Its weights are quantised at each call."""
    from transformer_engine.common.recipe import Float8BlockScaling

    return _transformer_engine(operands, Float8BlockScaling())


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

    return _finished(operands, forward, [x, router, interleaved, w2])


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
    "fp8 mlp": "transformer_engine",
    "layer": "sonicmoe",
}
_MAKERS = {
    "rows": {"DeepGEMM, padded": _deep_gemm},
    "fp8 rows": {"DeepGEMM, padded": _deep_gemm_fp8},
    "mlp": {"Transformer Engine": _transformer_engine},
    "fp8 mlp": {"Transformer Engine": _transformer_engine_fp8},
    "layer": {"SonicMoE": _sonic_moe},
}
