"""The GroupedTensor of Torch arrays: a torch.Tensor, of the shape, type and device of the values
that it stands for, so that autograd carries its gradient and a module may hold it as a parameter.

It is a wrapper, whose memory is that of its copies. The methods of GroupedTensor and what
_OPERATIONS names work on those. Any other operation of Torch that makes something new computes with
the decoded values, and warns of it once; one that would overwrite it or show it otherwise fails.
"""

from __future__ import annotations

import functools
import warnings
from copy import deepcopy
from multiprocessing.reduction import ForkingPickler
from typing import Any, Optional

import torch
from torch.utils._pytree import tree_map_only

from . import grouped_storage, tapes, trained
from .arrays import Torch, on_device
from .autograd import followed, through
from .context import restored_after_explaining
from .errors import invalid, unsupported
from .grouped_storage import Copy, Kind, source_of
from .grouped_tensor import GroupedTensor
from .groups import Groups
from .recipes import Format
from .values import described

_aten = torch.ops.aten
_counting = functools.partial(  # writes into arrays, below autograd, through views made there too
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
)
_INNER = ("_rowwise_data", "_rowwise_scales", "_columnwise_data", "_columnwise_scales", "_offsets")


class TorchGroupedTensor(trained.Trained, torch.Tensor):
    """A GroupedTensor on Torch arrays; moire.GroupedTensor(...) makes it."""

    device, ndim = torch.Tensor.device, torch.Tensor.ndim
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(kind: Kind, rowwise: Any, columnwise: Any, groups: Optional[Groups]) -> GroupedTensor:
        """As `made` of grouped_tensor.py, whoever compiles."""
        data = (rowwise or columnwise).data
        options = {"dtype": kind.dtype, "device": data.device, "storage_size": 0}
        wrapper = torch.Tensor._make_wrapper_subclass(TorchGroupedTensor, data.shape, **options)
        torch._C._set_throw_on_mutable_data_ptr(wrapper)  # who would write there ends the process
        return wrapper.hold(kind, rowwise, columnwise, groups)

    # ---- its gradient, which is autograd's matter

    @property
    def _carrier(self):
        return self

    @property
    def _known(self):
        """Itself to tapes.py; nothing that it knows where versions are compared at each call."""
        return NotImplemented if self._versions else self

    def written(self) -> GroupedTensor:
        if not self.is_leaf:
            self.detach_()
        self._versions = {}
        Torch.written(self, self._whole)
        return self

    @property
    def _version(self) -> int:
        """Of the writes into its arrays, which t[g] and detach() show as well."""
        return sum(array._version for _, array in self.arrays())

    detach = torch.Tensor.detach

    def about_to_write(self, call: str, wants_gradient: bool = False) -> None:
        super().about_to_write(call, wants_gradient)
        data = self._any.data
        is_fake = type(data) is not torch.Tensor and hasattr(data, "fake_mode")
        if torch.compiler.is_compiling() or is_fake:
            # Of what a graph does to its inputs bytes come out, neither gradients nor groups.
            if wants_gradient or self.requires_grad or self.groups is not None:
                raise unsupported(
                    f"{call}: a GroupedTensor with groups or with a gradient that a graph of "
                    f"torch.compile was given cannot be overwritten inside the graph; do it outside"
                )
        elif self.is_leaf and self.requires_grad and torch.is_grad_enabled():
            raise invalid(
                f"{call}: the GroupedTensor is a leaf that requires grad and would be overwritten; "
                f"write inside torch.no_grad()"
            )

    @property
    def _history(self):
        twin = None
        if not self.is_leaf:
            twin = GroupedTensor.detach(self)
            _follow_always(self, twin)
        return twin, self._versions

    @_history.setter
    def _history(self, before):
        twin, versions = before
        self.written()
        if twin is not None:
            _follow_always(twin, self)
        self._versions = versions

    # ---- what Torch does with tensors

    @property
    def data(self) -> GroupedTensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Any) -> None:
        """Has the memory of another GroupedTensor from now on."""
        if not isinstance(other, TorchGroupedTensor):
            raise invalid(
                f"data: {described(other)} has no bytes for a GroupedTensor; inside "
                f"torch.no_grad(), parameter.copy_(values) quantises them"
            )
        self._check_alike("data", other, hint="")
        restored_after_explaining(self, "data", "_versions")
        view = other.detach()
        torch.Tensor.data.__set__(self, view)
        kind = other.kind._replace(layout=other.layout or self.layout)
        self.hold(kind, view.rowwise, view.columnwise, None)
        self._groups_of_memory, self._whole = view._groups_of_memory, view._whole

    def copy_(self, other: Any, non_blocking: bool = False) -> GroupedTensor:
        """As of any GroupedTensor; or the values of an array of its shape, wherever, quantised."""
        is_array = isinstance(other, torch.Tensor) and not isinstance(other, GroupedTensor)
        if is_array and other.dtype in Torch.compute_dtypes:
            return self.quantize_(on_device(other, self.device, non_blocking))
        return super().copy_(other, non_blocking)

    def share_memory_(self) -> GroupedTensor:
        """Its bytes, and the offsets of its groups, in memory that processes share; other groups,
        which copy_() may bring, are not shared. Nothing on a GPU, as of Torch's tensors.
        """
        if self.device.type == "cuda":
            return self
        offsets = _host_offsets(self)
        if offsets is not None and offsets is not self.groups.offsets:  # NumPy's
            self.groups = Groups.over(offsets, self.groups.capacity)
        for array in _memory(self):
            array.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(array.is_shared() for array in _memory(self))

    def __deepcopy__(self, memo: Any) -> GroupedTensor:
        """With gradient and attributes; as of Torch's parameters, without."""
        if id(self) not in memo:
            copy = self.clone()
            memo[id(self)] = copy = copy.as_leaf(self.requires_grad, {}) if self.is_leaf else copy
            kept, grad = (self._attributes(), self.grad) if self.is_leaf else ({}, None)
            if isinstance(self, torch.nn.Parameter):
                kept, grad = {"_is_param": True, "_init_value": self._init_value}, None
            vars(copy).update(deepcopy(kept, memo))
            if grad is not None:
                copy.grad = deepcopy(grad, memo)
        return memo[id(self)]

    def _reduced(self, own):
        make, state = super()._reduced(own)
        return make, (*state, self.requires_grad, self._attributes())

    def _attributes(self):
        """What was set on it, as that it is a module's parameter."""
        own = vars(self.like(self.rowwise, self.columnwise))
        return {name: value for name, value in vars(self).items() if name not in own}

    def as_leaf(self, requires_grad: bool, attributes: dict[str, Any]) -> GroupedTensor:
        """Itself with these attributes and without history."""
        leaf = self.detach().requires_grad_(requires_grad)
        vars(leaf).update({**attributes, **vars(leaf)})  # what a file says changes none of its own
        return leaf

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        run = _OPERATIONS.get(function)
        if run is None or not isinstance(args[0], cls):  # but the values of a copy, for instance
            return _on_values(function, args, kwargs or {})
        with _counting():
            return run(*args, **(kwargs or {}))

    # For torch.compile: the arrays by name, and the rest.

    _rowwise_data = property(lambda self: self.rowwise and self.rowwise.data)
    _rowwise_scales = property(lambda self: self.rowwise and self.rowwise.scales)
    _columnwise_data = property(lambda self: self.columnwise and self.columnwise.data)
    _columnwise_scales = property(lambda self: self.columnwise and self.columnwise.scales)

    @property
    def _offsets(self):
        offsets = None if self.groups is None else self.groups.offsets
        return offsets if isinstance(offsets, torch.Tensor) else None

    def __tensor_flatten__(self):
        names = [name for name in _INNER if getattr(self, name) is not None]
        return names, (self.kind, self.groups if "_offsets" not in names else self.groups.capacity)

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        kind, groups = meta
        rowwise, columnwise = (
            Copy(inner[data], inner[scales]) if data in inner else None
            for data, scales in (_INNER[:2], _INNER[2:4])
        )
        if "_offsets" in inner:
            groups = Groups.over(inner["_offsets"], groups)
        return TorchGroupedTensor.of(kind, rowwise, columnwise, groups)


