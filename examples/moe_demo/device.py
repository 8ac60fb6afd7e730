"""Whether the demo can run on a GPU, or what is missing."""

from __future__ import annotations

from .recipes import RECIPES, Config, Recipe


def why_no_cuda() -> str:
    """Empty if a GPU can train the moire recipes; otherwise the first thing that is missing."""
    try:
        import moire
    except ImportError as error:
        return str(error)
    import torch

    info = moire.info()
    if info["cuda"].startswith("off"):
        return f"this build of moire has no CUDA: {info['cuda'].partition(': ')[2]}"
    if not any(device["device"] == "cuda" for device in info["devices"]):
        return "moire was built with CUDA, but this machine has no NVIDIA GPU that it can use"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA or sees no GPU; install a torch with CUDA"
    return why_not(next(r for r in RECIPES if r.name == "moire-bf16"))


def why_not_so_many(ranks: int) -> str:
    """Empty if each rank can have a GPU."""
    import torch

    found = torch.cuda.device_count()
    return "" if found >= ranks else f"{ranks} ranks need as many GPUs, but there are {found}"


def why_not(recipe: Recipe, device: str = "cuda") -> str:
    """What one small forward and backward of a recipe's MoE layer says on the device."""
    import moire
    import torch

    from .experts import make_moe

    layer = make_moe(recipe, Config(hidden=64, width=64, experts=4)).to(device)
    for weight in layer.weights():
        torch.nn.init.zeros_(weight)
    # What a torch says whose grouped_mm is missing, or not for this device and dtype.
    refusals = (AttributeError, RuntimeError) if recipe.experts == "grouped_mm" else moire.Error
    try:
        layer(torch.zeros(8, 64, device=device, requires_grad=True)).sum().backward()
        moire.check()
    except refusals as error:
        version = f"torch {torch.__version__}: " if recipe.experts == "grouped_mm" else ""
        return version + str(error).split("\n", 1)[0]
    return ""
