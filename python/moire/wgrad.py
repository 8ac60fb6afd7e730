"""Where weight gradients go: to autograd as fresh tensors, into `main_grad`, or later (delayed).

The main_grad contract, per weight: the gradient is added to `param.main_grad` (FP32 or BF16;
`param.get_main_grad()` is asked for it where there is one), or overwrites it where
`param.overwrite_main_grad` is true or the call was given is_first_microbatch=True, and autograd
gets nothing: `.grad` stays as it is. A parameter that has an attribute `grad_added_to_main_grad`
belongs to somebody who waits for hooks of its gradient (Megatron's data parallelism): the attribute
is set, and autograd gets a dummy of the parameter's shape so that the hooks fire. They drop it, so
its values are undefined, but zeros where `param.zero_out_wgrad` says that they add it to main_grad.
Of a delayed gradient the backward pass gives the dummy, as Transformer Engine's does, and
backward_dw writes main_grad.
"""

import weakref
from itertools import groupby
from typing import Any, NamedTuple

from . import invoke
from .arrays import Torch as fw
from .arrays import torch, version_of, was_written
from .autograd import pass_of_backward
from .context import is_explaining, restored_after_explaining
from .errors import invalid, unsupported
from .values import tensors_of


class Beta(NamedTuple):
    """0 overwrites a gradient, 1 accumulates; per group where a uint8 array is given."""

    value: int = 0
    per_group: Any = None


class FreshGradients:
    """The default: new tensors of the weights' own dtype, each of them optional."""

    accumulate_into_main_grad = delayed = False

    def destination(self, fw, like, weights, needs):
        """(arrays to write or None, beta) of the weights' shapes and types, on `like`'s device."""
        if not any(needs):
            return None, Beta()
        return [fw.empty(like, *weight) for weight in weights], Beta()

    def returned(self, written, needs):
        """What autograd gets for each weight, now that `written` was."""
        return [grad if need else None for grad, need in zip(written or needs, needs)]


FRESH = FreshGradients()


