"""Weights in 8 bits: copies made once per update, in memory that stays; or all that there is."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Union

import numpy as np

from .arrays import Numpy, version_of
from .context import is_explaining
from .dtypes import COMPILES_WHOLE_GRAPHS, Array, torch
from .errors import invalid
from .grouped_tensor import GroupedTensor, quantize
from .layouts import GluLayout, GluLayoutLike, check_weight_layout
from .prepared_weight import PreparedWeight
from .recipes import Recipe, RecipeLike
from .values import described, flag, pickled

if torch is not None:
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightCache:
    """The quantised copies of any number of weights, each made by one call for all groups and made
    again, in the same memory, when its version is another: the copies keep their addresses, and
    autograd notices where a backward still needed the old ones.

    A weight is known by the object and by the memory that it shows: w.detach(), a view made anew
    for each call, or a list of them, is the weight w as long as that memory lives.

    A recipe with dequantized_weights has a PreparedWeight, for layers with that weight_layout.
    """

    def __init__(self, recipe: RecipeLike = "mxfp8", weight_layout: str = "out_in") -> None:
        self.recipe = Recipe.of_quantize(recipe, "WeightCache: recipe")
        self.weight_layout = check_weight_layout("WeightCache", weight_layout)
        self._prepares = self.recipe.dequantized_weights  # PreparedWeights, not GroupedTensors
        self._entries = {}  # by memory, and by the objects that they were first made for

    def get(
        self,
        weight: Union[Array, Sequence[Array]],
        version: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        layout: GluLayoutLike = None,
    ) -> Union[GroupedTensor, PreparedWeight]:
        """The GroupedTensor of `weight`, [G, n, k] or a list of G matrices.

        It is quantised now unless the last call for this weight had an equal version; None equals
        nothing. Forward products of [out, in] weights read the row-wise copy, those of [in, out]
        the column-wise one, and gradients of x the other. `layout` tags where gate and up lie, as
        quantize does; another tag, or a direction not asked for before, makes copies in new memory.
        """
        arrays = list(weight) if isinstance(weight, (list, tuple)) else [weight]
        wanted = {"rowwise": rowwise, "columnwise": columnwise}
        if layout is not None:
            wanted["layout"] = GluLayout.of(layout, "WeightCache.get: layout")
        entry = replaced = self._of(arrays)
        if entry is None or not entry.serves(arrays, wanted):
            entry = _Entry(arrays, self._made(weight, wanted))
        elif version is None or not self._is_current(entry, version):
            entry.tensor.quantize_(weight)
        else:
            return entry.tensor
        if not is_explaining():  # then nothing was written
            entry.version = version
            self._keep(entry, arrays, replaced)
        return entry.tensor

    def invalidate(self) -> None:
        """Every weight is quantised anew at its next get, in the memory that its copies have."""
        for entry in self._entries.values():
            entry.version = None

    def clear(self) -> None:
        self._entries.clear()

    def _is_current(self, entry, version):
        try:
            return bool(version == entry.version)
        except Exception as e:  # whatever == of a caller's type raises
            raise invalid(
                f"WeightCache.get: version is {described(version)}, which cannot be compared with "
                f"the version before it ({e}); it must be a value such as a number"
            ) from e

    def _made(self, weight, wanted):
        # A later training step may use it too.
        with nullcontext() if torch is None else torch.inference_mode(False):
            if not self._prepares:
                return quantize(weight, recipe=self.recipe, **wanted)
            is_for_one = not (wanted["rowwise"] and wanted["columnwise"])
            options = {"weight_layout": self.weight_layout, "forward_only": is_for_one}
            made = PreparedWeight(weight, self.recipe, **options)
            made.layout = wanted.get("layout")
            return made

    def _of(self, arrays):
        entry = self._entries.get(_ids(arrays))
        if entry is not None and entry.is_made_for(arrays):
            return entry
        entry = self._entries.get(_memory_of(arrays)[0])
        return entry if entry is not None and entry.is_needed() else None

    def _keep(self, entry, arrays, replaced):
        """Under the memory of these arrays, which may be new; and none of weights that are gone."""
        entry.key, entry.lives = _memory_of(arrays)
        others = (e for e in {*self._entries.values()} - {entry, replaced} if e.is_needed())
        self._entries = {key: e for e in (*others, entry) for key in (e.objects, e.key)}

    def __getstate__(self):
        # Copies are made again, not copied.
        return {"recipe": self.recipe, "weight_layout": self.weight_layout}

    def __setstate__(self, state):
        self.__init__(**pickled("WeightCache", state, ("recipe", "weight_layout")))


class _Entry:
    """The copies of one weight: of the objects that they were first made for, and of the memory
    that those, or others, showed last.
    """

    def __init__(self, arrays, tensor):
        self.sources, self.objects = [weakref.ref(array) for array in arrays], _ids(arrays)
        self.tensor, self.version = tensor, None

    def is_needed(self):
        return all(source() is not None for source in self.sources) or self.lives()

    def is_made_for(self, arrays):
        return all(source() is array for source, array in zip(self.sources, arrays))

    def serves(self, arrays, wanted):
        """Whether the tensor is of arrays like these, and has these directions and this tag."""
        tensor, (first, *_) = self.tensor, arrays
        shape = tuple(first.shape) if first.ndim == 3 else (len(arrays), *first.shape)
        return (
            (tuple(tensor.shape), tensor.dtype) == (shape, first.dtype)
            and tensor.device == getattr(first, "device", "cpu")
            and (tensor.has_rowwise or not wanted["rowwise"])
            and (tensor.has_columnwise or not wanted["columnwise"])
            and wanted.get("layout") in (None, tensor.layout)
        )


def _memory_of(arrays):
    """(what names the memory that the arrays show, a function that says whether it all lives).
    Where nobody can say what lives, the name is that of the objects, and nothing does.
    """
    try:
        names, gone = zip(*map(_owned if isinstance(arrays[0], np.ndarray) else _stored, arrays))
    except (AttributeError, TypeError, NotImplementedError, RuntimeError):
        return _ids(arrays), lambda: False
    return names, lambda: not any(is_gone() for is_gone in gone)


def _stored(tensor):
    """Of a Torch storage, which is held weakly; no other has this name while it is."""
    storage = StorageWeakRef(tensor.untyped_storage())
    view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    name = (storage.cdata, *view, tensor.is_neg(), tensor.is_conj())
    return name, storage.expired


def _owned(array):
    """Of the object that owns a NumPy array's memory, which is held weakly."""
    owner = array
    while getattr(owner, "base", None) is not None:
        owner = owner.base
    alive = weakref.ref(owner)
    name = (id(owner), Numpy.address(array), array.shape, array.strides, array.dtype)
    return name, lambda: alive() is None


