"""Ragged and uniform samples in 8 bits, with what they were made of; and one of each kind."""

import moire
import numpy as np
import torch
import truth
from truth_fp8 import assert_same_bytes, numpy_of

SPLITS = [33, 0, 129, 7]


def ragged(generator, form="mxfp8", **options):
    x = truth.draw(generator, sum(SPLITS) + 3, 70)
    options = {"columnwise": True, **options}
    return x, moire.quantize(x, moire.Groups(splits=SPLITS), form, **options)


def uniform(generator, form="mxfp8", **options):
    w = truth.draw(generator, 3, 128, 64)
    return w, moire.quantize(w, recipe=form, columnwise=True, **options)


MADE = {
    "ragged": lambda g: ragged(g)[1],
    "ragged_blocks": lambda g: ragged(g, "fp8_block", element="e5m2")[1],
    "one_direction": lambda g: ragged(g, rowwise=False)[1],
    "uniform": lambda g: uniform(g, layout=8)[1],
    "tiles": lambda g: uniform(g, "fp8_block")[1],
    "fractional": lambda g: ragged(g, moire.Recipe("fp8_block", fractional_scales=True))[1],
    "numpy_groups": lambda g: moire.quantize(
        ragged(g)[0], moire.Groups(splits=np.array(SPLITS)), columnwise=True
    ),
    "numpy": lambda g: moire.quantize(numpy_of(ragged(g)[0]), moire.Groups(splits=SPLITS)),
}


def same(a, b):
    assert_same_bytes(a, b)
    for name in ("format", "element", "shape", "layout", "dtype", "fractional_scales"):
        assert getattr(a, name) == getattr(b, name), name
    assert (a.groups is None) == (b.groups is None)
    if a.groups is not None:
        assert a.groups.offsets.tolist() == b.groups.offsets.tolist()
    return True


def places(tensor):
    """The kinds of devices of its arrays and offsets, or of those of a state_dict."""
    state = tensor if isinstance(tensor, dict) else tensor.state_dict()
    return {torch.device(getattr(array, "device", "cpu")).type for array in state.values()}
