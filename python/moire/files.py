"""GroupedTensors and arrays in safetensors files; tags go into the metadata of the file."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from .arrays import DEFAULT, Numpy, Torch, framework_of
from .errors import Code, InvalidArgument, error, invalid
from .grouped_tensor import GroupedTensor
from .values import choice, dtype_name, file_path, mapping, wrong

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
_TAGS, _OF_MODULES = "moire.", "moire"


def save_safetensors(tensors: Mapping[str, Any], path: Union[str, os.PathLike[str]]) -> None:
    """GroupedTensors and arrays, a dict by name, into one file; tags go into its metadata, those of
    a module's state_dict too. It is written beside `path` and renamed: never half-written.
    """
    call = "save_safetensors"
    _safetensors(call)
    if not isinstance(tensors, dict) or not tensors:
        raise wrong(f"{call}: tensors", tensors, "a dict of tensors by name")
    for name in tensors:
        if not isinstance(name, str):
            raise wrong(f"{call}: a tensor's name", name, "a string")
    path = file_path(f"{call}: path", path)
    arrays, metadata = {}, {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, GroupedTensor):
            arrays[name] = tensor
        else:
            metadata[_TAGS + name] = json.dumps(tensor.tags())
            arrays.update({f"{name}.{part}": array for part, array in tensor.state_dict().items()})
            # Its parts have its name before theirs, so nothing else may begin with that.
            for other in tensors:
                if other.startswith(f"{name}."):
                    raise invalid(
                        f"{call}: {other!r} begins as the parts of the GroupedTensor {name!r} do, "
                        "must have another name"
                    )
    fw = framework_of(call, arrays)
    arrays = _with_memory_of_their_own(call, fw, arrays)
    target = Path(os.path.realpath(path))  # a link stays
    beside = target.with_name(f".moire.{uuid.uuid4().hex}")
    try:
        if target.is_symlink() or (target.exists() and not target.is_file()):
            raise OSError(errno.EINVAL, "is there and no file, which could be replaced")
        if of_modules := getattr(tensors, "_metadata", None):
            metadata[_OF_MODULES] = json.dumps(of_modules)
        kind = "torch" if fw is Torch else "numpy"
        save_file = importlib.import_module(f"safetensors.{kind}").save_file
        beside.touch()  # the system's word on what stands in the way
        mode = (target if target.exists() else beside).stat().st_mode
        save_file(arrays, beside, metadata)
        beside.chmod(mode & 0o777)  # safetensors has one of its own
        os.replace(beside, target)
    except Exception as e:
        raise error(Code.IO, f"{call}: {path}: {getattr(e, 'strerror', e)}") from e
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _with_memory_of_their_own(call, fw, arrays):
    """Contiguous arrays no two of which share memory, as the file has them: of tensors with the
    same groups, of views, and of one tensor under two names all but one are copied.
    """
    seen, result = set(), {}
    for name, array in arrays.items():
        dtype = dtype_name(array)
        if dtype not in _SAVED_DTYPES:
            raise invalid(
                f"{call}: {name!r} is {dtype}, must be one of {', '.join(sorted(_SAVED_DTYPES))}"
            )
        if getattr(array, "is_meta", False):
            raise invalid(f"{call}: {name!r} is on the device 'meta', must have values")
        array = fw.with_memory_of_its_own(fw.contiguous(array))
        address = fw.address(array)
        result[name] = fw.copy(array) if address in seen else array
        seen.add(address)
    return result


def load_safetensors(
    path: Union[str, os.PathLike[str]], framework: Optional[str] = None
) -> dict[str, Any]:
    """The dict that save_safetensors was given, with its tags, on the CPU. `framework`: "torch", or
    "numpy", which is the default where there is no Torch.
    """
    call = "load_safetensors"
    path = file_path(f"{call}: path", path)
    safetensors = _safetensors(call)
    fw, of_name = DEFAULT, {"torch": Torch, "numpy": Numpy}
    if framework is not None:
        fw = of_name[choice(f"{call}: framework", framework, of_name)]
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
        found = safetensors.deserialize(path.read_bytes())
    except Exception as e:
        raise error(Code.IO, f"{call}: {path}: {e}") from e
    arrays, tensors = {name: _array(fw, call, path, name, **entry) for name, entry in found}, {}
    for name, text in ((k[len(_TAGS) :], v) for k, v in metadata.items() if k.startswith(_TAGS)):
        parts = [key for key in arrays if key.startswith(f"{name}.")]
        state = {key[len(name) + 1 :]: arrays.pop(key) for key in parts}
        try:
            tensors[name] = GroupedTensor.from_state_dict(state, json.loads(text))
        except (InvalidArgument, ValueError, RecursionError) as e:
            raise error(Code.IO, f"{call}: {path}: {name!r} is no GroupedTensor: {e}") from e
    result = OrderedDict({**arrays, **tensors})
    if _OF_MODULES in metadata:
        try:
            of_modules = mapping("'moire'", json.loads(metadata[_OF_MODULES]))
            result._metadata = {n: mapping(f"{n!r}", tags) for n, tags in of_modules.items()}
        except (InvalidArgument, ValueError, RecursionError) as e:
            raise error(Code.IO, f"{call}: {path}: in the file's metadata {e}") from e
    return result


def _array(fw, call, path, name, dtype, shape, data):
    if dtype not in _FILE_DTYPES:
        raise error(
            Code.IO,
            f"{call}: {path}: {name!r} is {dtype}, must be one of {', '.join(_FILE_DTYPES)}",
        )
    memory = fw.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    return memory.view(fw.dtype(_FILE_DTYPES[dtype])).reshape(shape)


def _safetensors(call):
    try:
        import safetensors
    except ImportError as e:
        raise ImportError(f"{call}: needs safetensors: pip install safetensors") from e
    return safetensors
