"""GroupedLinear: the linear layers of all experts as one module, and how it is saved and loaded.

Parameters are packed (`weight` [E, out, in], `bias` [E, out]) or listed (`weight0`, `bias0`, ...);
the state_dict of either form loads into either. What shapes cannot tell, the orientation of the
weights and the layout of gate and up, is kept as tags in the state_dict's metadata and checked on
load; where a file format dropped the metadata (safetensors' own), the module's are believed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any, Callable, Optional, Union

import torch

from ..arrays import Torch
from ..dtypes import Device, Integers
from ..errors import invalid
from ..functional import grouped_linear
from ..grouped_tensor import GroupedTensor
from ..groups import Groups
from ..layouts import GluLayout, GluLayoutLike, check_weight_layout
from ..operands import Operand
from ..recipes import Recipe, RecipeLike
from ..values import flag, integer, torch_device, wrong
from ..weight_cache import ParameterCopies, Primary
from ..wgrad import FRESH, ParameterGradients

Splits = Union[Groups, Integers]


def as_groups(splits):
    """moire.Groups as they are; a list or tensor is rows per expert."""
    return splits if isinstance(splits, Groups) else Groups(splits=splits)


def parameter_options(call, device, dtype):
    """Where parameters are made, and of which type; None is Torch's default."""
    if dtype is not None:
        dtype = Torch.compute_dtype(f"{call}: dtype", dtype)
    if device is not None:
        device = torch_device(f"{call}: device", device)
    return {"device": device, "dtype": dtype}


class OfLayers:
    """Of modules: what they pass on to each GroupedLinear in them."""

    @property
    def recipe(self) -> Recipe:
        """Of all; assigning one gives it to all, or to none where it does not fit."""
        recipe, *others = dict.fromkeys(layer.recipe for layer in self._layers()) or [Recipe()]
        if others:
            raise invalid(f"{type(self).__name__}: layers have {recipe} and {others[0]}, ask each")
        return recipe

    @recipe.setter
    def recipe(self, recipe: RecipeLike) -> None:
        for layer, found in [(layer, layer._fitting(recipe)) for layer in self._layers()]:
            layer.recipe = found

    def weights_changed(self) -> None:
        """As in GroupedLinear, of all."""
        for layer in self._layers():
            layer.weights_changed()

    def need_backward_dw(self) -> bool:
        """Whether backward leaves weight gradients of any to backward_dw."""
        return any(layer.need_backward_dw() for layer in self._layers())

    def backward_dw(self) -> None:
        """As in GroupedLinear, of the last first; those before one that failed wait for that."""
        later = [layer for layer in reversed(self._layers()) if layer.need_backward_dw()]
        failed = min((layer._wgrad.queue.failed for layer in later), default=0)
        for layer in later:
            if layer._wgrad.queue.last < failed:
                layer.backward_dw()

    def drop_backward_dw(self) -> None:
        """As in GroupedLinear, of all."""
        for layer in self._layers():
            layer.drop_backward_dw()

    def _layers(self):
        return [module for module in self.modules() if isinstance(module, GroupedLinear)]


