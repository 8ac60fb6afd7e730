"""MXFP8 scales in the layouts of other libraries (see moire_scale_layout of moire.h), out of a
GroupedTensor and into one.
"""

from .arrays import assign, check_array
from .errors import invalid, unsupported
from .groups import Groups
from .recipes import DIRECTIONS, ROWWISE, check_direction
from .values import choice

_LAYOUTS = ("canonical", "dense", "padded", "swizzled")
_DENSE = 1
_PADDED_OUTER, _PADDED_BLOCKS = 128, 4


class _Scales:
    """The scales of one direction as a ragged matrix, which is what moire_convert_scales takes:
    uniform matrices are groups of equal size.
    """

    def __init__(self, call, tensor, layout, direction):
        self.fw, self.call = tensor._fw, call
        self.layout = _LAYOUTS.index(choice(f"{call}: layout", layout, _LAYOUTS[1:]))
        self.direction = check_direction(f"{call}: direction", direction)
        if tensor.form.name != "mxfp8":
            raise unsupported(
                f"{call}: format is {tensor.form.name}, whose FP32 scales have one layout only: "
                f"take them from .{DIRECTIONS[self.direction]}.scales"
            )
        self.block = tensor.form.block
        self.own = tensor.copy_of(self.direction, call).scales
        *_, self.k = tensor.shape
        if tensor.ndim == 3:
            num_groups, n, _ = tensor.shape
            self.groups = Groups(splits=[n] * num_groups)
            self.rows = num_groups * n
        else:
            self.rows = tensor.shape[0]
            self.groups = tensor.groups or Groups(splits=[self.rows])
        self.splits = self.groups.splits.tolist()
        # Column-wise scales of uniform matrices have no gaps between the groups.
        is_dense = tensor.ndim == 3 and self.direction != ROWWISE
        self.own_layout = _DENSE if is_dense else 0
        self.flat = self.own.reshape(-1, self.own.shape[-1])

    def shape(self, layout):
        """Of scales in `layout`: what these groups need."""
        blocks, is_padded = _ceil(self.k, self.block), layout > _DENSE
        if layout == 0:
            assert self.direction != ROWWISE
            return (self.rows // self.block + len(self.splits), self.k)
        if self.direction == ROWWISE:
            if not is_padded:
                return (self.rows, blocks)
            rows = sum(_up(m, _PADDED_OUTER) for m in self.splits)
            return (rows, _up(blocks, _PADDED_BLOCKS))
        blocks = [_ceil(m, self.block) for m in self.splits]
        if not is_padded:
            return (sum(blocks), self.k)
        return (sum(_up(b, _PADDED_BLOCKS) for b in blocks), _up(self.k, _PADDED_OUTER))

    def convert(self, source, from_layout, target, to_layout):
        """One side of moire_convert_scales has to be canonical."""
        if from_layout == to_layout:
            assign(target, source)
            return
        if 0 not in (from_layout, to_layout):
            between = self.fw.empty(source, self.shape(0), source.dtype)
            self.convert(source, from_layout, between, 0)
            source, from_layout = between, 0
        fields = {"source": source, "target": target, "from_": from_layout, "to_": to_layout}
        fields.update(direction=self.direction, k=self.k, capacity=self.rows)
        fields.update(offsets=self.groups.offsets_for(source), num_groups=len(self.splits))
        self.fw.run("convert_scales", fields)


def exported(tensor, layout, direction):
    scales = _Scales("export_scales", tensor, layout, direction)
    target = scales.fw.empty(scales.own, scales.shape(scales.layout), scales.own.dtype)
    scales.convert(scales.flat, scales.own_layout, target, scales.layout)
    return target


def take(tensor, given, layout, direction):
    scales = _Scales("import_scales", tensor, layout, direction)
    fw = scales.fw
    tensor.about_to_write(scales.call)
    check_array(fw, scales.call, "scales", given, "as the tensor's are")
    wanted = scales.shape(scales.layout)
    if tuple(given.shape) != wanted or given.dtype != scales.own.dtype:
        raise invalid(
            f"{scales.call}: scales is {str(given.dtype).removeprefix('torch.')} "
            f"{list(given.shape)}, needs uint8 {list(wanted)} ({layout}, {direction})"
        )
    if fw.is_contiguous(scales.own):
        scales.convert(given, scales.layout, scales.flat, scales.own_layout)
        fw.written(scales.own)
    else:  # through a copy, because what is converted has to be contiguous
        target = fw.contiguous(scales.flat)
        scales.convert(given, scales.layout, target, scales.own_layout)
        assign(scales.own, target.reshape(scales.own.shape))
    tensor.written()


def _ceil(size, block):
    return (size + block - 1) // block


def _up(size, multiple):
    return _ceil(size, multiple) * multiple