class ParameterGradients(FreshGradients):
    """For the parameters of a call: main_grad where it accumulates into it; later if delayed."""

    def __init__(self, accumulate_into_main_grad, delayed, queue=None):
        self.accumulate_into_main_grad, self.delayed = accumulate_into_main_grad, delayed
        self.queue = queue or _Queue()

    def of_call(self, call, weights, is_first_microbatch, shards=()):
        """Where the gradients of a call with these weights go, which need not be the layer's own
        (torch.func.functional_call); those of a first microbatch overwrite main_grad.
        """
        sink = ParameterGradients(self.accumulate_into_main_grad, self.delayed, self.queue)
        sink.parameters = weights if isinstance(weights, list) else [weights]
        sink._overwrites = bool(is_first_microbatch)
        ddp = self.queue.data_parallel()
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in sink.parameters):
            return sink
        name = "delay_wgrad_compute" if self.delayed else "accumulate_into_main_grad"
        if not all(p.is_leaf for p in sink.parameters):
            raise invalid(
                f"{call}: {name} is on, but a weight is computed from other tensors, to which only "
                f"autograd takes its gradient (parametrize, functional_call); build it without that"
            )
        reducer = "FSDP2" if shards else _reducer_of(sink.parameters, ddp)
        if reducer is not None:
            raise unsupported(
                f"{call}: {name} is on, but {reducer} reduces what the backward gives it, which is "
                f"no gradient of these weights; leave them out of it and reduce their gradients "
                f"after backward(), or backward_dw(), or build the layer without that"
            )
        return sink

    def destination(self, fw, like, weights, needs):
        if not (self.accumulate_into_main_grad and any(needs)):
            return super().destination(fw, like, weights, needs)
        parameters = self.parameters
        buffers = [_main_grad(p) if need else None for p, need in zip(parameters, needs)]
        dtype = _common_dtype(buffers)
        # The kernel writes all of them: those that nobody wants into scratch.
        written = [
            torch.empty(p.shape, dtype=dtype, device=p.device) if buffer is None else buffer
            for p, buffer in zip(parameters, buffers)
        ]
        overwrites = [
            self._overwrites or not need or getattr(p, "overwrite_main_grad", False)
            for p, need in zip(parameters, needs)
        ]
        return written, _beta(overwrites, parameters[0].device)

    def returned(self, written, needs):
        if not self.accumulate_into_main_grad:
            return None if self.delayed else super().returned(written, needs)
        fw.written(*(buffer for buffer, need in zip(written or (), needs) if need))
        return [_dummy(p) if need else None for p, need in zip(self.parameters, needs)]

    def defer(self, backward, run, operands, *destination):
        """Keeps run(written, beta) for backward_dw(), which reads the tensors of the mapping
        `operands` and writes what destination() makes of the rest.
        """
        operands = dict(tensors_of(operands))
        versions = [version_of(t) for t in operands.values()]
        queue = self.queue  # a pass within another, which then goes on, has the larger number
        backward = max(backward or 0, queue.last + 1, *(d.backward for d in queue.waiting[-1:]))
        deferred = _Deferred(backward, self, run, operands, versions, destination, added=[])
        restored_after_explaining(queue, "waiting")
        queue.waiting = (*queue.waiting, deferred)

    def run_deferred(self, hooks):
        """Runs what the oldest pass left, if any, then hooks. What fails stays, and all after."""
        queue = self.queue
        restored_after_explaining(queue, "waiting", "hooks", "last", "failed")
        if queue.waiting and not queue.hooks:  # else they are those that the last call left
            queue.failed = queue.waiting[0].backward
            while queue.waiting and queue.waiting[0].backward == queue.failed:
                deferred, *after = queue.waiting
                deferred.sink._run(deferred)
                queue.waiting = after
            queue.hooks = hooks
        while queue.hooks and not is_explaining():
            queue.hooks[0]()
            queue.hooks = queue.hooks[1:]
        if queue.failed != _Queue.failed:
            queue.last, queue.failed, queue.hooks = queue.failed, _Queue.failed, ()

    def drop_deferred(self):
        """Forgets what passes left, and hooks that were not done."""
        queue = self.queue
        restored_after_explaining(queue, "waiting", "hooks", "failed")
        queue.waiting, queue.hooks, queue.failed = _Queue.waiting, _Queue.hooks, _Queue.failed

    def _run(self, deferred):
        for (name, operand), version in zip(deferred.operands.items(), deferred.versions):
            if was_written(operand, version):
                raise invalid(
                    f"backward_dw: {name} was overwritten in place after backward, and the weight "
                    f"gradient still has to be made of it; overwrite it after backward_dw, or give "
                    f"the layer a copy"
                )
        needs = deferred.destination[-1]
        written, beta = self.destination(*deferred.destination)
        check_memory([(self, written, needs)], deferred.operands)
        deferred.run(written, beta)
        for operand in deferred.operands.values():
            if operand.is_cuda:  # freed soon, and made on a stream that may be another
                operand.record_stream(torch.cuda.current_stream(operand.device))
        wanted = [both for *both, need in zip(self.parameters, written, needs) if need]
        if self.accumulate_into_main_grad:
            fw.written(*(buffer for _, buffer in wanted))
            return
        for p, grad in wanted[len(deferred.added) :] if not is_explaining() else ():
            if p.grad is None:
                p.grad = grad.to(p.dtype)  # another since the backward, if Module.to made it that
            else:  # in place, as autograd does: views of it and captured graphs know it
                p.grad.add_(grad)
            deferred.added.append(p)


class _Queue:
    """What backward passes left for backward_dw, oldest first; the last pass that is done."""

    waiting, hooks, last, failed, _ddp = (), (), -1, float("inf"), None

    def __getstate__(self):
        return {}  # a copy has gradients of its own to wait for

    def data_parallel(self):
        """The DistributedDataParallel whose forward runs; or ran, where a backward pass runs what
        it left to a checkpoint.
        """
        if pass_of_backward() is None:
            ddp = getattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
            self._ddp = None if ddp is None else weakref.ref(ddp)
        return None if self._ddp is None else self._ddp()


class _Deferred(NamedTuple):
    """A weight gradient that waits for backward_dw."""

    backward: int  # Torch's number of the pass
    sink: ParameterGradients
    run: Any
    operands: dict  # by name
    versions: list  # of the operands
    destination: tuple
    added: list  # parameters that have theirs, where another's could not be added


