"""What each recipe keeps for the backward, in bytes per row and expert; nothing is run for it."""

import moire
import torch

tokens, k, experts, hidden, width = 1024, 8, 16, 2048, 768  # Qwen3-30B's sizes, an eighth of it
rows = tokens * k
w1 = torch.empty(experts, 2 * width, hidden, dtype=torch.bfloat16, requires_grad=True)
w2 = torch.empty(experts, hidden, width, dtype=torch.bfloat16, requires_grad=True)
x = torch.empty(rows, hidden, dtype=torch.bfloat16)
groups = moire.Groups(splits=[rows // experts] * experts)
topk_idx, topk_weights = torch.arange(rows).view(tokens, k) % experts, torch.rand(tokens, k)

for name in ("bf16", "mxfp8", "mxfp8_fast", "fp8_block"):
    kept = []
    for options in ({"save_z": False}, {}, {"save_act": True}):
        options["recipe"] = name
        for function, *args in (
            (moire.moe, x[:tokens], w1, w2, topk_idx, topk_weights),
            (moire.grouped_mlp, x, w1, w2, groups),
        ):
            kept.append(moire.explain(function, *args, **options).saved_bytes / rows)
    print(f"| `{name}` | {' | '.join(f'{size:,.0f}' for size in kept)} |")
