"""How long a layer takes, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Mark(torch.autograd.Function):
    """The identity, which calls back when the gradient comes through."""

    @staticmethod
    def forward(ctx, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grad, None


class Timed(nn.Module):
    """A layer with a stopwatch.

    Autograd runs the newest node first, so that all of this layer's backward, the gradients of its
    weights included, happens between the marks at its output and at its input.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.seconds = 0.0
        self.started = 0.0

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer.weights()

    def forward(self, x: Tensor) -> Tensor:
        x = Mark.apply(x, self._stop)
        self._start()
        y = self.layer(x)
        self._stop()
        return Mark.apply(y, self._start)

    def take_seconds(self) -> float:
        """The time since the last call of this."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _start(self) -> None:
        synchronize()
        self.started = time.perf_counter()

    def _stop(self) -> None:
        synchronize()
        self.seconds += time.perf_counter() - self.started


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