def check_memory(sinks, tensors):
    """That no main_grad that these (sink, written, needs) write shares memory with another, with a
    parameter or with one of `tensors`, which a call reads or writes, by name.
    """
    into = [given for given in sinks if given[0].accumulate_into_main_grad]
    written = [b for _, made, needs in into for b, need in zip(made or (), needs) if need]
    read = tensors, [sink.parameters for sink, _, _ in into]
    if not written or (invoke.compiled and not invoke.compiled.overlap(written, read)):
        return
    buffers, others = {}, dict(tensors_of(tensors))
    for i, (sink, written, needs) in enumerate(sinks):
        layer = f"fc{i + 1}." if len(sinks) > 1 else ""
        parameters = sink.parameters if sink.accumulate_into_main_grad else ()
        for j, (p, buffer, need) in enumerate(zip(parameters, written or needs, needs)):
            name = f"{layer}weight{j}" if len(needs) > 1 else f"{layer}weight"
            others[name] = p
            if written and need:
                buffers[f"the main_grad of {name}"] = buffer
    found = _shared(buffers, others)
    if found is not None:
        raise invalid(f"main_grad: {found[0]} shares memory with {found[1]}, must have its own")


def _reducer_of(parameters, ddp):
    """Who averages what a backward pass gives these, if that is Torch."""
    if ddp is None or not ddp.require_backward_grad_sync:  # or inside no_sync()
        return None
    ours = {id(p) for p in parameters if p.requires_grad}
    is_reduced = any(id(p) in ours for p in ddp._module_parameters)
    return "DistributedDataParallel" if is_reduced else None


def _main_grad(parameter):
    get = getattr(parameter, "get_main_grad", None)
    grad = get() if get is not None else getattr(parameter, "main_grad", None)
    if grad is None:
        raise invalid(
            "main_grad: accumulation into main_grad is on, but the parameter has neither main_grad "
            "nor get_main_grad(); give it a buffer or build the layer with "
            "accumulate_into_main_grad=False"
        )
    if grad.numel() != parameter.numel() or not grad.is_contiguous():
        raise invalid(
            f"main_grad: the buffer is {list(grad.shape)} with strides {list(grad.stride())}, must "
            f"be contiguous and hold the {list(parameter.shape)} of its parameter"
        )
    return grad if grad.shape == parameter.shape else grad.view(parameter.shape)


def _common_dtype(buffers):
    """Of the buffers that are there."""
    (first, dtype), *others = [(i, b.dtype) for i, b in enumerate(buffers) if b is not None]
    for i, other in others:
        if other != dtype:
            raise invalid(
                f"main_grad: the buffer of weight{i} is {other} but that of weight{first} is "
                f"{dtype}, must all be of one type"
            )
    return dtype


def _beta(overwrites, device):
    if len(set(overwrites)) == 1:
        return Beta(int(not overwrites[0]))
    # Filled on the device: a copy from the host would wait for it, and fail in a captured graph.
    betas, at = torch.empty(len(overwrites), dtype=torch.uint8, device=device), 0
    for overwrite, run in groupby(overwrites):
        begin, at = at, at + len(list(run))
        betas[begin:at].fill_(not overwrite)
    return Beta(per_group=betas)


def _dummy(parameter):
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    if not is_explaining():
        parameter.grad_added_to_main_grad = True
    zero = getattr(parameter, "zero_out_wgrad", False)
    return torch.zeros_like(parameter) if zero else torch.empty_like(parameter)


def _shared(written, read):
    """The names of two of these that overlap, one of them in `written`, or None; both are dicts of
    tensors by name. What is no plain tensor has no memory that could be compared.
    """
    extents = [
        (*_extent(tensor), name, name in written)
        for name, tensor in {**written, **read}.items()
        if fw.is_plain(tensor) and tensor.numel() != 0
    ]
    last = last_written = (0, None)  # (end, name) of what reaches furthest so far
    for start, end, name, is_written in sorted(extents, key=lambda extent: extent[0]):
        before = last if is_written else last_written
        if start < before[0]:
            return (name, before[1]) if is_written else (before[1], name)
        last = max(last, (end, name))
        if is_written:
            last_written = max(last_written, (end, name))
    return None


def _extent(tensor):
    """(address where the elements begin, where they end)."""
    start = tensor.data_ptr()
    sizes = zip(tensor.shape, tensor.stride())
    elements = 1 + sum((size - 1) * stride for size, stride in sizes)
    return start, start + elements * tensor.element_size()
