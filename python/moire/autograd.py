"""One autograd function for all that moire differentiates, the rows that say what it runs, and one
for GroupedTensors, whose gradient goes straight through to what their values were made of.

The arrays and values of a call are one mapping, by the names of moire.h, from the public function
to C. A backward reads what was kept of it and adds grad_<name> of what is wanted. Every gradient is
optional; incoming ones may have any strides.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

from . import context, invoke, tapes
from .arrays import Torch, torch, version_of, was_written
from .errors import unsupported
from .invoke import ENTRIES
from .values import tensors_of


@dataclass(eq=False)
class Op:
    """What a function runs: a row of data where one entry computes and another differentiates. What
    a row does not say follows from their fields.
    """

    entry: str  # computes the outputs
    backward: str  # computes grad_<name> of the inputs, from grad_<name> of the outputs
    # (fw, fields, how): the arrays that the forward writes, by name; fields is the mapping, `how`
    # says what of a layer is no field
    make: Any = None
    inputs: Any = None  # arrays that may have a gradient
    outputs: Any = None  # arrays that the function returns
    fixed: tuple = ()  # outputs of which there is no gradient
    saved: Any = None  # what else of the mapping the backward reads
    others: tuple = ()  # arrays that the function is given and neither entry reads
    always: tuple = ()  # gradients that the backward writes whether they are wanted or not
    words: dict = field(default_factory=dict)  # what it calls things that are not called so here

    def __post_init__(self):
        forward, backward = ENTRIES[self.entry], ENTRIES[self.backward]
        ours = {theirs: name for name, theirs in self.words.items()}
        reads = [ours.get(name, name) for name in backward.inputs]
        writes = [ours.get(name, name) for name in backward.outputs]
        returned = (n for n in forward.outputs if n in self.fixed or f"grad_{n}" in reads)
        if self.inputs is None:
            self.inputs = tuple(n for n in forward.inputs if f"grad_{n}" in writes)
        if self.outputs is None:
            self.outputs = tuple(returned)
        if self.saved is None:
            self.saved = tuple(n for n in reads if not n.startswith("grad_"))
        self.arrays = frozenset((*forward.inputs, *reads, *self.inputs, *self.others))

    def forward(self, fw, fields, how):
        """Runs it; returns what it made."""
        made = self.make(fw, fields, how)
        fw.run(self.entry, {**fields, **made})
        return made

    def kept(self, fields, made, how):
        """What the backward reads of what was given and made, by name."""
        kept = {name: fields[name] for name in self.saved if name in fields}
        kept.update((name, made[name]) for name in self.saved if name in made)
        return kept

    def gradients(self, fw, fields, how, needs, likes):
        """The gradients that `needs` names, by name; `fields` has what was kept and the incoming
        gradients, `likes` shape and type of the inputs.
        """
        incoming = (fields[f"grad_{name}"] for name in self.outputs)
        grad, found = next(grad for grad in incoming if grad is not None), {}
        for name in self.inputs:
            if name in likes and (needs[name] or name in self.always):
                found[name] = fw.empty(grad, *likes[name])
        fields.update((f"grad_{name}", array) for name, array in found.items())
        for ours, theirs in self.words.items():
            fields[theirs] = fields.get(ours)
        fw.run(self.backward, fields)
        return {name: array for name, array in found.items() if needs[name]}

    def result(self, made):
        """What the function returns of what was made."""
        if len(self.outputs) == 1:
            return made[self.outputs[0]]
        return tuple(made.get(name) for name in self.outputs)


def pass_of_backward():
    """Torch's number of the backward pass that runs this, a reentrant checkpoint's too, or None."""
    if torch.compiler.is_compiling():
        return None
    found = torch._C._current_graph_task_id()
    return None if found < 0 else found


def run(op, fw, fields, how=None, is_wanted=None, sinks=None):
    """The outputs of an op, which pass gradients on if autograd wants any (`is_wanted`, where the
    caller knows), those of weights to the `sinks` of wgrad.py. From here on it owns the mapping.
    """
    if is_wanted is None:
        is_wanted = fw is Torch and torch.is_grad_enabled() and bool(wanted(fields, op.inputs))
    if not is_wanted:
        return op.result(op.forward(fw, fields, how))
    if fields.get("y") is not None:  # autograd takes the first tensor for the base of a dirty view
        fields = {"y": None, **fields}
    spec, tensors, values = parted(fields, op.arrays)
    return OpFunction.apply(((op, how, values, spec), sinks), *tensors)


def wanted(fields, names):
    """Those of the names of which autograd wants a gradient, where it wants any."""
    found = []
    for name in names:
        array = fields.get(name)
        if type(array) is list:
            array = next((t for t in array if t.requires_grad), None)
        if array is not None and array.requires_grad:
            found.append(name)
    return found


def parted(fields, names):
    """([(name, how many of a list, or None), ...], the arrays in a row, what is not of these
    names). Arrays that are absent are left out.
    """
    spec, arrays, others = [], [], {}
    for name, value in fields.items():
        if name not in names:
            others[name] = value
        elif type(value) in (list, tuple):  # tuples: a compiler's, of *starred names
            spec.append((name, len(value)))
            arrays += value
        elif value is not None:
            spec.append((name, None))
            arrays.append(value)
    return spec, arrays, others


def named(spec, values):
    """By name again, the arrays that parted() has in a row, or as many other values."""
    found, at = {}, 0
    for name, count in spec:
        if count is None:
            found[name] = values[at]
            at += 1
        else:
            found[name] = list(values[at : at + count])
            at += count
    return found


def _in_row(spec, values):
    """What autograd gets: None, then what there is by name, or None, in parted()'s order."""
    row = [None]
    for name, count in spec:
        value = values.get(name)
        if count is None:
            row.append(value)
        else:
            row += [None] * count if value is None else value
    return tuple(row)