def _ids(arrays):
    return tuple(id(array) for array in arrays)


class Primary(NamedTuple):
    """How a module keeps its packed weight in 8 bits, as GroupedLinear says of `primary`."""

    recipe: Recipe
    keeps_init: bool

    @classmethod
    def of(cls, call, primary, keeps_init, recipe, packed):
        """(None where weights are not in 8 bits, the recipe of the products)."""
        keeps_init = flag(f"{call}: preserve_high_precision_init_val", keeps_init)
        if primary is None:
            if keeps_init:
                needs = "only a weight in 8 bits began as anything else"
                raise invalid(f"{call}: preserve_high_precision_init_val needs primary=; {needs}")
            return None, Recipe.of(recipe, f"{call}: recipe")
        primary = Recipe.of_quantize(primary, f"{call}: primary")
        recipe = primary if recipe is None else Recipe.of(recipe, f"{call}: recipe")
        reads_it = recipe.is_quantized and recipe.weight_format == primary.weight_format
        if not packed or not reads_it or recipe.dequantized_weights:
            decoded = " with dequantized_weights" if recipe.dequantized_weights else ""
            found = f"recipe is {recipe.name!r}{decoded}" if packed else "packed is False"
            raise invalid(
                f"{call}: primary is {primary.name!r} but {found}; one parameter has the bytes of "
                f"all experts that the recipe's products read"
            )
        return cls(primary, keeps_init), recipe

    def quantized(self, values, layout):
        return quantize(values.detach(), recipe=self.recipe, columnwise=True, layout=layout)

    def initialised(self, weight, values, layout):
        """The parameter with these first values: itself, or one in 8 bits in its place."""
        if isinstance(weight, GroupedTensor):
            weight.quantize_(values)
        else:
            weight = torch.nn.Parameter(self.quantized(values, layout), weight.requires_grad)
        weight._init_value = [values.cpu()] if self.keeps_init else None
        return weight


