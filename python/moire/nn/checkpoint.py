"""A checkpoint's weights, and their tags, turned into the layouts that a module was built with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch

from ..arrays import Torch, check_array
from ..errors import invalid
from ..gated import convert_glu
from ..grouped_tensor import GroupedTensor
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
            if not isinstance(tensor, GroupedTensor):
                check_array(Torch, call, key, tensor, "as a module's parameters are")
            if name == "weight" and orientation != layer.weight_layout:
                tensor = _transposed(tensor)
            if layer.glu_layout is not None:
                is_last = name == "bias" or layer.weight_layout == "in_out"
                theirs = GluLayout.parse(tags["glu_layout"], f"{call}: the glu_layout of {key}")
                if theirs != layer.glu_layout:
                    tensor = convert_glu(tensor, theirs, layer.glu_layout, -1 if is_last else -2)
            state[key] = tensor


def _transposed(tensor):
    """Every matrix; in 8 bits with its bytes, as blocks along rows become such down columns."""
    if not isinstance(tensor, GroupedTensor):
        return tensor.transpose(-2, -1).contiguous()
    turned = tensor.mapped(_transposed)
    return turned if tensor.form.is_tiled else turned.like(turned.columnwise, turned.rowwise)


def convert_optimizer_state_dict(
    optimizer_state: Mapping[str, Any],
    state_dict: Mapping[str, Any],
    module: torch.nn.Module,
    names: Optional[Sequence[str]] = None,
    **layouts: Any,
) -> dict[str, Any]:
    """An optimizer.state_dict() for the parameters of convert_state_dict(state_dict, module,
    **layouts): moments, and what else has the shape of its parameter, are turned as that is.
    `names` of the parameters, in the order in which the optimizer has them; None: its param_names.
    """
    call = "convert_optimizer_state_dict"
    mapping(f"{call}: optimizer_state", optimizer_state, "what optimizer.state_dict() returned")
    groups = optimizer_state["param_groups"]
    if names is None:
        names = [name for group in groups for name in group.get("param_names", ())]
    order = [index for group in groups for index in group["params"]]
    if len(names) != len(order):
        raise invalid(f"{call}: names has {len(names)}, but the optimizer {len(order)} parameters")
    state = {index: dict(entries) for index, entries in optimizer_state["state"].items()}
    for index, name in zip(order, names):
        like, entries = state_dict.get(name), state.get(index, {})
        for entry, value in entries.items():
            if getattr(value, "shape", None) == getattr(like, "shape", 0):
                alone = OrderedDict({name: value})
                alone._metadata = getattr(state_dict, "_metadata", None)
                entries[entry] = convert_state_dict(alone, module, **layouts)[name]
    return {**optimizer_state, "state": state}