def _asked(ctx):
    """Of which tensors this backward pass wants gradients, of those that want one: all, or what the
    inputs of torch.autograd.grad lie behind. Of a leaf among those Torch says it by an exception,
    which takes a while: what autograd would drop unseen is not asked for.
    """
    if torch.compiler.is_compiling():
        return ctx.needs_input_grad[1:]
    asked = []
    for need, (node, _) in zip(ctx.needs_input_grad[1:], ctx.next_functions):
        try:
            asked.append(need and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # a leaf among the inputs
            asked.append(True)
    return asked


if torch is not None:
    from torch.autograd.function import once_differentiable

    class OpFunction(torch.autograd.Function):
        """A call of an op, (op, how, the fields that are no arrays, names of the arrays), and the
        sinks of its weights' gradients, or None.
        """

        @staticmethod
        def forward(ctx, given, *tensors):
            call, ctx.sinks = given
            op, how, values, spec = call
            fields = named(spec, tensors)
            fields.update(values)
            y = fields.get("y")
            made = op.forward(Torch, fields, how)
            found = op.kept(fields, made, how)
            kept, arrays, _ = parted(found, found)
            ctx.save_for_backward(*arrays)
            ctx.call = *call, kept, [(t.shape, t.dtype) for t in tensors]
            ctx.gradients = functools.partial(_gradients, ctx.call)
            ctx.within = pass_of_backward()
            context.note_saved(found, made)
            if y is not None:
                ctx.mark_dirty(y)
            for name in op.fixed:
                ctx.mark_non_differentiable(made[name])
            result = op.result(made)
            if tapes.recording() is not None:
                tapes.differentiated(_again(ctx.call, op, tensors, arrays, made), result)
            return result

        @staticmethod
        def backward(ctx, *grads):
            context.check_backward(grads)
            saved = ctx.saved_tensors  # once, as checkpoints give them
            if not torch.is_grad_enabled():
                return _passed_back(ctx, saved, grads)
            with torch.no_grad():  # which takes a while
                found = _passed_back(ctx, saved, grads)
            if torch.compiler.is_compiling():
                return found
            own = torch.empty(0, requires_grad=True)  # who asks for .backward() of nothing else
            return _FirstOrder.apply(len(found), *found, own, *saved, *grads)

    class _FirstOrder(torch.autograd.Function):
        """The first `count`, which have no gradient; Torch comes here on its way to the others."""

        @staticmethod
        def forward(ctx, count, *tensors):
            return tensors[:count]

        @staticmethod
        def backward(ctx, *_):
            raise unsupported("backward: a second derivative is asked for, moire has the first")

    def _passed_back(ctx, saved, grads):
        """What autograd gets for each argument of a call."""
        if ctx.sinks is None:
            return ctx.gradients(saved, grads, ctx.needs_input_grad)
        needs, (op, how, _, spec, kept, likes) = _asked(ctx), ctx.call
        tensors = {**named(kept, saved), **_of_outputs(op, grads)}
        within = pass_of_backward() if ctx.within is None else ctx.within
        run = functools.partial(ctx.gradients, saved, grads, (False, *needs))
        call = how, tensors, named(spec, needs), named(spec, likes)
        return _in_row(spec, op.gradients_into(ctx.sinks, within, run, *call))

    def _of_outputs(op, grads):
        return {f"grad_{name}": grad for name, grad in zip(op.outputs, grads)}

    def _gradients(call, saved, grads, needs, to=None):
        """Of each argument of a call, of what it saved and the gradients of its outputs; or by name
        what op.gradients makes, where it is told `to` which arrays those of weights go.
        """
        op, how, values, spec, kept, likes = call
        fields = {**values, **named(kept, saved), **_of_outputs(op, grads)}
        needs = named(spec, needs[1:])
        if to is not None:
            fields["to"] = to
        offsets = fields.get("offsets")
        found = op.gradients(Torch, fields, how, needs, named(spec, likes))
        if needs.get("y"):
            found["y"] = of_overwritten(grads[0], offsets, values["tail"])
        return _in_row(spec, found) if to is None else found

    class _Again(OpFunction):
        """Of a call that was made again, by tapes.py: all tensors are there."""

        @staticmethod
        def forward(ctx, given, *tensors):
            (saved, fixed, result), ctx.call, ctx.gradients, ctx.sinks = given
            ctx.save_for_backward(*saved)
            ctx.within = None if ctx.sinks is None else pass_of_backward()
            if fixed:
                ctx.mark_non_differentiable(*fixed)
            return result

    # Function.apply asks for transforms, which tapes.py did, and for what they left behind.
    _apply_again = super(torch.autograd.Function, _Again).apply

    def _again(call, op, inputs, saved, made):
        """What gives an OpFunction's result from the tensors of a tape, as what tapes.py records,
        with the same backward; None where a call keeps tensors in other ways.
        """
        how, values = call[1:3]
        others = [*values.values(), *(how if isinstance(how, tuple) else ())]
        if any(True for _ in tensors_of(dict(enumerate(others)))):
            return None
        fixed = tuple(made[name] for name in op.fixed)
        parts = inputs, (saved, fixed, op.result(made))
        pick = invoke.compiled.picker(parts, tapes.recording().tensors)
        gradients = tapes.replayed(functools.partial(_gradients, call))

        def end(tensors, options):
            inputs, made = pick(tensors)
            return _apply_again((made, call, gradients, options.get("wgrad")), *inputs)

        return pick and end

    class _Follow(torch.autograd.Function):
        """Targets that were written from `source` by calls that autograd does not see. Nothing is
        saved, or it would be freed: a tensor that two losses share has two backwards.
        """

        @staticmethod
        def forward(ctx, back, values, in_place, source, *targets):
            ctx.back, ctx.values = back, values
            ctx.set_materialize_grads(False)
            if not in_place:
                return tuple(target.view_as(target) for target in targets)
            ctx.mark_dirty(*targets)
            return targets

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            if all(grad is None for grad in grads):
                return (None,) * (4 + len(grads))
            return None, None, None, ctx.back(*ctx.values, *grads), *(None for _ in grads)


def followed(source, back, values, *targets, in_place=False):
    """The tensors `targets`, or views of them, whose gradients go to `source` as
    back(*values, *grads) has them: one of the functions below.
    """
    return _Follow.apply(back, values, in_place, source, *targets)


def through(source):
    """The back and its values of a copy: type and device are those of the source again."""
    return of_copy, (source.dtype, source.device)


def of_copy(dtype, device, grad):
    return grad.to(device, dtype)


def to_source(row_idx, x):
    """The back and its values of x, or of its rows `row_idx`."""
    if row_idx is None:
        return through(x)
    return of_rows, (row_idx, version_of(row_idx), x.shape, x.dtype, x.device)


def of_rows(row_idx, version, shape, dtype, device, grad):
    if was_written(row_idx, version):
        raise RuntimeError(
            "quantize: row_idx was modified by an inplace operation after the call, and its "
            "gradient goes by it; give the call a row_idx that stays"
        )
    return torch.ops.moire.rows_to_tokens(grad.to(device), row_idx, shape, dtype)


def of_decoded(dtype, offsets, grad):
    """Of values that were decoded: those past the last group were zeros."""
    grad = grad.to(dtype)
    return grad if offsets is None else grad.masked_fill(~_in_groups(grad, offsets), 0)


def of_overwritten(grad, offsets, tail):
    """Of a caller's buffer as it was: what stays is its tail, if that is untouched."""
    if tail == 0:
        return torch.zeros_like(grad)
    return grad.masked_fill(_in_groups(grad, offsets), 0)


def _in_groups(grad, offsets):
    return (torch.arange(grad.shape[0], device=grad.device) < offsets[-1])[:, None]


def of_parts(shape, parts, *grads):
    """Of some slices `parts` along the first dimension, none of which overlap."""
    (like, *_) = (grad for grad in grads if grad is not None)
    whole = like.new_zeros(shape)
    for part, grad in zip(parts, grads):
        if grad is not None:
            whole[part] = grad
    return whole
