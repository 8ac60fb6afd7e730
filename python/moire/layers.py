"""The layers as ops: grouped_linear, grouped_mlp and moe, forward and backward.

Beside the fields of moire.h, their mapping has
    x_rowwise       [data, scales] of an x in 8 bits, where `x` only stands for it
    x_given         its column-wise copy, if it has one
    w_copy          (w1_copy, w2_copy) the copy of a weight that the backward reads in its place;
                    w_quantized is the one for the forward, or tiles, which serve both
    w_prepared      (w1_prepared, w2_prepared) what both read instead, see prepared_weight.py
    scatter_idx     the inverse of row_idx, [T, k]
"""

from functools import partial
from typing import Any, NamedTuple

from .arrays import Torch, torch
from .autograd import Op
from .grouped_storage import empty_copy
from .invoke import ENTRIES
from .layouts import num_halves
from .recipes import COLUMNWISE, ROWWISE, Recipe
from .saved_columns import add_sums, empty_transposed, sums_apart
from .tapes import replayed
from .wgrad import FRESH, check_memory

_GROUPS = ("offsets", "num_groups", "capacity")


class How(NamedTuple):
    """What a layer is, besides the fields of its call."""

    recipe: Recipe = Recipe()
    compute_dtype: Any = None  # that weights are cast to
    saves: bool = False  # z is kept for a backward, which else makes it again
    saves_act: bool = False  # and act: memory for time
    wants: tuple = ()  # of what there are gradients; x is kept for that of the first weight
    saves_copy: bool = False  # as its 8-bit copy, column-wise
    copy_lies_transposed: bool = False  # see saved_columns.py
    grad_x_out: Any = None  # where that of x goes, in expert order
    out_dtype: Any = None  # of moe's result
    route: Any = None  # moe's tokens came by, from other ranks: see expert_parallel.py
    is_in_order: bool = False  # the gradient of x stays in expert order


# Which gradients read what, "z" being a z that is made again.
_SCALES = {"probs", "b2_scale", "topk_weights", "topk_weights_sent"}
_READERS_OF_BIASES = {"bias": {"scale"}, "b1": {"z"}, "b2": _SCALES}