def _follow_always(source, target):
    with torch.enable_grad():
        followed(source, *through(source), target, in_place=True)


# ---- operations of Torch, below autograd


def _copy(tensor, other, non_blocking=False):
    if isinstance(other, GroupedTensor):
        tensor._check_alike("copy_", other)
        restored_after_explaining(tensor, "groups")
        tensor._take_bytes(other, non_blocking)
    else:
        there = on_device(other, tensor.device, non_blocking)
        fw, x, shape, _ = source_of("copy_", there, tensor.groups, None)
        tensor.check_same("copy_", "other", list(shape), list(tensor.shape))
        grouped_storage.write(fw, tensor, x, tensor.groups, None)
        fw.written(*(array for _, array in tensor.arrays()))
    return tensor


def _shown(tensor):
    """The same memory, which counts writes in inference mode, too, if it does elsewhere."""
    with torch.inference_mode(tensor.is_inference()):
        return GroupedTensor.detach(tensor)


def _host_offsets(tensor):
    """Those of its groups, where they lie on the CPU; else None."""
    offsets = None if tensor.groups is None else torch.as_tensor(tensor.groups.offsets)
    return None if offsets is None or not offsets.is_cpu else offsets


def _memory(tensor):
    """Its arrays, and the offsets of its groups where they lie on the CPU."""
    offsets = _host_offsets(tensor)
    return [array for _, array in tensor.arrays()] + ([] if offsets is None else [offsets])


