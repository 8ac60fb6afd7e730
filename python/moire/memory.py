"""Which tensors of a call share memory, and which were written since: for buffers that the library
does not see together.
"""

from .arrays import Torch, torch

if torch is not None:
    from torch.compiler import is_compiling


def version_of(array):
    """Torch's count of the writes into an array; None where nobody counts, as in a graph."""
    if array is None or is_compiling() or array.is_inference():
        return None
    return array._version


def was_written(array, since):
    """Whether it was, as far as anybody counted, `since` version_of() said that."""
    now = version_of(array)
    return now != since and None not in (now, since)


def shared(written, read):
    """The names of two of these that overlap, one of them in `written`, or None; both are dicts of
    Torch tensors by name. What is no plain tensor has no memory that could be compared.
    """
    extents = [(*extent, name, True) for name, extent in _extents(written)]
    extents += [(*extent, name, False) for name, extent in _extents(read)]
    last = last_written = (0, None)  # (end, name) of what reaches furthest so far
    for start, end, name, is_written in sorted(extents, key=lambda extent: extent[0]):
        before = last if is_written else last_written
        if start < before[0]:
            return (name, before[1]) if is_written else (before[1], name)
        last = max(last, (end, name))
        if is_written:
            last_written = max(last_written, (end, name))
    return None


def _extents(tensors):
    """(name, (address where the elements begin, where they end)) of those that have any."""
    for name, tensor in tensors.items():
        if Torch.is_plain(tensor) and tensor.numel() != 0:
            sizes = zip(tensor.shape, tensor.stride())
            elements = 1 + sum((size - 1) * stride for size, stride in sizes)
            start = tensor.data_ptr()
            yield name, (start, start + elements * tensor.element_size())
