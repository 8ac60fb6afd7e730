"""A GroupedTensor as arrays by name and tags: for state_dicts and files."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Optional, TypeVar

from .arrays import COMPUTE_DTYPES, framework_of
from .errors import invalid
from .grouped_storage import parts_of
from .groups import Groups
from .layouts import GluLayout
from .recipes import DIRECTIONS
from .values import choice, described, dtype_name, mapping, wrong

_Self = TypeVar("_Self", bound="Stateful")


class Stateful:
    """What a GroupedTensor is on disk."""

    def tags(self) -> dict[str, str]:
        """What the arrays do not say, as strings; from_state_dict makes the tensor of both."""
        found = {"format": self.form.name, "element": self.element}
        found["dtype"] = dtype_name(self)
        if self.layout is not None:
            found.update(glu_block=str(self.layout.block), glu_order=self.layout.order)
        if self.fractional_scales:
            found["fractional_scales"] = "true"
        return found

    def state_dict(self) -> OrderedDict[str, Any]:
        """Arrays by name, and `tags` in the metadata of the dict, as a module's state_dict has."""
        state = OrderedDict(self.arrays())
        if self.groups is not None:
            state["groups.offsets"] = self.groups.offsets_for(self._any.data)
        state._metadata = OrderedDict({"": self.tags()})
        return state

    def load_state_dict(self: _Self, state: Mapping[str, Any]) -> _Self:
        """Takes a state_dict's bytes into its own memory; its tags, if any, must be the same."""
        call = "load_state_dict"
        tags = _tags_of(call, state) or self.tags()
        for name, ours in self.tags().items():
            self.check_same(call, name, tags.get(name, "absent"), ours)
        return self.copy_(self.from_state_dict(state, {**self.tags(), **tags}))

    @classmethod
    def from_state_dict(
        cls: type[_Self], state: Mapping[str, Any], tags: Optional[Mapping[str, str]] = None
    ) -> _Self:
        """A tensor on the arrays of a state_dict; `tags` where the dict's metadata has none."""
        call = "from_state_dict"
        tags = _tags_of(call, state, tags)
        if tags is None:
            raise invalid(f"{call}: the dict has no metadata, needs the tags beside it")
        known = {part for name in DIRECTIONS for part in parts_of(name)} | {"groups.offsets"}
        unknown = [name for name in state if name not in known]
        if unknown:
            raise invalid(f"{call}: found {described(unknown[0])}, which no GroupedTensor has")
        fw, copies, more = framework_of(call, dict(state)), {}, {}
        for name in DIRECTIONS:
            present = [part for part in parts_of(name) if part in state]
            if len(present) == 1:
                raise invalid(f"{call}: has {present[0]} but not the other of {parts_of(name)}")
            if present:
                copies[name] = tuple(state[part] for part in present)
        for tag in ("dtype", "element", "format"):
            if tag not in tags:
                raise invalid(f"{call}: the tags have no {tag!r}")
        more["dtype"] = fw.dtype(choice(f"{call}: the tag 'dtype'", tags["dtype"], COMPUTE_DTYPES))
        if "glu_block" in tags:
            block = tags["glu_block"]
            if not re.fullmatch("[0-9]{1,18}", block):
                raise invalid(f"{call}: the tag 'glu_block' is {block!r}, must be a number")
            more["layout"] = GluLayout(int(block), tags.get("glu_order"))
        fractional = tags.get("fractional_scales", "false")
        choice(f"{call}: the tag 'fractional_scales'", fractional, ("true", "false"))
        if "groups.offsets" in state:
            rows = next((copy[0].shape[0] for copy in copies.values() if copy[0].ndim != 0), None)
            more["groups"] = Groups(offsets=state["groups.offsets"], capacity=rows)
        more.update(element=tags["element"], fractional_scales=fractional == "true")
        return cls(tags["format"], **copies, **more)


def _tags_of(call, state, tags=None):
    """The tags that are given, else those of a state_dict, else None."""
    mapping(f"{call}: state", state, "a dict of arrays by name")
    where = "tags"
    if tags is None:
        metadata = getattr(state, "_metadata", None)
        if metadata is None or "" not in mapping(f"{call}: the dict's metadata", metadata):
            return None
        where, tags = "the tags in the dict's metadata", metadata[""]
    for name, value in mapping(f"{call}: {where}", tags).items():
        if not isinstance(value, str):
            raise wrong(f"{call}: the tag {described(name)}", value, "a string")
    return tags
