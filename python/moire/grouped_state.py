"""A GroupedTensor as arrays by name and tags: for state_dicts, and for safetensors files."""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Optional, TypeVar, Union

import numpy as np

from .arrays import Numpy, Torch, default_framework, framework_of
from .errors import Code, InvalidArgument, error, invalid
from .formats import DIRECTIONS
from .groups import Groups
from .layouts import GluLayout
from .values import choice, described, file_path, mapping

# Element types of safetensors, by the names that NumPy and Torch share; E8M0 scales are bytes.
_FILE_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "uint8",
    "BOOL": "bool",
    "I8": "int8",
    "U8": "uint8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
}
_SAVED_DTYPES = {*_FILE_DTYPES.values(), "float8_e8m0fnu"}
_TAGS = "moire."
_FLAGS = ("true", "false")
_SOURCE_DTYPES = ("float32", "bfloat16", "float16")


_Self = TypeVar("_Self", bound="Stateful")


class Stateful:
    """What a GroupedTensor is on disk."""

    def tags(self) -> dict[str, str]:
        """What the arrays do not say, as strings; from_state_dict makes the tensor of both."""
        found = {"format": self.form.name, "element": self.element}
        found["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.layout is not None:
            found.update(glu_block=str(self.layout.block), glu_order=self.layout.order)
        if self.fractional_scales:
            found["fractional_scales"] = "true"
        return found

    def state_dict(self) -> OrderedDict[str, Any]:
        """Arrays by name, and `tags` in the metadata of the dict, as a module's state_dict has."""
        state = OrderedDict(self.arrays())
        if self.groups is not None:
            state["groups.offsets"] = self.groups.offsets_as(self._fw.kind)
        state._metadata = OrderedDict({"": self.tags()})
        return state

    def load_state_dict(self: _Self, state: Mapping[str, Any]) -> _Self:
        """Takes the bytes of a state_dict into its own memory. Tags, where the dict has them, must
        be this tensor's: format, element, layout of gate and up.
        """
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
        framework_of(call, dict(state))
        copies = {}
        for name in DIRECTIONS:
            present = [part for part in parts_of(name) if part in state]
            if len(present) == 1:
                raise invalid(f"{call}: has {present[0]} but not the other of {parts_of(name)}")
            if present:
                copies[name] = tuple(state[part] for part in present)
        missing = sorted({"format", "element", "dtype"} - set(tags))
        if missing:
            raise invalid(f"{call}: the tags have no {missing[0]!r}")
        dtype = choice(f"{call}: the tag 'dtype'", tags["dtype"], _SOURCE_DTYPES)
        offsets, layout = state.get("groups.offsets"), None
        if "glu_block" in tags:
            block = tags["glu_block"]
            if not re.fullmatch("[0-9]{1,18}", block):
                raise invalid(f"{call}: the tag 'glu_block' is {block!r}, must be a number")
            layout = GluLayout(int(block), tags.get("glu_order"))
        fractional = tags.get("fractional_scales", "false")
        rows = next((copy[0].shape[0] for copy in copies.values() if copy[0].ndim != 0), None)
        result = cls(
            tags["format"],
            **copies,
            groups=None if offsets is None else Groups(offsets=offsets, capacity=rows),
            layout=layout,
            element=tags["element"],
            fractional_scales=choice(f"{call}: the tag 'fractional_scales'", fractional, _FLAGS)
            == "true",
        )
        result.dtype = result._fw.dtype(dtype)
        return result


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
            raise invalid(
                f"{call}: the tag {described(name)} is {described(value)}, must be a string"
            )
    return tags


def parts_of(name):
    return f"{name}.data", f"{name}.scales"


def save_safetensors(tensors: Mapping[str, Any], path: Union[str, os.PathLike[str]]) -> None:
    """GroupedTensors and arrays, a dict by name, into one file; tags go into its metadata. The file
    is written beside `path` and renamed, so that a failure leaves nothing half-written.
    """
    call = "save_safetensors"
    _safetensors(call)
    if not isinstance(tensors, dict) or not tensors:
        raise invalid(f"{call}: tensors is {described(tensors)}, must be a dict of tensors by name")
    for name in tensors:
        if not isinstance(name, str):
            raise invalid(f"{call}: a tensor's name is {described(name)}, must be a string")
    path = file_path(f"{call}: path", path)
    arrays, metadata = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Stateful):
            metadata[_TAGS + name] = json.dumps(tensor.tags())
            arrays.update({f"{name}.{part}": array for part, array in tensor.state_dict().items()})
        else:
            arrays[name] = tensor
    _check_names(call, tensors)
    fw = framework_of(call, arrays)
    arrays = _with_memory_of_their_own(call, fw, arrays)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if fw is Torch:
            from safetensors.torch import save_file
        else:
            from safetensors.numpy import save_file
        beside.touch()  # the system's word on what stands in the way
        save_file(arrays, beside, metadata)
        os.replace(beside, path)
    except OSError as e:
        raise error(Code.IO, f"{call}: {path}: {e.strerror}") from e
    except Exception as e:
        raise error(Code.IO, f"{call}: {path}: {e}") from e
    finally:
        if beside.parent.is_dir():
            beside.unlink(missing_ok=True)