class Layer(Op):
    """An op with weights, of which every one is a list of arrays and has a gradient by itself.
    `readers`: by weight, which gradients are products with it.
    """

    def __init__(self, entry, readers, make, inputs=None):
        others = ("scatter_idx", "y", "x_rowwise", "x_given", *(f"{w}_copy" for w in readers))
        super().__init__(entry, f"{entry}_backward", make, inputs, others=others)
        self.weights, self.readers = tuple(readers), readers
        self.readers_of_saved = {**_READERS_OF_BIASES, **readers}
        self.writes = ENTRIES[self.backward].outputs
        given = (n for n in ENTRIES[entry].inputs if f"grad_{n}" in self.writes)
        self.vectors = tuple(n for n in given if n not in ("x", *readers))
        self.saved = ("row_idx", "scatter_idx", *self.vectors, "offsets", *readers)

    def forward(self, fw, fields, how):
        if how.compute_dtype is not None:
            for w in self.weights:
                fields[w] = [fw.cast(t, how.compute_dtype) for t in fields[w]]
        made = self.make(fw, fields, how)
        reads = {**fields, **made}
        if how.recipe.is_quantized:
            for w in self.weights:
                if any(reads.get(f"{w}{form}") is not None for form in ("_quantized", "_prepared")):
                    reads[w] = []
            if reads.get("x_rowwise") is not None:
                reads["x"], reads["x_scales"] = reads["x_rowwise"]
        fw.run(self.entry, reads)
        return made

    def kept(self, fields, made, how):
        readers = self.readers_of_saved.items()
        unread = {name for name, those in readers if those.isdisjoint(how.wants)}
        kept = {name: fields[name] for name in self.saved if name in fields and name not in unread}
        kept.update(made)
        del kept["y"]
        if self.weights[0] in how.wants and "x_columnwise" not in made:
            form = next((n for n in ("x_given", "x_rowwise") if n in fields), "x")
            kept[form] = fields[form]
        for w in self.weights if how.recipe.is_quantized else ():
            if w in unread:
                continue
            copy = copy_for_backward(fields, w, how.recipe)
            if copy is not None:
                kept[w], kept[f"{w}_copy"] = [], copy
            if fields.get(f"{w}_prepared") is not None:
                kept[w], kept[f"{w}_prepared"] = [], fields[f"{w}_prepared"]
        return kept

    def gradients_into(self, sinks, within, run, how, tensors, needs, likes):
        """By name what autograd gets, where run(to) makes gradients of `tensors` and those of
        weights go to the sinks of wgrad.py.
        """
        like, sinks = tensors["offsets"], dict(zip(self.weights, sinks))
        later = [w for w, sink in sinks.items() if sink.delayed and any(needs[w])]
        now = {w: () if sink.delayed else needs[w] for w, sink in sinks.items()}
        to = {w: sink.destination(Torch, like, likes[w], now[w]) for w, sink in sinks.items()}
        written = [(sink, to[w][0], needs[w]) for w, sink in sinks.items()]
        check_memory(written, {**tensors, "grad_x_out": how.grad_x_out})
        apart = sums_apart(to) if how.copy_lies_transposed else {}
        found = run(({**to, **apart}, later))
        add_sums(to, apart)
        for w in reversed(later):
            left = found["left"][w]
            made = partial(_later, how.copy_lies_transposed, how.recipe, left)
            sinks[w].defer(within, made, left, Torch, like, likes[w], needs[w])
        found.update((w, sink.returned(to[w][0], needs[w])) for w, sink in sinks.items())
        return found

    def gradients(self, fw, fields, how, needs, likes):
        """Those of weights in new arrays; or where the mapping says `to`: the arrays by weight and
        their betas, and which weights are for later, of which it returns operands as `left`.
        """
        given, like, (to, later) = set(fields), fields["offsets"], fields.get("to", (None, ()))
        if to is None:
            to = {w: FRESH.destination(fw, like, likes[w], needs[w]) for w in self.weights}
        self._give_outputs(fw, fields, how, needs, likes, to)
        self._give_copies(fw, fields, how, any(needs[self.weights[0]]))
        apart = self._prepare(fw, fields, how, to, later)
        outputs = (name for name in self.writes if name not in given)
        if any(fields.get(name) is not None for name in outputs):  # else all is for later
            fw.run(self.backward, fields)
        for w, (grad_w, beta) in apart.items():
            weight_gradient(fw, how.recipe, self._operands(fields, w), grad_w, beta)
            fields[f"grad_{w}"] = grad_w
        left = {w: self._operands(fields, w) for w in later}
        if not how.is_in_order:
            self._to_tokens(fw, fields, how, needs, likes)
        found = {n: fields.get(f"grad_{n}") for n in self.inputs if needs.get(n)}
        for w in self.weights:
            found[w] = FRESH.returned(fields.get(f"grad_{w}"), needs[w])
        return {**found, "left": left} if left else found

    def _give_outputs(self, fw, fields, how, needs, likes, to):
        """The arrays for all gradients into the mapping."""
        like = fields["offsets"]
        for w, (arrays, _) in to.items():
            fields[f"grad_{w}"], fields[f"grad_{w}_layout"] = arrays, fields[f"{w}_layout"]
        if needs["x"]:
            shape, dtype = likes["x"]
            if how.grad_x_out is None:
                fields["grad_x"] = fw.empty(like, (fields["capacity"], shape[1]), dtype)
            else:
                fields["grad_x"] = how.grad_x_out
                fw.written(how.grad_x_out)
        for name in self.vectors:
            if needs.get(name):
                fields[f"grad_{name}"] = fw.empty(like, *likes[name])

    def _to_tokens(self, fw, fields, how, needs, likes):
        """The gradient of gathering x by row_idx, and of the probs by scatter_idx."""
        row_idx, scatter_idx = fields.get("row_idx"), fields.get("scatter_idx")
        rows, needs_weights = fields.get("grad_x"), needs.get("topk_weights")
        if row_idx is None or (rows is None and not needs_weights):
            return
        if scatter_idx is None:
            fields["grad_x"] = torch.ops.moire.rows_to_tokens(rows, row_idx, *likes["x"])
            return
        values = {"rows": rows, "scatter_idx": scatter_idx}
        if rows is not None:
            values["y"] = fields["grad_x"] = self._of_tokens(fw, how, rows, *likes["x"])
        if needs_weights:
            probs = values["probs"] = fields["grad_probs"]
            values["topk_weights"] = fw.empty(probs, *likes["topk_weights"])
            fields["grad_topk_weights"] = values["topk_weights"]
        fw.run("unpermute", values)

    def _of_tokens(self, fw, how, like, shape, dtype):
        """Memory for y, or the gradient of x, in the order of tokens: what is written last, so that
        it may be where x or grad_y were.
        """
        return fw.empty(like, shape, dtype)

    def _give_copies(self, fw, fields, how, needs_columns):
        """What the backward reads in 8 bits; its tail is that of gradients."""
        fields["tail"] = 0
        for w in self.weights:
            fields[f"{w}_quantized"] = fields.get(f"{w}_copy")
        if fields.get("x_given") is not None:
            fields["x_columnwise"] = fields["x_given"]
        elif needs_columns and fields.get("x_rowwise") is not None:
            fields["x_columnwise"] = requantized(fw, fields, how.recipe, fields["x_rowwise"])