class WithoutExtraState(torch.nn.Module):
    """Loads Transformer Engine's state_dicts, whose `_extra_state` nothing here reads."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict.pop(f"{prefix}_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _converted(parameter, fn):
    """The parameter with other data, as Torch converts plain ones; where Torch is told to overwrite
    it, or a device has tensors of another kind (meta), a new one.
    """
    with torch.no_grad():
        data, grad = fn(parameter), parameter.grad
        grad = None if grad is None else fn(grad)
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    if overwrites or not torch._has_compatible_shallow_copy_type(parameter, data):
        parameter = torch.nn.Parameter(data, parameter.requires_grad)
        parameter.grad = grad
    else:
        parameter.data = data
        if grad is not None:
            parameter.grad.data = grad
    return parameter


class GroupedLinear(WithoutExtraState):
    """y_i = x_i W_e^T (+ scale_i b_e) for the rows i of each expert e.

    scale_bias      whether probs scale the bias too, behind the activation of a GroupedMLP or a
                    Sequential (False: Transformer Engine's default)
    packed          one parameter for all experts, or (False) one per expert
    weight_layout   "out_in": [out, in] matrices; "in_out": [in, out]
    glu_layout      where this is a gated FC1: how gate and up lie along its outputs (a tag, see
                    above)
    init_method, bias_init    called on each expert's [out, in] view, on its bias [out]; default:
                    uniform in +-1/sqrt(in), as torch.nn.Linear
    get_rng_state_tracker    with rng_tracker_name, as in Megatron: both are called inside
                    get_rng_state_tracker().fork(name), so that each rank's experts differ
    dtype           of the parameters
    compute_dtype   what operands are cast to (None: as they are, or autocast's)
    recipe          what products read (moire.Recipe), may be assigned; in 8 bits copies are kept
    primary         an 8-bit recipe: the parameter is a GroupedTensor, whose bytes products read;
                    what it was quantised from first is kept on the CPU where
                    preserve_high_precision_init_val says so

    accumulate_into_main_grad and delay_wgrad_compute: see moire/wgrad.py and backward_dw.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        scale_bias: bool = True,
        packed: bool = True,
        weight_layout: str = "out_in",
        glu_layout: Optional[GluLayoutLike] = None,
        init_method: Optional[Callable[[torch.Tensor], Any]] = None,
        bias_init: Optional[Callable[[torch.Tensor], Any]] = None,
        get_rng_state_tracker: Optional[Callable[[], Any]] = None,
        rng_tracker_name: Optional[str] = None,
        device: Optional[Device] = None,
        dtype: Optional[torch.dtype] = None,
        compute_dtype: Optional[torch.dtype] = None,
        recipe: RecipeLike = None,
        primary: RecipeLike = None,
        preserve_high_precision_init_val: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__()
        call = "GroupedLinear"
        self.num_groups = integer(f"{call}: num_groups", num_groups)
        self.in_features = integer(f"{call}: in_features", in_features)
        self.out_features = integer(f"{call}: out_features", out_features)
        self.packed = flag(f"{call}: packed", packed)
        self.has_bias = flag(f"{call}: bias", bias)
        self.scale_bias = flag(f"{call}: scale_bias", scale_bias)
        self.weight_layout = check_weight_layout(call, weight_layout)
        self.glu_layout = None
        if glu_layout is not None:
            self.glu_layout = GluLayout.of(glu_layout, f"{call}: glu_layout")
            self.glu_layout.check_width(call, self.out_features)
        keeps_init = preserve_high_precision_init_val
        self.primary, recipe = Primary.of(call, primary, keeps_init, recipe, self.packed)
        self.init_method, self.bias_init = init_method, bias_init
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        for name in ("init_method", "bias_init", "get_rng_state_tracker"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise wrong(f"{call}: {name}", getattr(self, name), "callable")
        if compute_dtype is not None:
            compute_dtype = Torch.compute_dtype(f"{call}: compute_dtype", compute_dtype)
        self._copies_of = {}  # by recipe, of which _copies are those that are read
        self.compute_dtype, self.recipe = compute_dtype, recipe
        into = flag(f"{call}: accumulate_into_main_grad", accumulate_into_main_grad)
        later = flag(f"{call}: delay_wgrad_compute", delay_wgrad_compute)
        self._wgrad = ParameterGradients(into, later) if into or later else None
        self._wgrad_hooks = []
        self._shards = {}  # by name, what FSDP2 gathers a weight from
        shape = self.out_features, self.in_features
        shape = shape if weight_layout == "out_in" else shape[::-1]
        options = parameter_options(call, device, dtype)
        for name, size in {"weight": shape, "bias": (self.out_features,)}.items():
            size = (self.num_groups, *size) if self.packed else size
            for key in self._names(name) if bias or name == "weight" else ():
                self.register_parameter(key, torch.nn.Parameter(torch.empty(size, **options)))
        self.reset_parameters()

    def _names(self, name):
        return [name] if self.packed else [f"{name}{i}" for i in range(self.num_groups)]

    def _all(self, name):
        return [getattr(self, key) for key in self._names(name)]

    def weights(self) -> Union[torch.Tensor, list[torch.Tensor]]:
        """As the functions take them: the packed parameter, or the list of the experts'."""
        return self.weight if self.packed else self._all("weight")

    def biases(self) -> Optional[torch.Tensor]:
        """[E, out], or None."""
        if not self.has_bias:
            return None
        return self.bias if self.packed else Torch.concatenate(self._all("bias"), torch.stack)

    def expert_weight(self, expert: int) -> torch.Tensor:
        """The [out, in] view of one expert's weight; a primary one's GroupedTensor as it lies."""
        matrix = self.weights()[expert]
        return matrix.t() if self.weight_layout == "in_out" and not self.primary else matrix

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Expert by expert, so that packed and listed modules start from the same numbers."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0.0
        values = self.weights() if self.primary is None else torch.empty_like(self.weight)
        uniform = functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)
        with self._forked():
            for expert in range(self.num_groups):
                matrix = values[expert] if self.weight_layout == "out_in" else values[expert].t()
                (self.init_method or uniform)(matrix)
            for bias in self._all("bias") if self.has_bias else ():
                for of_expert in bias if self.packed else [bias]:
                    (self.bias_init or uniform)(of_expert)
        if self.primary is not None:
            self.weight = self.primary.initialised(self.weight, values, self.glu_layout)

    def _forked(self):
        if self.get_rng_state_tracker is None or any(p.is_meta for p in self.parameters()):
            return contextlib.nullcontext()
        name = self.rng_tracker_name
        return self.get_rng_state_tracker().fork(*([] if name is None else [name]))

    def operands(self, is_first_microbatch: Optional[bool] = None) -> tuple[Any, Any, Any]:
        """Of one call: the weights, what an 8-bit recipe's products read of them (see
        moire/weight_cache.py), and where their gradients go (moire/wgrad.py), each or None.
        """
        weights = self.weights()
        if self._copies is None and self._wgrad is None:
            return weights, None, None
        given = type(self).__name__, weights, is_first_microbatch, [*self._shards.values()]
        copies = self._copies and self._copies.of(*given)
        return weights, copies, self._wgrad and self._wgrad.of_call(*given)

    def weights_changed(self) -> None:
        """Says that the weights were written in a way that nobody counts (through `.data`, by
        another library's kernel), not by an optimizer's step: the next forward quantises them anew.
        """
        for copies in self._copies_of.values():
            copies.invalidate()

    def forward(
        self,
        x: Operand[torch.Tensor],
        splits: Splits,
        *,
        is_first_microbatch: Optional[bool] = None,
        **options: Any,
    ) -> torch.Tensor:
        """x [rows, in] in expert order; options are scale, row_idx, scatter_idx, out, grad_x_out
        and tail of moire.grouped_linear. is_first_microbatch: whether the weights are quantised
        anew (see moire/weight_cache.py), and the backward overwrites main_grad.
        """
        if options.get("scale") is not None and not self.scale_bias:
            raise invalid("GroupedLinear: scale is given, but it was built with scale_bias=False")
        groups = as_groups(splits)  # before weights are quantised: splits may be wrong
        ours = {n: getattr(self, n) for n in ("weight_layout", "recipe", "compute_dtype")}
        w, ours["w_quantized"], sink = self.operands(is_first_microbatch)
        ours["wgrad"] = sink and (sink,)
        return grouped_linear(x, w, groups, bias=self.biases(), **ours, **options)

    def need_backward_dw(self) -> bool:
        """Whether backward leaves the weight gradients to backward_dw (delay_wgrad_compute)."""
        return self._wgrad is not None and self._wgrad.delayed

    def backward_dw(self) -> None:
        """The weight gradients that the oldest backward pass left, if any did, then the hooks."""
        if self.need_backward_dw():
            self._wgrad.run_deferred(list(self._wgrad_hooks))

    def drop_backward_dw(self) -> None:
        """Forgets all that waits for backward_dw: what a backward pass left that failed elsewhere
        would else be made by the next call, and each later pass's by the one after its own.
        """
        if self.need_backward_dw():
            self._wgrad.drop_deferred()

    def _trigger_wgrad_accumulation_and_reduce_hooks(self):
        # Megatron calls it, where it replayed a backward_dw that was captured.
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs at the end of each backward_dw that had something to do."""
        self._wgrad_hooks.append(hook)

    def register_parameter(self, name: str, param: Optional[torch.nn.Parameter]) -> None:
        """Also of one that replaces another."""
        super().register_parameter(name, param)
        self._note_weights()

    def __setattr__(self, name: str, value: Any) -> None:
        """A recipe comes with its copies. FSDP2 passes register_parameter by without a method."""
        if name == "recipe":
            value = self._fitting(value)
            if value != self.__dict__.get("recipe"):  # graphs read others' copies: they are kept
                self.weights_changed()
            has_copies = value.is_quantized and self.primary is None
            made = ParameterCopies(value, self.weight_layout) if has_copies else None
            self._copies = made and self._copies_of.setdefault(value, made)
        super().__setattr__(name, value)

    def _fitting(self, recipe):
        """As a Recipe, or the error that says why this layer cannot have it."""
        recipe = Recipe.of(recipe, "GroupedLinear: recipe")
        return Primary.of("GroupedLinear", *self.primary or (None, False), recipe, self.packed)[1]

    def _apply(self, fn, recurse=True):
        weight = self._parameters.get("weight")
        is_primary = isinstance(weight, GroupedTensor)
        if is_primary:  # Torch would swap it for another, without its hooks and attributes
            weight, self._parameters["weight"] = _converted(weight, fn), None
        try:
            super()._apply(fn, recurse)  # which may put new parameters there
        finally:
            if is_primary:
                self._parameters["weight"] = weight
        self._note_weights()
        return self

    def __setstate__(self, state):
        super().__setstate__(state)
        self._note_weights()  # copy.deepcopy keeps no attributes of parameters

    def _note_weights(self):
        """The shards among them; and for Megatron's data parallelism, which then waits for the
        hooks of backward_dw, that they are delayed.
        """
        for name, param in self._parameters.items():
            if name.startswith("weight") and hasattr(param, "device_mesh"):
                self._shards[name] = param
            if name.startswith("weight") and param is not None and self.need_backward_dw():
                param.skip_backward_post_hook = True

    def tags(self) -> dict[str, str]:
        """What shapes cannot tell of the parameters, as the state_dict's metadata has it."""
        tags = {"weight_layout": self.weight_layout}
        if self.glu_layout is not None:
            tags["glu_layout"] = str(self.glu_layout)
        return tags

    def keys_of(self, name: str) -> list[str]:
        """The keys that a state_dict may have for this parameter: packed, then listed."""
        return [name, *(f"{name}{i}" for i in range(self.num_groups))]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            destination._metadata.setdefault(prefix[:-1], {}).update(self.tags())

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        errors = args[-1]
        for tag, ours in self.tags().items():
            theirs = local_metadata.get(tag, ours)
            if theirs != ours:
                errors.append(
                    f"{prefix or 'the module'}: the checkpoint's {tag} is '{theirs}' but the "
                    f"module was built with '{ours}'; build it with the checkpoint's, or load "
                    f"moire.nn.convert_state_dict(state_dict, module)"
                )
                return
        for name in ("weight", "bias") if self.has_bias else ("weight",):
            if (refused := self._pack_or_unpack(state_dict, prefix, name)) is not None:
                errors.append(refused)
                return
        given = state_dict.get(prefix + "weight")
        is_assigned = local_metadata.get("assign_to_params_buffers", False)  # not by copy_
        if self.primary and is_assigned and type(given) in (torch.Tensor, torch.nn.Parameter):
            state_dict[prefix + "weight"] = self.primary.quantized(given, self.glu_layout)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _pack_or_unpack(self, state_dict, prefix, name):
        """Puts the parameter into the module's form; why it cannot, where what is there cannot."""
        packed, *listed = self.keys_of(prefix + name)
        is_listed = bool(listed) and all(key in state_dict for key in listed)
        if self.packed and is_listed:
            given = [state_dict.pop(key) for key in listed]
            shapes = {t.shape if isinstance(t, torch.Tensor) else None for t in given}
            if None in shapes or len(shapes) > 1:
                return f"{listed[0]} to {listed[-1]}: must be tensors of one shape to be packed"
            if packed not in state_dict:  # Transformer Engine saves both
                state_dict[packed] = torch.stack(given)
        given = state_dict.get(packed)
        theirs = given.layout if isinstance(given, GroupedTensor) else None
        if None not in (theirs, self.glu_layout) and theirs != self.glu_layout:
            return f"{packed} lies as '{theirs}', not '{self.glu_layout}'; see convert_state_dict"
        if isinstance(given, GroupedTensor) and self.primary is None:
            given = state_dict[packed] = given.dequantize(self._all("weight")[0].dtype)
        elif isinstance(given, GroupedTensor) and given.form != (form := self.recipe.weight_format):
            return f"{packed}: format is {given.format}, must be {form.name}; give its dequantize()"
        has_all = isinstance(given, torch.Tensor) and given.shape[:1] == (self.num_groups,)
        if has_all and not self.packed:
            state_dict.update(zip(listed, state_dict.pop(packed).unbind()))
        return None

    def extra_repr(self) -> str:
        form = "packed" if self.packed else "listed"
        sizes = f"{self.num_groups}, {self.in_features}, {self.out_features}"
        primary, wgrad = self.primary and self.primary.recipe, self._wgrad or FRESH
        said = {
            "compute_dtype": (self.compute_dtype, None),
            "recipe": (self.recipe, primary or Recipe()),
            "primary": (primary, None),
            "accumulate_into_main_grad": (wgrad.accumulate_into_main_grad, False),
            "delay_wgrad_compute": (wgrad.delayed, False),
        }
        options = [f", {n}={value!r}" for n, (value, usual) in said.items() if value != usual]
        return f"{sizes}, bias={self.has_bias}, {form}{''.join(options)}"
