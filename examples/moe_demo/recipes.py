"""What the demo compares. A further recipe is a further line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Recipe:
    name: str
    experts: str  # "loop": of F.linear over experts; "grouped_mm": torch's; "moire": moire.nn
    dtype: str  # of the operands inside the MoE layers; everything around them is FP32
    note: str
    products: str = "as_stored"  # what moire's products read: the recipe of moire.nn
    needs_bf16_instructions: bool = False
    is_extra: bool = False  # run only where it is asked for by name


# The first is the one that the others are compared with.
RECIPES = [
    Recipe("loop-fp32", "loop", "float32", "PyTorch loop over experts, FP32"),
    Recipe(
        "loop-bf16",
        "loop",
        "bfloat16",
        "PyTorch loop over experts, BF16",
        needs_bf16_instructions=True,
    ),
    Recipe("grouped_mm-fp32", "grouped_mm", "float32", "torch grouped_mm, FP32"),
    Recipe(
        "grouped_mm-bf16",
        "grouped_mm",
        "bfloat16",
        "torch grouped_mm, BF16",
        needs_bf16_instructions=True,
    ),
    Recipe("moire-fp32", "moire", "float32", "moire's MoE layer, FP32"),
    Recipe("moire-bf16", "moire", "bfloat16", "moire's MoE layer, BF16 operands, FP32 sums"),
    Recipe("moire-mxfp8", "moire", "bfloat16", "the same, products of 8-bit operands", "mxfp8"),
    *(
        Recipe(f"moire-{name}", "moire", "bfloat16", f"the same, {name}", name, is_extra=True)
        for name in ("mxfp8_fast", "fp8_block")
    ),
]
BASELINE = RECIPES[0]


@dataclass(frozen=True)
class Config:
    """Everything that decides a run, apart from the recipe."""

    hidden: int = 128
    layers: int = 4
    heads: int = 2
    experts: int = 32
    top_k: int = 2
    width: int = 256  # F: FC1 gives 2F values, gate and up
    context: int = 256
    batch: int = 4
    steps: int = 240
    learning_rate: float = 2e-3
    warmup: int = 60
    weight_decay: float = 0.1
    validations: int = 5  # along the run; the last one reads `final_sequences`
    sequences: int = 8
    final_sequences: int = 128
    seed: int = 1
    threads: int = 0  # 0: PyTorch's choice
    device: str = "cpu"

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.width


# A GPU's size: 302 million parameters in experts.
CUDA = {
    "hidden": 512,
    "layers": 6,
    "heads": 8,
    "experts": 32,
    "width": 1024,
    "context": 512,
    "batch": 32,
    "steps": 300,
    "learning_rate": 6e-4,
    "warmup": 75,
}

# Seconds instead of minutes: shows that everything runs, not how well it learns.
QUICK = {
    "hidden": 64,
    "layers": 2,
    "experts": 8,
    "width": 96,
    "context": 64,
    "batch": 4,
    "steps": 60,
    "learning_rate": 6e-3,
    "warmup": 15,
    "final_sequences": 16,
}


def has_bf16_instructions() -> bool:
    """Whether this CPU multiplies BF16 itself; without that PyTorch's BF16 is many times slower."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def recipes_for_this_machine(device: str) -> list[Recipe]:
    fast_bf16 = device != "cpu" or has_bf16_instructions()
    return [r for r in RECIPES if not r.is_extra and (fast_bf16 or not r.needs_bf16_instructions)]