_OF_MOIRE = ("_is_param", "_init_value")


def _sent(tensor):
    """To another process: the memory itself, of all that it is a view of, as of Torch's tensors,
    without what others set on it.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise invalid("send: a GroupedTensor has a gradient to pass on; send what detach() gives")
    make, (*state, attributes) = tensor._reduced(torch.Tensor.detach)
    of_moire = {name: attributes[name] for name in _OF_MOIRE if name in attributes}
    return make, (*state, of_moire)


def _pinned(tensor, device=None):
    """Its bytes, and the offsets that would be copied with them."""
    offsets = _host_offsets(tensor)
    groups = None if offsets is None else Groups.over(offsets.pin_memory(), tensor.groups.capacity)
    return tensor.mapped(torch.Tensor.pin_memory, groups)


def _of_stand_in(function, tensor, *args, **options):
    """Of an array that has its shape and type and no memory."""
    stand_in = Torch.stand_in(tensor._any.data, tensor.shape, tensor.dtype)
    return function(stand_in, *args, **options)


_OPERATIONS = {
    **trained.OPERATIONS,
    _aten.detach.default: _shown,
    _aten.alias.default: _shown,
    _aten._has_compatible_shallow_copy_type.default: lambda t, other: (
        isinstance(other, GroupedTensor) and t.is_meta == other.is_meta
    ),
    _aten.clone.default: lambda t, memory_format=None: t.mapped(torch.Tensor.clone),
    _aten._to_copy.default: lambda t, dtype=None, device=None, non_blocking=False, **_: t.moved(
        device, dtype, non_blocking
    ),
    _aten.copy_.default: _copy,
    _aten.zero_.default: lambda t: t.filled_with_zeros(),
    _aten.is_pinned.default: lambda t, device=None: all(a.is_pinned() for a in _memory(t)),
    _aten._pin_memory.default: _pinned,
}
for _packet in (
    *(_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like),
    *(_aten.new_empty, _aten.new_ones, _aten.new_full, _aten.new_empty_strided),
):
    _OPERATIONS[_packet.default] = functools.partial(_of_stand_in, _packet.default)


def _has_no_memory(tensor, name, *args, **options):
    raise unsupported(
        f"{name}: a GroupedTensor has no memory of its own; take its arrays (rowwise, columnwise, "
        f"state_dict()), or what dequantize() makes"
    )


_OF_MEMORY = ("data_ptr", "const_data_ptr", "numpy", "tolist", "__array__", "__dlpack__", "apply_")
for _name in (*_OF_MEMORY, "map_", "map2_"):
    setattr(TorchGroupedTensor, _name, functools.partialmethod(_has_no_memory, _name))

_warned = set()


def _on_values(function, args, kwargs):
    name = function._schema.name.removeprefix("aten::")
    if function.namespace == "c10d":  # whose schemas do not say what is written
        _has_no_memory(None, name)
    _check_makes_something_new(name, function._schema, args, kwargs)
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} was given a GroupedTensor and computes with its decoded values, which "
            f"dequantize() gives as well; this is said once",
            stacklevel=4,
        )
    args, kwargs = tree_map_only(GroupedTensor, grouped_storage.dequantized, (args, kwargs))
    return function(*args, **kwargs)


def _check_makes_something_new(name, schema, args, kwargs):
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]
        if argument.alias_info is None or not any(isinstance(v, GroupedTensor) for v in values):
            continue
        if argument.alias_info.is_write:
            raise unsupported(
                f"{name}: would overwrite a GroupedTensor, whose values are rounded to 8 bits; "
                f"change what it was quantised from (an FP32 master that the optimizer steps), "
                f"then, inside torch.no_grad(), parameter.copy_(master)"
            )
        raise trained.has_no_form(name)


GroupedTensor._kind_of_torch = TorchGroupedTensor
ForkingPickler.register(TorchGroupedTensor, _sent)
_KEPT = ("kind", "rowwise", "columnwise", "groups", "requires_grad", "_known")
_OF_TORCH = {TorchGroupedTensor: _KEPT, Kind: Kind._fields[1:]}
tapes.learn({**_OF_TORCH, Copy: Copy._fields, Format: ("name",)})
