"""Ragged and uniform samples in 8 bits, with what they were made of."""

import moire
import truth

SPLITS = [33, 0, 129, 7]


def ragged(generator, form="mxfp8", **options):
    x = truth.draw(generator, sum(SPLITS) + 3, 70)
    options = {"columnwise": True, **options}
    return x, moire.quantize(x, moire.Groups(splits=SPLITS), form, **options)


def uniform(generator, form="mxfp8", **options):
    w = truth.draw(generator, 3, 128, 64)
    return w, moire.quantize(w, recipe=form, columnwise=True, **options)