class _Linear(Layer):
    def _prepare(self, fw, fields, how, to, later):
        """What is left for a call of its own: a weight gradient that accumulates, since the beta of
        this one is that of the bias gradient too, which is always fresh.
        """
        grad_w, beta = to["w"]
        if grad_w is None or (beta.value == 0 and beta.per_group is None):
            return {}
        del fields["grad_w"]
        return to

    def _operands(self, fields, w):
        names = ("x", "row_idx", "x_columnwise", "grad_y", *_GROUPS)
        return {**{n: fields.get(n) for n in names}, "grad_w_layout": fields["w_layout"]}


class _Mlp(Layer):
    def kept(self, fields, made, how):
        """Without z, also what it is made of: x, and W1 as the forward read it."""
        if made.get("z") is not None:
            return super().kept(fields, made, how)
        kept = super().kept(fields, made, how._replace(wants=(*how.wants, "z")))
        names = ("x_rowwise" if "x_rowwise" in fields else "x", "w1_quantized")
        kept.update((name, fields[name]) for name in names if name in fields)
        return kept

    def gradients(self, fw, fields, how, needs, likes):
        if fields.get("z") is None:
            fields["z"] = _z_again(fw, fields, how.recipe, likes["x"][1])
        return super().gradients(fw, fields, how, needs, likes)

    def _prepare(self, fw, fields, how, to, later):
        """The betas, and what weight gradients that are delayed will read: grad_z and the
        activation, or their column-wise copies. Nothing is left for a call of its own.
        """
        for w, (_, beta) in to.items():
            fields[f"beta_{w}"], fields[f"beta_{w}_per_group"] = beta
        is_saved = fields.get("act") is not None or fields.get("act_columnwise") is not None
        fields["act_is_saved"] = int(is_saved)
        z, recipe = fields["z"], how.recipe
        columns, element = z.shape[1], recipe.gradient_element
        width = columns // num_halves(fields["layout"])
        if "w1" in later:
            fields.update(_for_wgrad(fw, fields, recipe, "grad_z", z, columns, element))
        if "w2" in later and not is_saved:
            fields.update(_for_wgrad(fw, fields, recipe, "act", z, width))
        return {}

    def _operands(self, fields, w):
        taken = {"x": "act", "x_columnwise": "act_columnwise", "grad_y": "grad_y"}
        if fields.get("gathered_grad_y"):
            taken.update(row_idx="row_idx", gathered_grad_y="gathered_grad_y")
        if w == "w1":
            taken = {name: name for name in ("x", "row_idx", "x_columnwise")}
            taken.update(grad_y="grad_z", grad_y_columnwise="grad_z_columnwise")
        found = {name: fields.get(ours) for name, ours in taken.items()}
        found.update((name, fields[name]) for name in _GROUPS)
        return {**found, "grad_w_layout": fields[f"{w}_layout"]}


