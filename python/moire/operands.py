"""The operands of layers, checked, as fields of moire.h: arrays, or GroupedTensors for a recipe of
8 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

from .arrays import Torch, as_fp32, check_array, check_rank, framework_of, torch
from .autograd import needs_grad, run
from .errors import invalid
from .formats import COLUMNWISE, ROWWISE
from .grouped_storage import check_groups, pair
from .grouped_tensor import GroupedTensor
from .groups import Groups, as_groups
from .hints import Array
from .layers import How, copy_for_backward
from .layouts import Activation, GluLayout, weight_layout_code
from .recipes import Recipe
from .routing import check_inverse
from .values import choice, described, flag

Operand = Union[Array, GroupedTensor]
WeightLike = Union[Array, Sequence[Array], GroupedTensor]
_TAILS = ("zero", "untouched")


class Operands:
    """What a layer's call was given, put into `fields` step by step; see layers.py for their
    names.
    """

    def __init__(self, call, x, compute_dtype, recipe, optional):
        self.call, self.recipe = call, Recipe.of(recipe, f"{call}: recipe")
        copy = self.copy = x if isinstance(x, GroupedTensor) else None
        array = x if copy is None else copy._any.data
        fw = self.fw = framework_of(call, {"x": array}, optional)
        self.result = None if compute_dtype is None else x.dtype  # that the result is cast back to
        if compute_dtype is not None:
            compute_dtype = fw.compute_dtype(f"{call}: compute_dtype", compute_dtype)
        elif fw is Torch and not array.is_meta:
            device = "cpu" if array.is_cpu else "cuda" if array.is_cuda else array.device.type
            if torch.is_autocast_enabled(device):
                compute_dtype = torch.get_autocast_dtype(device)
        self.recipe.check_operands(call, x.dtype if compute_dtype is None else compute_dtype)
        check_rank(call, "x", x, 2)
        if copy is None:
            array = fw.cast(x, compute_dtype)
        else:
            check_recipe(call, "x", copy, self.recipe, self.recipe.format)
            array = copy.stand_in(f"{call}: x", compute_dtype or x.dtype)
        self.compute_dtype = None if self.recipe.is_quantized else compute_dtype
        self.fields = {"x": array, **optional}
        self.grad_x_out = self.fields.pop("grad_x_out", None)
        if self.recipe.is_quantized:
            self.fields.update(self.recipe.backward_fields)

    def give_weight(self, name, weights, layout, quantized):
        """One packed tensor or G matrices, and copies of 8 bits beside or instead of them."""
        give_weight(self.fw, self.call, self.fields, name, weights, layout, self.recipe, quantized)

    def give_groups(self, groups):
        """The groups of the rows of x, or of row_idx."""
        call, fields = self.call, self.fields
        groups = self.groups = as_groups(call, groups)
        rows, row_idx = fields["x"], fields.get("row_idx")
        if row_idx is not None:
            rows = check_rank(call, "row_idx", row_idx, 1)
        fields["capacity"] = groups.rows(rows.shape[0])
        fields["offsets"], fields["num_groups"] = groups.offsets_for(fields["x"]), groups.num_groups
        given = (fields.get("row_idx"), fields.get("scatter_idx"), fields["offsets"])
        check_inverse(self.fw, call, fields["x"], *given)

    def give_plan(self, plan):
        """The groups of rows in expert order, which are gathered from x."""
        fields, groups = self.fields, Groups.over(plan.offsets)
        self.groups = groups
        fields["offsets"], fields["row_idx"], fields["scatter_idx"] = plan
        fields["num_groups"], fields["capacity"] = groups.num_groups, plan.gather_idx.shape[0]

    def give_gating(self, act, layout, *tagged):
        act, layout = gating(self.call, act, layout, *tagged)
        self.fields["activation"], self.fields["layout"] = act.fields, layout.fields

    def give_fp32(self, name):
        self.fields[name] = as_fp32(self.fw, self.call, name, self.fields[name])

    def give_out(self, tail):
        """A caller's buffer, which may be overwritten, but for the tail that is to stay."""
        call, fields = self.call, self.fields
        out = fields.pop("out")
        fields["tail"] = _TAILS.index(choice(f"{call}: tail", tail, _TAILS))
        if fields["tail"] != 0 and out is None:
            raise invalid(
                f"{call}: tail is 'untouched' but out is absent; it needs a buffer whose tail stays"
            )
        if out is not None and self.fw is Torch:
            if torch.is_grad_enabled() and out.is_leaf and out.requires_grad:
                raise invalid(f"{call}: out is a leaf that requires grad and would be overwritten")
            out = self.fw.to_write(out)
        fields["y"] = out

    def run(self, op, sinks=None, save_act=False, out_dtype=None):
        """The op on what was given, in the type that the caller expects."""
        fw, fields, recipe, first = self.fw, self.fields, self.recipe, op.weights[0]
        saves_act, saves_copy = flag(f"{self.call}: save_act", save_act), False
        is_watched = fw is Torch and torch.is_grad_enabled()
        needs_x = is_watched and fields["x"].requires_grad
        needs_w = is_watched and needs_grad(fw, *fields[first])
        if recipe.is_quantized:
            for w in op.weights:
                if needs_x or (needs_w and w != first):
                    check_backward(self.call, fields, w, recipe)
            is_gathered = fields.get("row_idx") is not None
            saves_copy = needs_w and self.copy is None and recipe.saves_copy(is_gathered)
            self._give_copies(is_gathered, needs_w)
        saves = needs_x or needs_w
        if is_watched and not saves:
            vectors = [fields[name] for name in op.inputs[1 : -len(op.weights)]]
            saves = needs_grad(fw, *vectors, *fields[op.weights[-1]])
        keeps = (saves, saves and saves_act, needs_w, saves_copy)
        how = How(recipe, self.compute_dtype, *keeps, sinks, self.grad_x_out, out_dtype)
        out = fields.get("y")
        y = run(op, fw, fields, how, saves)
        if out is not None and not saves:
            fw.written(out)
        return y if self.result is None else fw.cast(y, self.result)

    def _give_copies(self, is_gathered, needs_wgrad):
        """Those of an x in 8 bits, which belong to the groups."""
        call, copy, fields = self.call, self.copy, self.fields
        if copy is None:
            return
        rowwise = pair(self.fw, copy.copy_of(ROWWISE, f"{call}: x"), copy.element)
        if not is_gathered:
            check_groups(call, "x", copy, self.groups.num_groups, self.groups.offsets)
        elif copy.has_columnwise or copy.groups is not None:
            raise invalid(
                f"{call}: row_idx is given beside an x that was quantised for groups or "
                f"column-wise; moire.quantize(x, groups, row_idx=row_idx) has the rows in order"
            )
        elif needs_wgrad:
            raise invalid(
                f"{call}: the weight gradient reads x column-wise in the order of the groups, but "
                f"x has only rows of tokens; quantise with row_idx=, groups and columnwise=True"
            )
        fields["x_rowwise"] = rowwise
        fields["x_given"] = pair(self.fw, copy.columnwise, copy.element)


