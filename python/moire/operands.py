"""The checked operands of layers as fields of moire.h: arrays, or GroupedTensors of 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Literal, Union

from .arrays import Torch, as_fp32, check_array, check_floats, check_rank, framework_of, torch
from .autograd import named, parted, run, wanted
from .context import is_explaining, note_weight
from .dtypes import Array
from .errors import invalid
from .grouped_storage import check_groups
from .grouped_tensor import GroupedTensor
from .groups import Groups, as_groups
from .layers import How, copy_for_backward, features
from .layouts import WEIGHT_LAYOUTS, Activation, GluLayout, check_weight_layout
from .prepared_weight import PreparedWeight
from .recipes import COLUMNWISE, DIRECTIONS, ROWWISE, Recipe
from .routing import check_inverse
from .saved_columns import lie_transposed
from .tapes import spoil
from .values import choice, flag, wrong
from .wgrad import FRESH

Operand = Union[Array, GroupedTensor]
WeightCopies = Union[GroupedTensor, PreparedWeight]
WeightLike = Union[Array, Sequence[Array], WeightCopies]
BiasScale = Union[Array, Literal["probs"], None]
_TAILS = ("zero", "untouched")


class Operands:
    """What a layer's call was given, put into `fields` step by step; layers.py has their names."""

    def __init__(self, call, x, recipe, optional, **gradient):
        self.call, self.recipe = call, Recipe.of(recipe, f"{call}: recipe")
        self.x, self.copy = x, x if isinstance(x, GroupedTensor) else None
        self.array = x if self.copy is None else x._any.data
        for name, grad in gradient.items():
            gradient[name] = grad._any.data if isinstance(grad, GroupedTensor) else grad
        self.fw = framework_of(call, {**gradient, "x": self.array}, optional)
        self.fields = {"x": None, **optional}
        self.result = self.compute_dtype = self.grad_x_out = None

    def of(self, x):
        """The same weights and options for other tokens."""
        given = copy(self)
        given.x, given.array, given.fields = x, x, dict(self.fields)
        return given

    def give_x(self, compute_dtype):
        """x in the type that was asked for (the result comes back in its own), or autocast's."""
        fw, call, x = self.fw, self.call, self.x
        if compute_dtype is not None:
            self.result = x.dtype
            compute_dtype = fw.compute_dtype(f"{call}: compute_dtype", compute_dtype)
        elif fw is Torch and not self.array.is_meta:
            device = "cpu" if self.array.is_cpu else self.array.device.type
            if torch.is_autocast_enabled(device):
                compute_dtype = torch.get_autocast_dtype(device)
        if not self.recipe.is_quantized:
            self.compute_dtype = compute_dtype
        self.put_x(compute_dtype)

    def put_x(self, dtype=None):
        """x as it is, or in this type."""
        call, copy, recipe = self.call, self.copy, self.recipe
        recipe.check_operands(call, self.x.dtype if dtype is None else dtype)
        check_rank(call, "x", self.x, 2)
        if copy is None:
            x = self.x if dtype is None else check_floats(self.fw, call, "x", self.x)
            self.fields["x"] = self.fw.cast(x, dtype)
        else:
            _check_recipe(call, "x", copy, recipe, recipe.format)
            self.fields["x"] = copy.stand_in(f"{call}: x", dtype or copy.dtype)
        if recipe.is_quantized:
            self.fields.update(recipe.fields)

    def give_weight(self, name, weights, layout, quantized):
        """One packed tensor or G matrices, [] where there are only copies of 8 bits, its layout,
        and the copies, beside or instead of it, that a forward and a backward read.
        """
        call, fields = self.call, self.fields
        layout = WEIGHT_LAYOUTS.index(check_weight_layout(call, layout))
        fields[f"{name}_layout"] = layout
        which = f"{name}_quantized"
        if isinstance(weights, (GroupedTensor, PreparedWeight)):
            if quantized is not None:
                raise invalid(f"{call}: {name} is quantised itself, so {which} is too much")
            which, quantized = name, weights
            is_prepared = isinstance(weights, PreparedWeight)
            fields[name] = [] if is_prepared else _trained(call, name, weights)
        else:
            fields[name] = _weight_arrays(self.fw, call, name, weights)
            for weight in fields[name] if self.compute_dtype is not None else ():
                check_floats(self.fw, call, name, weight)
        if quantized is None:
            return
        if not isinstance(quantized, (GroupedTensor, PreparedWeight)):
            raise wrong(f"{call}: {which}", quantized, "a GroupedTensor or a PreparedWeight")
        is_prepared = isinstance(quantized, PreparedWeight)
        check_array(self.fw, call, which, quantized.memory if is_prepared else quantized._any.data)
        if not is_prepared:
            _check_recipe(call, which, quantized, self.recipe, self.recipe.weight_format)
            check_rank(call, which, quantized, 3)
        shape = self.weight_shape(name) if fields[name] else quantized.shape
        if quantized.shape != shape:
            raise invalid(f"{call}: {which} is {list(quantized.shape)} but {name} is {list(shape)}")
        note_weight(name, quantized)
        if is_prepared:
            fields[f"{name}_prepared"] = quantized.memory
            fields[f"{name}_prepared_form"] = quantized.form
            return
        forward = ROWWISE if layout == 0 else COLUMNWISE
        fields[f"{name}_quantized"] = self._pair(which, quantized, forward)
        if quantized.has_rowwise and quantized.columnwise is not None:
            fields[f"{name}_copy"] = self._pair(which, quantized, 1 - forward)

    def weight_shape(self, name):
        """[G, out, in], or [G, in, out], whichever form of the weight there is."""
        arrays = self.fields[name] or self.fields.get(f"{name}_quantized", ())[:1]
        shape = tuple(arrays[0].shape if arrays else self.fields[f"{name}_prepared_form"][-3:])
        return shape if len(shape) == 3 else (len(arrays), *shape)

    def give_groups(self, groups):
        """The groups of the rows of x, or of row_idx."""
        call, fields = self.call, self.fields
        groups = self.groups = as_groups(call, groups)
        x, row_idx = fields["x"], fields.get("row_idx")
        rows = x if row_idx is None else check_rank(call, "row_idx", row_idx, 1)
        groups.give(fields, x, rows.shape[0])
        check_inverse(self.fw, call, x, row_idx, fields.get("scatter_idx"), fields["offsets"])

    def give_plan(self, plan):
        """The groups of rows in expert order, which are gathered from x."""
        self.groups = Groups.over(plan.offsets)
        self.fields.update(plan.fields())
        self.fields["row_idx"] = self.fields.pop("gather_idx")

    def give_experts(self, weights, copies, weight_layout, act, layout):
        """W1 and W2, each with its copies, and what is between. The layout of gate and up is that
        of W1 and its copies, wherever they have a tag.
        """
        call = self.call
        for name, weight, quantized in zip(("w1", "w2"), weights, copies):
            self.give_weight(name, weight, weight_layout, quantized)
        act, layout = Activation.of(act, f"{call}: act"), GluLayout.of(layout, f"{call}: layout")
        for name, tagged in (("w1", weights[0]), ("w1_quantized", copies[0])):
            found = tagged.layout_fields if isinstance(tagged, GroupedTensor) else None
            if found not in (None, layout.fields):
                raise invalid(
                    f"{call}: {name} was quantised with gate and up in '{tagged.layout}', but the "
                    f"layout is '{layout}'"
                )
        self.fields["activation"], self.fields["layout"] = act.fields, layout.fields

    def give_fp32(self, name):
        self.fields[name] = as_fp32(self.fw, self.call, name, self.fields[name])

    def give_b2_scale(self, scale, shape=None):
        """b2 is scaled by "probs", by nothing (None), or by an array of its own (of this shape)."""
        called, fields = f"{self.call}: b2_scale", self.fields
        if isinstance(scale, str) and scale != "probs":
            raise wrong(called, scale, "'probs', None or an array")
        self.give_fp32("b2_scale")
        own, fields["b2_unscaled"] = fields["b2_scale"], int(scale is None)
        if own is not None and shape not in (None, own.shape):
            raise invalid(f"{called} is {list(own.shape)}, must be {list(shape)} as topk_weights")

    def give_out(self, tail):
        """A caller's buffers: `out` may be overwritten, but for the tail that is to stay."""
        call, fields = self.call, self.fields
        out, self.grad_x_out = fields.pop("out"), fields.pop("grad_x_out")
        fields["tail"] = _TAILS.index(choice(f"{call}: tail", tail, _TAILS))
        if fields["tail"] != 0 and out is None:
            raise invalid(
                f"{call}: tail is 'untouched' but out is absent; it needs a buffer whose tail stays"
            )
        if self.fw is Torch:
            for name, buffer in (("out", out), ("grad_x_out", self.grad_x_out)):
                is_leaf = buffer is not None and buffer.is_leaf and buffer.requires_grad
                if is_leaf and torch.is_grad_enabled():
                    found = f"{name} is a leaf that requires grad and would be overwritten"
                    raise invalid(f"{call}: {found}")
        if out is not None and self.fw is Torch:
            spoil()  # whose history a call made again would not change
            # Autograd notes in a buffer that it was written, which it is not while explain() runs.
            out = out.data if is_explaining() else out
        fields["y"] = out

    def run(self, op, sinks=None, save_act=False, save_z=True, out_dtype=None, route=None):
        """The op on what was given, in the type that the caller expects."""
        fw, fields, recipe = self.fw, self.fields, self.recipe
        saves_act, saves_copy = flag(f"{self.call}: save_act", save_act), False
        saves_z = flag(f"{self.call}: save_z", save_z)
        is_watched = fw is Torch and torch.is_grad_enabled()
        wants = wanted(fields, op.inputs) if is_watched else ()
        is_wanted, needs_w = bool(wants), op.weights[0] in wants
        out = fields.get("y")
        has_history = is_watched and out is not None and out.requires_grad
        if self.compute_dtype is not None:
            self._check_types(op, wants, sinks or (FRESH, FRESH))
        if recipe.is_quantized:
            self._check_copies(op, wants)
            is_gathered = fields.get("row_idx") is not None
            saves_copy = (
                needs_w and saves_z and self.copy is None and recipe.saves_copy(is_gathered)
            )
            self.give_copies_of_x(needs_w)
        self._check_experts(op)
        w = op.weights[0]
        turns_copy = saves_copy and lie_transposed(fw, fields, w, features(fields, w), recipe)
        keeps = is_wanted and saves_z, is_wanted and saves_act, tuple(wants), saves_copy, turns_copy
        how = How(recipe, self.compute_dtype, *keeps, self.grad_x_out, out_dtype, route)
        y = run(op, fw, fields, how, is_wanted or has_history, sinks)
        if out is not None and not wants:
            fw.written(out)
        return y if self.result is None else fw.cast(y, self.result)

    def gradients(self, op, grad_y, wants, made):
        """The gradients by name, of what was made for grad_y; of a packed weight one array."""
        fw, call, last = self.fw, self.call, op.weights[-1]
        self._check_copies(op, wants)
        for w in op.weights:
            if w in wants and not self.fields[w]:
                raise invalid(
                    f"{call}: wants has {w!r}, but {w} is quantised and has no gradient; give the "
                    f"weight itself, and its copies as {w}_quantized"
                )
        self.give_copies_of_x(op.weights[0] in wants, needs_rows="z" in made and made["z"] is None)
        self._check_experts(op)
        how = How(self.recipe, wants=tuple(wants), is_in_order=True)
        spec, arrays, values = parted(self.fields, op.arrays)
        fields = named(spec, [fw.detached(array) for array in arrays])
        kept = {**values, **op.kept(fields, {"y": None, **made}, how), "grad_y": grad_y}
        if isinstance(grad_y, GroupedTensor):
            _check_recipe(call, "grad_y", grad_y, self.recipe, self.recipe.format)
            check_groups(call, "grad_y", grad_y, self.groups.num_groups, self.groups.offsets)
            for direction, readers in ((ROWWISE, op.readers[last]), (COLUMNWISE, {last})):
                if not readers.isdisjoint(wants):
                    copy = self._pair("grad_y", grad_y, direction)
                    kept[f"grad_y_{DIRECTIONS[direction]}"] = copy
            kept["grad_y"] = None
        likes = named(spec, [(array.shape, array.dtype) for array in arrays])
        needs = {n: n in wants if count is None else [n in wants] * count for n, count in spec}
        found = op.gradients(fw, kept, how, needs, likes)
        for w in op.weights:
            if w in wants and fields[w][0].ndim == 3:
                (found[w],) = found[w]
        return {name: found[name] for name in wants}

    def _check_experts(self, op):
        for name in op.weights:
            if (experts := self.weight_shape(name)[0]) != (n := self.fields["num_groups"]):
                raise invalid(f"{self.call}: there are {n} splits but {name} has {experts} experts")

    def _check_types(self, op, wants, sinks):
        """A gradient is of its weight's own type, whatever that is cast to."""
        for name, sink in zip(op.weights, sinks):
            fresh = name in wants and not sink.accumulate_into_main_grad
            if fresh and self.fw.dtype("float64") in [t.dtype for t in self.fields[name]]:
                raise invalid(
                    f"{self.call}: {name} is float64 and wants a gradient, which must be of "
                    f"float32, bfloat16 or float16; cast it, or give it main_grad"
                )

    def _check_copies(self, op, wants):
        """Without a master to quantise, a backward needs the copy of the other direction."""
        for name, readers in op.readers.items():
            given = self.fields[name] or self.fields.get(f"{name}_prepared") is not None
            if given or readers.isdisjoint(wants):
                continue
            if copy_for_backward(self.fields, name, self.recipe) is None:
                raise invalid(
                    f"{self.call}: the gradient of x reads {name} in blocks along its outputs, "
                    f"which the GroupedTensor does not have; quantise it in both directions"
                )

    def give_copies_of_x(self, needs_wgrad, needs_rows=True):
        """Those of an x in 8 bits, which belong to the groups."""
        call, copy, fields = self.call, self.copy, self.fields
        if copy is None:
            return
        if needs_rows or copy.has_rowwise:
            fields["x_rowwise"] = self._pair("x", copy, ROWWISE)
        if fields.get("row_idx") is None:
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
        fields["x_given"] = copy.columnwise and list(copy.columnwise)

    def _pair(self, name, tensor, direction):
        """[data, scales], as the C entries take a moire_quantized."""
        return list(tensor.copy_of(direction, f"{self.call}: {name}"))


def own_scale(b2_scale):
    """Of what Operands.give_b2_scale takes, the array."""
    return None if isinstance(b2_scale, str) else b2_scale


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


def _check_recipe(call, name, tensor, recipe, form):
    if not recipe.is_quantized or tensor.form != form:
        needs = f"which needs {form.name}" if recipe.is_quantized else "which reads no 8-bit copies"
        raise invalid(
            f"{call}: {name} is quantised as {tensor.form.name}, but the recipe is "
            f"{recipe.name!r}, {needs}"
        )