_KEPT = object()  # the version of whatever is there, unless that was said to have changed


class ParameterCopies(WeightCache):
    """A module's weight in 8 bits, on a GPU in the form that FP8 tensor cores read, if the recipe
    uses these; by microbatches or by its own account.

    is_first_microbatch=True quantises, False takes what the first one made. None quantises where
    the parameters have other memory, Torch counted a write into them, or they are trained and an
    optimizer made a step, any optimizer: it may have written through `.data`, which nobody counts,
    or into masters that are copied from. Other writes through `.data` are said by invalidate().
    A graph that is captured quantises, as often as it is replayed, unless it is said False; so does
    each call whose weights are no parameters, or were made in inference mode, and, since a replay
    writes uncounted, each after it.
    """

    _are_replayed = False  # by a graph, uncounted

    def of(self, call, weights, is_first_microbatch, shards=()):
        """The copies for products with `weights`, a packed parameter or a list, which FSDP2 may
        gather from `shards`; in torch.compile of this call alone, or None.
        """
        if is_first_microbatch is not None:
            is_first_microbatch = flag(f"{call}: is_first_microbatch", is_first_microbatch)
        arrays = weights if isinstance(weights, list) else [weights]
        if torch.compiler.is_compiling():
            return self._in_graph(weights, arrays)
        if is_first_microbatch is False:
            version = _KEPT
        else:
            self._are_replayed |= _is_captured(arrays)
            # Views that FSDP1 makes of parameters show writes that they do not count.
            anew = is_first_microbatch or self._are_replayed or not _are_parameters(arrays)
            version = object() if anew else (*map(_state, arrays), *map(_state_of_shard, shards))
        self._prepares |= arrays[0].is_cuda and self.recipe.name != "mxfp8"
        needs_both, is_rowwise = torch.is_grad_enabled(), self.weight_layout == "out_in"
        wanted = {"rowwise": needs_both or is_rowwise, "columnwise": needs_both or not is_rowwise}
        return self.get(weights, version, **wanted)

    def _in_graph(self, weights, arrays):
        """For both passes of a call. None where no backward is recorded, for that moves no more
        bytes, where shapes may change, as those of parameters do not, and where the graph may run
        elsewhere: the layer quantises as it goes.
        """
        # What is_exporting() returns; but of all that it traces torch 2.11 says True.
        stays_here = COMPILES_WHOLE_GRAPHS and not torch.compiler._is_exporting_flag
        is_like_others = _are_parameters(arrays) and not arrays[0].is_meta
        if not (stays_here and is_like_others and torch.is_grad_enabled()):
            return None
        return PreparedWeight(weights, self.recipe, weight_layout=self.weight_layout)

    def _is_current(self, entry, version):
        if version is _KEPT:
            return entry.version is not None
        # Memory that is gone may have been given out again, at the address that _state() names.
        return super()._is_current(entry, version) and entry.lives()


def _are_parameters(arrays):
    return all(isinstance(p, torch.nn.Parameter) for p in arrays)


def _is_captured(arrays):
    return any(p.is_cuda for p in arrays) and torch.cuda.is_current_stream_capturing()


def _state(p):
    has_memory = torch._C._has_storage(p)  # a transform's has none, and is refused later
    return has_memory and p.data_ptr(), p.stride(), _writes(p), p.requires_grad and _Step.last


def _state_of_shard(shard):
    local = shard._local_tensor  # each of them counts its own writes, the gathered weight none
    return local.data_ptr(), _writes(local), version_of(shard)


def _writes(tensor):
    """Torch's count of them; what equals nothing of a tensor of inference mode, which has none."""
    return object() if tensor.is_inference() else tensor._version


class _Step:
    """Of whichever optimizer: another object each time, not a number, on which a graph of
    torch.compile that makes the step, and sets it, would depend.
    """

    last = None


def _note_step(optimizer, args, kwargs):
    _Step.last = _Step()


if torch is not None:
    register_optimizer_step_post_hook(_note_step)