def _with_memory_of_their_own(call, fw, arrays):
    """Contiguous arrays no two of which share memory, as the file has them: of tensors with the
    same groups, of views, and of one tensor under two names all but one are copied.
    """
    seen, result = set(), {}
    for name, array in arrays.items():
        dtype = str(array.dtype).removeprefix("torch.")
        if dtype not in _SAVED_DTYPES:
            raise invalid(
                f"{call}: {name!r} is {dtype}, must be one of {', '.join(sorted(_SAVED_DTYPES))}"
            )
        if getattr(array, "is_meta", False):
            raise invalid(f"{call}: {name!r} is on the device 'meta', must have values")
        array = fw.with_memory_of_its_own(fw.contiguous(array))
        address = fw.views.address(array)
        result[name] = fw.copy(array) if address in seen else array
        seen.add(address)
    return result


def _check_names(call, tensors):
    """A GroupedTensor's parts have its name before theirs, so nothing else may begin with that."""
    for grouped in (name for name, tensor in tensors.items() if isinstance(tensor, Stateful)):
        for name in tensors:
            if name.startswith(f"{grouped}."):
                raise invalid(
                    f"{call}: {name!r} begins as the parts of the GroupedTensor {grouped!r} do, "
                    "must have another name"
                )


def load_safetensors(
    path: Union[str, os.PathLike[str]], framework: Optional[str] = None
) -> dict[str, Any]:
    """The dict that save_safetensors was given, on the CPU. `framework`: "torch", or "numpy", which
    is the default where there is no Torch.
    """
    call = "load_safetensors"
    path = file_path(f"{call}: path", path)
    safetensors = _safetensors(call)
    fw = default_framework()
    if framework is not None:
        name = choice(f"{call}: framework", framework, ("torch", "numpy"))
        fw = Torch if name == "torch" else Numpy
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        found = safetensors.deserialize(path.read_bytes())
    except Exception as e:
        raise error(Code.IO, f"{call}: {path}: {e}") from e
    arrays = {name: _array(fw, call, path, name, **entry) for name, entry in found}
    tensors = {}
    for key, text in metadata.items():
        if key.startswith(_TAGS):
            name = key[len(_TAGS) :]
            tensors[name] = _grouped(call, path, name, text, arrays)
    return {**arrays, **tensors}


def _grouped(call, path, name, text, arrays):
    """The GroupedTensor of these tags; its parts leave `arrays`."""
    from .grouped_tensor import GroupedTensor

    prefix = f"{name}."
    state = {key[len(prefix) :]: arrays.pop(key) for key in list(arrays) if key.startswith(prefix)}
    try:
        return GroupedTensor.from_state_dict(state, json.loads(text))
    except (InvalidArgument, ValueError, RecursionError) as e:
        raise error(Code.IO, f"{call}: {path}: {name!r} is no GroupedTensor: {e}") from e


def _array(fw, call, path, name, dtype, shape, data):
    if dtype not in _FILE_DTYPES:
        raise error(
            Code.IO,
            f"{call}: {path}: {name!r} is {dtype}, must be one of {', '.join(_FILE_DTYPES)}",
        )
    memory = np.frombuffer(bytearray(data), np.uint8)
    return fw.of_bytes(memory, _FILE_DTYPES[dtype]).reshape(shape)


def _safetensors(call):
    try:
        import safetensors
    except ImportError as e:
        raise ImportError(f"{call}: needs safetensors: pip install safetensors") from e
    return safetensors