class Moe(_Mlp):
    """Experts' order, MLP and back: no permuted copy of x or of the incoming gradient is kept."""

    def __init__(self, *others):
        """others: what else has a gradient, by products with all weights."""
        readers = {w: {*names, *others} for w, names in _READERS.items()}
        inputs = ("x", "topk_weights", "b1", "b2", "b2_scale", *others, *readers)
        super().__init__("grouped_mlp", readers, _made_by_mlp, inputs)

    def forward(self, fw, fields, how):
        x, scatter_idx = fields["x"], fields["scatter_idx"]
        for name, choices in {"probs": "topk_weights", "b2_scale": "b2_scale"}.items():
            if fields.get(choices) is not None:
                values = {n: fields[n] for n in ("scatter_idx", *_GROUPS)}
                values["topk_weights"] = fields[choices]
                fields[name] = fw.empty(fields[choices], (fields["capacity"],), fw.float32)
                fw.run("permute", {**values, "probs": fields[name]})
        made = super().forward(fw, fields, how)
        rows = made["y"]
        y = self._of_tokens(fw, how, x, (x.shape[0], rows.shape[1]), how.out_dtype)
        fw.run("unpermute", {"rows": rows, "scatter_idx": scatter_idx, "y": y})
        return {**made, "probs": fields["probs"], "y": y}

    def gradients(self, fw, fields, how, needs, likes):
        fields["grad_y"], fields["gathered_grad_y"] = fw.cast(fields["grad_y"], likes["x"][1]), 1
        probs, of_choices = fields["probs"], likes["topk_weights"]
        needs = {**needs, "probs": needs["topk_weights"]}
        likes = {**likes, **dict.fromkeys(("probs", "b2_scale"), (probs.shape, probs.dtype))}
        found = super().gradients(fw, fields, how, needs, likes)
        if found.get("b2_scale") is not None:
            values = {"probs": found["b2_scale"], "scatter_idx": fields["scatter_idx"]}
            found["b2_scale"] = values["topk_weights"] = fw.empty(probs, *of_choices)
            fw.run("unpermute", values)
        return found


def features(fields, w):
    """(out, in) of a weight, whichever form of it there is."""
    form = fields.get(f"{w}_prepared_form")
    shape = form or (fields[w] or fields[f"{w}_quantized"])[0].shape
    out, inner = shape[-2], shape[-1]  # sooner than a slice
    return (out, inner) if fields[f"{w}_layout"] == 0 else (inner, out)


def copy_for_backward(fields, w, recipe):
    """Of tiles there is only one."""
    return fields.get(f"{w}_quantized" if recipe.weight_format.is_tiled else f"{w}_copy")


def _made_by_mlp(fw, fields, how):
    x, rows, recipe = fields["x"], fields["capacity"], how.recipe
    made = _result_and_columns("w2", fw, fields, how)
    if how.saves:
        made["z"] = fw.empty(x, (rows, features(fields, "w1")[0]), recipe.between(fw, x.dtype))
    if how.saves_act:
        made.update(_for_wgrad(fw, fields, recipe, "act", x, features(fields, "w2")[1]))
    return made


def _for_wgrad(fw, fields, recipe, name, like, columns, element="e4m3"):
    """What stands between the products, [capacity, columns], as a weight gradient reads it."""
    if recipe.is_quantized:
        return {f"{name}_columnwise": empty_columns(fw, fields, recipe, like, columns, element)}
    return {name: fw.empty(like, (fields["capacity"], columns), like.dtype)}


