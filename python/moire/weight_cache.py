"""Weights in 8 bits that are made once per update: by an explicit version, in memory that stays."""

import weakref

from .context import is_explaining
from .quantization import quantize
from .recipes import Recipe
from .values import flag
from .views import torch

_SAMPLES = 1024


class WeightCache:
    """The quantised copies of any number of weights, each made by one call for all groups and made
    again, in the same memory, when its version is another: the copies keep their addresses, and
    autograd notices where a backward still needed the old ones.
    """

    def __init__(self, recipe="mxfp8"):
        self.recipe = Recipe.of_quantize(recipe, "WeightCache: recipe")
        self._entries = {}

    def get(self, weight, version, *, rowwise=True, columnwise=True):
        """The GroupedTensor of `weight`, [G, n, k] or a list of G matrices.

        It is quantised now unless the last call for this weight had an equal version; None equals
        nothing. Forward products of [out, in] weights read the row-wise copy, those of [in, out]
        the column-wise one, and gradients of x the other.
        """
        arrays = list(weight) if isinstance(weight, (list, tuple)) else [weight]
        wanted = {"rowwise": rowwise, "columnwise": columnwise}
        entry = self._entries.get(_key(arrays))
        if entry is None or not entry.serves(arrays, wanted):
            entry = _Entry(arrays, _quantized(weight, self.recipe, wanted))
            if not is_explaining():
                self._entries = {k: e for k, e in self._entries.items() if e.is_needed()}
                self._entries[_key(arrays)] = entry
        elif version is None or version != entry.version:
            entry.tensor.quantize_(weight)
        else:
            return entry.tensor
        if not is_explaining():  # then nothing was written
            entry.version = version
        return entry.tensor

    def invalidate(self):
        """Every weight is quantised anew at its next get, whatever the version, in the memory that
        its copies have.
        """
        for entry in self._entries.values():
            entry.version = None

    def clear(self):
        self._entries.clear()

    def __getstate__(self):
        return {"recipe": self.recipe, "_entries": {}}  # copies are made again, not copied


class _Entry:
    def __init__(self, arrays, tensor):
        self.sources = [weakref.ref(array) for array in arrays]
        self.tensor = tensor
        self.version = None

    def is_needed(self):
        return all(source() is not None for source in self.sources)

    def serves(self, arrays, wanted):
        """Whether the tensor is of these very arrays, as they are, and has these directions."""
        tensor, (first, *_) = self.tensor, arrays
        shape = tuple(first.shape) if first.ndim == 3 else (len(arrays), *first.shape)
        return (
            all(source() is array for source, array in zip(self.sources, arrays))
            and (tensor.shape, tensor.dtype) == (shape, first.dtype)
            and tensor.device == getattr(first, "device", "cpu")
            and (tensor.has_rowwise or not wanted["rowwise"])
            and (tensor.has_columnwise or not wanted["columnwise"])
        )


def _key(arrays):
    return tuple(id(array) for array in arrays)


def _quantized(weight, recipe, wanted):
    if torch is None:
        return quantize(weight, recipe=recipe, **wanted)
    with torch.inference_mode(False):  # a later training step may use them too
        return quantize(weight, recipe=recipe, **wanted)


class ParameterCopies:
    """The 8-bit copies of a module's weight, by its own counters or by microbatches.

    is_first_microbatch=True quantises, False takes what the first one made, None goes by what the
    parameters say: memory, Torch's version counter and, on a CPU, a sample of the values, because
    writes through `.data` are not counted. The sample sees an update of whole parameters; a write
    of a few values through `.data`, or any on another device, is seen only if it is said: by
    invalidate(), or by is_first_microbatch.
    """

    def __init__(self, recipe, weight_layout):
        self._cache = WeightCache(recipe)
        self._forward_is_rowwise = weight_layout == "out_in"
        self._updates = 0

    def invalidate(self):
        self._cache.invalidate()

    def of(self, call, weights, is_first_microbatch):
        """The GroupedTensor for products with `weights`, a packed parameter or a list; None inside
        torch.compile, where the layer quantises as it goes.
        """
        if is_first_microbatch is not None:
            flag(f"{call}: is_first_microbatch", is_first_microbatch)
        if torch.compiler.is_compiling():
            return None
        arrays = weights if isinstance(weights, list) else [weights]
        if is_first_microbatch is None:
            version = tuple(_state(p) for p in arrays)
        else:
            self._updates += is_first_microbatch
            version = self._updates
        needs_both = torch.is_grad_enabled()
        return self._cache.get(
            weights,
            version,
            rowwise=needs_both or self._forward_is_rowwise,
            columnwise=needs_both or not self._forward_is_rowwise,
        )


def _state(parameter):
    version = None if parameter.is_inference() else parameter._version
    sample = b""
    if parameter.is_cpu and parameter.numel() != 0:
        # Odd, so that the sample does not run down a column.
        stride = (parameter.numel() // _SAMPLES) | 1
        sample = parameter.detach().reshape(-1)[::stride].contiguous()
        sample = sample.view(torch.uint8).numpy().tobytes()
    return version, parameter.data_ptr(), sample
