"""A checkpoint's weights in another layout: what a state_dict's tags say is turned into what a
module was built with, the tags with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Optional

import torch

from ..arrays import Torch, check_array
from ..gated import convert_glu
from ..layouts import GluLayout, GluLayoutLike, check_weight_layout
from ..values import mapping, wrong
from .linear import GroupedLinear


def convert_state_dict(
    state_dict: Mapping[str, Any],
    module: torch.nn.Module,
    *,
    weight_layout: Optional[str] = None,
    glu_layout: Optional[GluLayoutLike] = None,
) -> OrderedDict[str, Any]:
    """A state_dict that `module` loads: every GroupedLinear's weights and biases in the orientation
    and in the gate/up layout that it was built with, and the tags that say so. All else is taken
    over; nothing of `state_dict` is written.

    weight_layout and glu_layout say how the checkpoint's lie where it has no tags (safetensors);
    without them, such weights are believed to be as `module` was built.
    """
    call = "convert_state_dict"
    result = OrderedDict(mapping(f"{call}: state_dict", state_dict, "a dict of tensors by name"))
    if not isinstance(module, torch.nn.Module):
        raise wrong(f"{call}: module", module, "a torch.nn.Module")
    given = {}
    if weight_layout is not None:
        given["weight_layout"] = check_weight_layout(call, weight_layout)
    if glu_layout is not None:
        given["glu_layout"] = str(GluLayout.of(glu_layout, f"{call}: glu_layout"))
    metadata = getattr(state_dict, "_metadata", None) or {}
    result._metadata = OrderedDict(mapping(f"{call}: the dict's metadata", metadata))
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, GroupedLinear):
            tags = {**given, **mapping(f"{call}: the tags of {name!r}", metadata.get(name, {}))}
            _convert(call, result, f"{name}." if name else "", layer, tags)
            result._metadata[name] = {**tags, **layer.tags()}
    return result


def _convert(call, state, prefix, layer, tags):
    """Weights and biases of one layer, packed or listed, in place in the dict."""
    ours = layer.tags()
    tags = {name: tags.get(name, value) for name, value in ours.items()}
    if tags == ours:
        return
    orientation = check_weight_layout(f"{call}: {prefix or 'the module'}", tags["weight_layout"])
    for name in ("weight", "bias"):
        for key in layer.keys_of(prefix + name):
            if key not in state:
                continue
            tensor = state[key]
            check_array(Torch, call, key, tensor, "as a module's parameters are")
            if name == "weight" and orientation != layer.weight_layout:
                tensor = tensor.transpose(-2, -1).contiguous()
            if layer.glu_layout is not None:
                is_last = name == "bias" or layer.weight_layout == "in_out"
                theirs = GluLayout.parse(tags["glu_layout"], f"{call}: the glu_layout of {key}")
                tensor = convert_glu(tensor, theirs, layer.glu_layout, -1 if is_last else -2)
            state[key] = tensor
