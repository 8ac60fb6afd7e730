"""explain(): what a call would run, without running it and without a trace of it.

The function itself is called, under a context that records the library's calls instead of running
them. What those would have written is not written, so nothing may be made of it that lasts.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Callable

from . import context as contexts
from ._abi import lib
from .dtypes import torch
from .errors import invalid
from .values import wrong


class Explanation(list):
    """The steps of a call, one dict each: op, problem, implementation, policy, bytes, and what was
    refused and why. `saved` says what forwards keep for backwards, one dict per tensor: name,
    dtype, shape, bytes, and whether by_reference, which takes no memory of its own. `not_fused`
    says, in sentences, which modules of a moire.nn.Sequential run one by one and why. `weights` has
    the bytes of the 8-bit or prepared copies that calls were given, by the weight's name.
    `window_bytes` is what calls take, at most, of a communicator's window on each rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved, self.not_fused, self.weights, self.window_bytes = [], [], {}, 0

    @property
    def saved_bytes(self) -> int:
        """Memory that lives until the backward because of this call."""
        return sum(tensor["bytes"] for tensor in self.saved if not tensor["by_reference"])

    def __str__(self) -> str:
        lines = []
        for step in self:
            lines.append(f"{step['op']}: {step['implementation']} ({step['policy']})")
            lines.append(f"    {step['problem']}")
            lines.append(
                f"    launches {step['launches']}, reads {step['bytes_read']:,} B, writes "
                f"{step['bytes_written']:,} B, workspace {step['workspace_bytes']:,} B"
            )
            lines += [
                f"    not {refusal['implementation']}: {refusal['reason']}"
                for refusal in step["refused"]
            ]
        lines += [f"not fused: {sentence}" for sentence in self.not_fused]
        lines += [f"kept of {name}: {size:,} B" for name, size in self.weights.items()]
        if self.window_bytes:
            lines.append(f"window of each rank: {self.window_bytes:,} B")
        if self.saved:
            lines.append(f"saved for the backward: {self.saved_bytes:,} B")
        for tensor in self.saved:
            size = "by reference" if tensor["by_reference"] else f"{tensor['bytes']:,} B"
            lines.append(f"    {tensor['name']} {tensor['dtype']} {tensor['shape']}: {size}")
        return "\n".join(lines) or "moire was not called"


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """What `function(*args, **kwargs)` would run, and why nothing faster: calls are checked and
    recorded, not run.

    Values of outputs are undefined inside the function while it is explained (indices are zeros);
    only shapes and types are real. Nothing of it stays: no gradient is accumulated and no hook of
    an accumulation or of backward_dw runs, graphs are kept, Torch's random numbers go on where they
    were, and caches, delayed weight gradients, flags and a caller's buffers are as before. What is
    not moire's (a layer's running statistics, an optimizer's step) the function does do.
    """
    if not callable(function):
        raise wrong("explain: function", function, "callable")
    if contexts.is_explaining():
        raise invalid("explain: is already running; explain one call at a time")
    recording = contexts.Recording(Explanation(), contexts={}, undo=[])
    try:
        with contexts.changed(recording=recording), _nothing_of_torch_stays():
            function(*args, **kwargs)
        for context in recording.contexts.values():
            steps = json.loads(contexts.sized_text(lib.moire_explanation, context))
            recording.found.extend(steps)
        return recording.found
    finally:
        for target, values in reversed(recording.undo):
            for name, value in values.items():
                setattr(target, name, value)
        for context in recording.contexts.values():
            lib.moire_context_destroy(context)


@contextlib.contextmanager
def _nothing_of_torch_stays():
    if torch is None:
        yield
        return
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=gpus), _Unaccumulated():
        yield


def _grad(outputs, inputs, grad_outputs=None, retain_graph=None, *options, **more):
    return torch.autograd.grad(outputs, inputs, grad_outputs, True, *options, **more)


def _backward_of_one(tensor, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    _backward(tensor, gradient, create_graph=create_graph, inputs=inputs)


def _backward(
    tensors,
    grad_tensors=None,
    retain_graph=None,
    create_graph=False,
    grad_variables=None,
    inputs=None,
):
    """torch.autograd.backward, but for what it leaves in the leaves."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    grads = grad_variables if grad_tensors is None else grad_tensors
    leaves = _leaves_behind(tensors) if inputs is None else inputs
    if not leaves:  # then it says so
        torch.autograd.backward(tensors, grads)
    _grad(tensors, leaves, grads, create_graph=create_graph, allow_unused=True)


def _leaves_behind(tensors):
    """The tensors that a backward pass from these would accumulate gradients into."""
    edges = [torch.autograd.graph.get_gradient_edge(t) for t in tensors if t.requires_grad]
    nodes, seen, leaves = [edge.node for edge in edges], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return leaves


if torch is not None:
    from torch.overrides import TorchFunctionMode

    _INSTEAD = {
        torch.Tensor.backward: _backward_of_one,
        torch.autograd.backward: _backward,
        torch.autograd.grad: _grad,
    }

    class _Unaccumulated(TorchFunctionMode):
        """Backward passes run, and their gradients go nowhere: no `.grad` changes, no hook that
        waits for one fires (an optimizer's, a data-parallel reduction), and earlier graphs stay.
        """

        def __torch_function__(self, function, types, args=(), kwargs=None):
            function = _INSTEAD.get(function, function)
            with contexts.changed(keeps_gradients=function in _INSTEAD.values()):
                return function(*args, **(kwargs or {}))
