"""Router and MoE: a whole mixture-of-experts layer."""

import torch

from ..errors import invalid
from ..routing import router


class Router(torch.nn.Module):
    """Linear scores in FP32, then the k best experts of each token and their weights (see
    moire.router).

    expert_bias: a buffer [E] added for the choice only (DeepSeek-V3's load balancing), zeros at
    first.
    """

    def __init__(
        self,
        hidden,
        num_experts,
        k,
        *,
        kind="softmax",
        normalize=True,
        scale=1.0,
        expert_bias=False,
        device=None,
        dtype=None,
    ):
        super().__init__()
        self.k, self.kind, self.normalize, self.scale = k, kind, normalize, scale
        self.weight = torch.nn.Parameter(
            torch.empty(num_experts, hidden, device=device, dtype=dtype)
        )
        bias = torch.zeros(num_experts, device=device, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self):
        bound = self.weight.shape[1] ** -0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x):
        """x [T, H]: (topk_idx [T, k], topk_weights [T, k] FP32)."""
        with torch.autocast(x.device.type, enabled=False):
            logits = torch.nn.functional.linear(x.float(), self.weight.float())
        options = {"kind": self.kind, "normalize": self.normalize, "scale": self.scale}
        return router(logits, self.k, expert_bias=self.expert_bias, **options)

    def extra_repr(self):
        experts, hidden = self.weight.shape
        return f"{hidden}, {experts}, k={self.k}, {self.kind}, normalize={self.normalize}"


class MoE(torch.nn.Module):
    """Router, experts (a GroupedMLP) and, beside them, an optional shared expert: any module of x.

    `router` may be any module that returns (topk_idx, topk_weights) for x [T, H].
    """

    def __init__(self, experts, router, shared=None):
        super().__init__()
        scores = router.weight.shape[0] if isinstance(router, Router) else experts.num_groups
        if scores != experts.num_groups:
            raise invalid(
                f"MoE: the router scores {scores} experts but there are {experts.num_groups}"
            )
        self.experts, self.router, self.shared = experts, router, shared

    def forward(self, x):
        """x [..., H], y the same."""
        tokens = x.reshape(-1, x.shape[-1])
        y = self.experts.route(tokens, *self.router(tokens)).view(x.shape)
        return y if self.shared is None else y + self.shared(x)
