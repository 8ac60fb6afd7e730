"""moire: the grouped MLP of mixture-of-experts models.

Stateless functions on Torch tensors (with gradients) and on NumPy arrays; modules are in moire.nn,
Hugging Face models in moire.hf. Without Torch the functions work on NumPy arrays, and moire.nn and
moire.hf say that they need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _abi
from .communicator import Communicator
from .context import check, info, settings, strict
from .dtypes import torch as _torch
from .errors import Code, Error, InvalidArgument, LibraryNotFound, OutOfMemory, Unsupported
from .explanation import Explanation, explain
from .files import load_safetensors, save_safetensors
from .functional import call, grouped_linear, grouped_mlp, grouped_mm, moe
from .gated import convert_glu, deinterleave_glu_tensor, glu, interleave_glu_tensor
from .gradients import grouped_linear_backward, grouped_mlp_backward
from .grouped_tensor import GroupedTensor, quantize
from .groups import Groups, OffsetsOutput, splits_to_offsets
from .layouts import Activation, GluLayout
from .prepared_weight import PreparedWeight
from .recipes import Recipe
from .routing import Plan, make_plan, permute, router, unpermute
from .weight_cache import WeightCache

if _torch is not None:
    from . import grouped_torch  # noqa: F401 (which GroupedTensor knows from then on)

if TYPE_CHECKING:
    from . import hf, nn
    from .expert_parallel import ExpertParallel

__all__ = ["ExpertParallel", "Communicator", "hf", "nn"]
__all__ += ["call", "grouped_linear", "grouped_mlp", "grouped_mm", "moe"]
__all__ += ["grouped_linear_backward", "grouped_mlp_backward"]
__all__ += ["Plan", "make_plan", "permute", "router", "unpermute"]
__all__ += ["Groups", "OffsetsOutput", "splits_to_offsets"]
__all__ += ["GroupedTensor", "PreparedWeight", "Recipe", "WeightCache", "quantize"]
__all__ += ["load_safetensors", "save_safetensors"]
__all__ += ["Activation", "GluLayout", "convert_glu", "glu"]
__all__ += ["deinterleave_glu_tensor", "interleave_glu_tensor"]
__all__ += ["Explanation", "check", "explain", "info", "settings", "strict"]
__all__ += ["Code", "Error", "InvalidArgument", "LibraryNotFound", "OutOfMemory", "Unsupported"]

__version__ = _abi.version


def __dir__() -> list[str]:
    """What is public; the modules behind it are not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_NEED_TORCH = {"nn": "nn", "hf": "hf", "ExpertParallel": "expert_parallel"}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        try:
            module = importlib.import_module(f".{_NEED_TORCH[name]}", __name__)
            return getattr(module, name, module)
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            needs = f"moire.{name} needs torch: pip install torch"
            raise ModuleNotFoundError(needs, name="torch") from e
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