def give_weight(fw, call, fields, name, weights, layout, recipe, quantized=None):
    """Its arrays, [] where there are only copies, their layout, and the copies that a forward and a
    backward read.
    """
    layout = fields[f"{name}_layout"] = weight_layout_code(call, layout)
    which = f"{name}_quantized"
    if isinstance(weights, GroupedTensor):
        if quantized is not None:
            raise invalid(f"{call}: {name} is quantised itself, so {which} is too much")
        which, quantized = name, weights
        fields[name] = _trained(call, name, weights)
    else:
        fields[name] = _weight_arrays(fw, call, name, weights)
    if quantized is None:
        return
    if not isinstance(quantized, GroupedTensor):
        raise invalid(f"{call}: {which} is {described(quantized)}, must be a GroupedTensor")
    check_array(fw, call, which, quantized._any.data)
    check_recipe(call, which, quantized, recipe, recipe.weight_format)
    check_rank(call, which, quantized, 3)
    shape = weight_shape(fields, name) if fields[name] else quantized.shape
    if quantized.shape != shape:
        raise invalid(f"{call}: {which} is {list(quantized.shape)} but {name} is {list(shape)}")
    forward, element = ROWWISE if layout == 0 else COLUMNWISE, quantized.element
    copy = quantized.copy_of(forward, f"{call}: {which}")
    fields[f"{name}_quantized"] = pair(fw, copy, element)
    if quantized.has_rowwise and quantized.columnwise is not None:
        fields[f"{name}_copy"] = pair(fw, quantized.copy_of(1 - forward), element)


def weight_shape(fields, name):
    """[G, out, in], or [G, in, out], whichever form of the weight there is."""
    arrays = fields[name] or fields[f"{name}_quantized"][:1]
    shape = tuple(arrays[0].shape)
    return shape if len(shape) == 3 else (len(arrays), *shape)


def check_backward(call, fields, name, recipe):
    """Without a master to quantise, a backward needs the copy of the other direction."""
    if not fields[name] and copy_for_backward(fields, name, recipe) is None:
        raise invalid(
            f"{call}: the gradient of x reads {name} in blocks along its outputs, which the "
            f"GroupedTensor does not have; quantise it in both directions"
        )


def gating(call, act, layout, *tagged):
    """(Activation, GluLayout); the layout is that of W1 and its copies, wherever they have a
    tag.
    """
    act, layout = Activation.of(act, f"{call}: act"), GluLayout.of(layout, f"{call}: layout")
    for name, weights in zip(("w1", "w1_quantized"), tagged):
        if isinstance(weights, GroupedTensor) and weights.layout not in (None, layout):
            raise invalid(
                f"{call}: {name} was quantised with gate and up in '{weights.layout}', but the "
                f"layout is '{layout}'"
            )
    return act, layout


def _trained(call, name, tensor):
    """What autograd knows as a weight in 8 bits, if it wants a gradient: of its values' type."""
    source = tensor.carrier(f"{call}: {name}")
    if source is not None and not (tensor.has_rowwise and tensor.has_columnwise):
        raise invalid(
            f"{call}: {name} is a GroupedTensor that wants a gradient and has one direction; "
            f"quantise it in both, or take detach()"
        )
    return [] if source is None else [source]


def _weight_arrays(fw, call, name, weights):
    if not isinstance(weights, (list, tuple)):
        check_array(fw, call, name, weights)
        if weights.ndim != 3:
            raise invalid(
                f"{call}: {name} is {list(weights.shape)}; needs [groups, out, in] or a list of "
                f"matrices"
            )
        return [weights]
    for i, array in enumerate(weights):
        which = f"{name}[{i}]"
        check_array(fw, call, which, array)
        if array.ndim != 2:
            raise invalid(
                f"{call}: {which} is {list(array.shape)}; a list holds one matrix per group"
            )
    if not weights:
        raise invalid(
            f"{call}: {name} is an empty list; with no groups, give a packed tensor [0, out, in]"
        )
    return list(weights)


def check_recipe(call, name, tensor, recipe, form):
    if not recipe.is_quantized or tensor.form != form:
        needs = f"which needs {form.name}" if recipe.is_quantized else "which reads no 8-bit copies"
        raise invalid(
            f"{call}: {name} is quantised as {tensor.form.name}, but the recipe is "
            f"{recipe.name!r}, {needs}"
        )