def _z_again(fw, fields, recipe, dtype):
    """FC1 again, rounded as the forward rounded it."""
    names = {name: name for name in ("x", "row_idx", "x_rowwise", *_GROUPS)}
    forms = ("", "_layout", "_quantized", "_prepared", "_prepared_form")
    names.update({f"w1{form}": f"w{form}" for form in forms}, b1="bias")
    given = {theirs: fields[ours] for ours, theirs in names.items() if ours in fields}
    shape = (fields["capacity"], features(fields, "w1")[0])
    given["y"] = fw.empty(fields["offsets"], shape, recipe.between(fw, dtype))
    return LINEAR.forward(fw, {"x": None, **given, **recipe.fields}, How(recipe))["y"]


def _result_and_columns(w, fw, fields, how):
    x, y, shape = fields["x"], fields.get("y"), (fields["capacity"], features(fields, w)[0])
    made = {"y": fw.empty(x, shape, x.dtype) if y is None else y}
    if how.copy_lies_transposed:
        made["x_columnwise"] = empty_transposed(fw, fields, x, x.shape[1])
    elif how.saves_copy:
        made["x_columnwise"] = empty_columns(fw, fields, how.recipe, x, x.shape[1])
    return made


def empty_columns(fw, fields, recipe, like, columns, element="e4m3"):
    """[data, scales] for a column-wise copy of [capacity, columns]."""
    shape, groups = (fields["capacity"], columns), fields["num_groups"]
    return list(empty_copy(fw, like, recipe.format, element, COLUMNWISE, shape, groups))


def requantized(fw, fields, recipe, rowwise):
    """The column-wise copy of a ragged [data, scales]."""
    data = rowwise[0]
    target = empty_columns(fw, fields, recipe, data, data.shape[1])
    values = {**recipe.fields, "source": rowwise, "target": target, "direction": ROWWISE}
    values.update((name, fields[name]) for name in _GROUPS)
    fw.run("requantize", {**values, "scaling": recipe.format.scaling})
    return target


def weight_gradient(fw, recipe, fields, grad_w, beta):
    """grad_w = beta grad_w + grad_y^T x, of fields of grouped_linear_backward, or its transpose for
    [G, in, out] weights. Rows of x are gathered, or with gathered_grad_y those of grad_y.
    """
    betas = {"beta": beta.value, "beta_per_group": beta.per_group}
    if recipe.is_quantized:
        values = {**fields, **betas, **recipe.fields, "grad_w": grad_w}
        fw.run("grouped_linear_backward", values)
        return
    x, grad_y, row_idx = (fields.get(name) for name in ("x", "grad_y", "row_idx"))
    a, b = (grad_y, None), (x, row_idx)
    if fields.get("gathered_grad_y"):
        a, b = (grad_y, row_idx), (x, None)
    if fields["grad_w_layout"] != 0:
        a, b = b, a
    values = {"a": a[0], "a_row_idx": a[1], "b": b[0], "b_row_idx": b[1], "d": grad_w, **betas}
    fw.run("grouped_gemm_wgrad", {**values, **{name: fields[name] for name in _GROUPS}})


_as_before = replayed(partial(weight_gradient, Torch))


def _later(copy_lies_transposed, recipe, fields, grad_w, beta):
    """A gradient that was delayed."""
    to = {"w": (grad_w, beta)}
    apart = sums_apart(to) if copy_lies_transposed else {}
    _as_before(recipe, fields, *apart.get("w", to["w"]))
    add_sums(to, apart)


_READERS = {"w1": {"x", "z"}, "w2": {"x", "w1", "b1", "probs", "topk_weights"}}
LINEAR = _Linear("grouped_linear", {"w": {"x"}}, partial(_result_and_columns, "w"))
MLP = _Mlp("grouped_mlp", _READERS, _made_by_mlp)
MOE = Moe()
