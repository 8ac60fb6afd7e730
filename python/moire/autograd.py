"""One autograd function for all that moire differentiates, and the rows that say what it runs.

The arrays and values of a call are one mapping, by the names of moire.h, from the public function
to C. A backward reads what was kept of it and adds grad_<name> of what is wanted. Every gradient is
optional; incoming ones may have any strides.
"""

from . import context
from .arrays import Torch, torch


class Op:
    """What a function runs: a row of data where one entry computes and another differentiates.

    entry      computes the outputs
    inputs     arrays that may have a gradient
    others     the other arrays that it is given
    make       (fw, fields, how): the arrays that the forward writes, by name; fields is the
               mapping, `how` says what of a layer is no field
    outputs    those that the function returns; of `fixed` there is no gradient
    backward   the entry that computes grad_<name> of the inputs, from grad_<name> of the outputs
    saved      what else of the mapping it reads
    always     gradients that it writes whether they are wanted or not
    words      what it calls things, where they are not called so here
    """

    def __init__(
        self,
        entry,
        backward,
        *,
        inputs,
        outputs,
        others=(),
        make=None,
        fixed=(),
        saved=(),
        always=(),
        words=None,
    ):
        self.entry, self.backward = entry, backward
        self.inputs, self.outputs, self.fixed = inputs, outputs, fixed
        self.arrays = frozenset((*inputs, *others))
        self.make, self.saved, self.always, self.words = make, saved, always, words or {}

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


def run(op, fw, fields, how=None, is_wanted=None):
    """The outputs of an op, which pass gradients on if autograd wants any (`is_wanted`, where the
    caller knows). The mapping is the op's own from here on.
    """
    if is_wanted is None:
        is_wanted = fw is Torch and torch.is_grad_enabled() and bool(wanted(fields, op.inputs))
    if not is_wanted:
        return op.result(op.forward(fw, fields, how))
    spec, tensors, values = parted(fields, op.arrays)
    return OpFunction.apply(op, how, values, spec, *tensors)


def wanted(fields, names):
    """Those of the names of which autograd wants a gradient, where it wants any."""
    found = []
    for name in names:
        array = fields.get(name)
        for t in array if type(array) is list else (array,):
            if t is not None and t.requires_grad:
                found.append(name)
                break
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


if torch is not None:
    from torch.autograd.function import once_differentiable

    class OpFunction(torch.autograd.Function):
        """The op of a row: `values` are the fields that are no arrays, `spec` names the arrays."""

        @staticmethod
        def forward(ctx, op, how, values, spec, *tensors):
            fields = named(spec, tensors)
            fields.update(values)
            y = fields.get("y")
            made = op.forward(Torch, fields, how)
            found = op.kept(fields, made, how)
            kept, arrays, _ = parted(found, found)
            ctx.save_for_backward(*arrays)
            ctx.call = op, how, values, spec, kept, [(t.shape, t.dtype) for t in tensors]
            context.note_saved(found, made)
            if y is not None:
                ctx.mark_dirty(y)
            for name in op.fixed:
                ctx.mark_non_differentiable(made[name])
            return op.result(made)

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            context.check_backward()
            op, how, values, spec, kept, likes = ctx.call
            fields = {**values, **named(kept, ctx.saved_tensors)}
            fields.update((f"grad_{name}", grad) for name, grad in zip(op.outputs, grads))
            needs = named(spec, ctx.needs_input_grad[4:])
            found, returned = op.gradients(Torch, fields, how, needs, named(spec, likes)), []
            for name, count in spec:
                grad = found.get(name)
                if count is None:
                    returned.append(grad)
                else:
                    returned += [None] * count if grad is None else grad
            return (None, None, None, None, *returned)
