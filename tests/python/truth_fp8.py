"""8-bit formats from their definitions, with ml_dtypes' casts: bytes, scales and decoded values,
one block at a time. Shares nothing with the library.
"""

import ml_dtypes
import numpy as np
import torch

ELEMENT = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
BLOCK = {"mxfp8": 32, "fp8_block": 128, "fp8_tile": 128}
TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def block_scale(values, form, element):
    """The scale of one block of finite values, as a double that is exact."""
    largest = ELEMENT[element][1]
    amax = np.float32(np.abs(values).max(initial=0.0))
    if form == "mxfp8":
        share = float(amax * np.float32(1 / largest))
        if share == 0:
            return 2.0**-127
        mantissa, exponent = np.frexp(share)
        return 2.0 ** max(exponent - (mantissa == 0.5), -127)
    if amax == 0:
        return 1.0
    mantissa, exponent = np.frexp(np.float32(largest) / amax)
    return 2.0 ** (1 - exponent)  # s loses its mantissa, the scale is 1 / s


def quantized_block(values, form, element):
    """(bytes, scale) of one block, float64 in."""
    dtype, largest = ELEMENT[element]
    scale = block_scale(values, form, element)
    scaled = np.clip(values / scale, -largest, largest)
    return scaled.astype(np.float32).astype(dtype).view(np.uint8), scale


def quantized(x, form, element="e4m3", direction="rowwise", splits=None):
    """(bytes [rows, k], scales as doubles in moire's shape, which blocks own a scale) of ragged x;
    what no block owns is 0.
    """
    x = x.double().cpu().numpy()
    rows, k = x.shape
    b = BLOCK[form]
    splits = [rows] if splits is None else splits
    data = np.zeros((rows, k), np.uint8)
    shape = (rows, -(-k // b)) if direction == "rowwise" else (rows // b + len(splits), k)
    scales, owned = np.zeros(shape), np.zeros(shape, bool)
    start = 0
    for g, n in enumerate(splits):
        if direction == "rowwise":
            for i in range(start, start + n):
                for j in range(shape[1]):
                    at = (i, slice(j * b, (j + 1) * b))
                    data[at], scales[i, j] = quantized_block(x[at], form, element)
                    owned[i, j] = True
        else:
            for j in range(-(-n // b)):
                row = start // b + g + j
                part = slice(start + j * b, min(start + (j + 1) * b, start + n))
                for c in range(k):
                    data[part, c], scales[row, c] = quantized_block(x[part, c], form, element)
                    owned[row, c] = True
        start += n
    return data, scales, owned


def quantized_tiles(w, element="e4m3"):
    """(bytes, scales) of one [n, k] matrix in tiles of 128 x 128."""
    w = w.double().cpu().numpy()
    n, k = (-(-size // 128) for size in w.shape)
    data, scales = np.zeros(w.shape, np.uint8), np.zeros((n, k))
    for i in range(n):
        for j in range(k):
            at = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            data[at], scales[i, j] = quantized_block(w[at], "fp8_block", element)
    return data, scales


def decoded(data, scales, form, element="e4m3", direction="rowwise", splits=None):
    """data * scale in double, from the bytes of one ragged matrix; zeros past the last group."""
    values = data.view(ELEMENT[element][0]).astype(np.float64)
    rows, k = values.shape
    b = BLOCK[form]
    splits = [rows] if splits is None else splits
    full, start = np.zeros((rows, k)), 0
    for g, n in enumerate(splits):
        for i in range(start, start + n):
            if direction == "rowwise":
                full[i] = np.repeat(scales[i], b)[:k]
            else:
                full[i] = scales[start // b + g + (i - start) // b]
        start += n
    return torch.from_numpy(values * full)


def round_trip(x, form, element="e4m3", direction="rowwise", splits=None):
    """The values that x has in 8 bits, in double: what a product reads."""
    data, scales, _ = quantized(x, form, element, direction, splits)
    return decoded(data, scales, form, element, direction, splits).to(x.device)


def weight_round_trip(w, form, along):
    """Of weights [G, n, k], in blocks along dim 1 or 2, or in tiles."""
    if form == "fp8_tile":
        parts = [quantized_tiles(matrix) for matrix in w]
        return torch.stack([_untiled(data, scales) for data, scales in parts]).to(w.device)
    direction = "rowwise" if along == 2 else "columnwise"
    return torch.stack([round_trip(matrix, form, direction=direction) for matrix in w])


def _untiled(data, scales):
    full = scales.repeat(128, 0).repeat(128, 1)[: data.shape[0], : data.shape[1]]
    return torch.from_numpy(data.view(ELEMENT["e4m3"][0]).astype(np.float64) * full)


def numpy_of(array):
    """A NumPy array of an array's values, wherever it lies."""
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def bytes_of(array):
    """The bytes of FP8 or uint8 data, as a NumPy array."""
    return numpy_of(array.view(torch.uint8 if isinstance(array, torch.Tensor) else np.uint8))


def scales_of(array):
    """Stored scales as doubles."""
    array = numpy_of(array)
    return (
        2.0 ** (array.astype(np.float64) - 127) if array.dtype == np.uint8 else array.astype(float)
    )


def assert_same_bytes(a, b):
    """Two GroupedTensors hold the same bytes."""
    found, wanted = dict(a.arrays()), dict(b.arrays())
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert array.shape == wanted[name].shape, name
        assert np.array_equal(bytes_of(array), bytes_of(wanted[name])), name
