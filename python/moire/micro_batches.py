"""moe over ranks with its tokens cut into parts: what moves the tokens of one runs beside the
experts of another, in a stream of its own.

    of moves        D0 D1 .. C0 D2 .. C1 ....... C2      D dispatch, C combine, of parts 0, 1, 2
    the caller's       E0 ..... E1 ..... E2              E experts

Autograd runs first what was made last, in the stream in which it was made, so that a backward pass
is this picture again, from the right. Parts take the halves of a window in turns: what D wrote
there, and then experts, stays until C of that part, behind which, in the stream of moves, comes the
next D of that half.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from .autograd import pass_of_backward
from .context import restored_after_explaining
from .wgrad import Beta


class Moves:
    """The stream in which tokens of a call move, beside the caller's; on a CPU there is none."""

    def __init__(self, x):
        self.here = self.there = None
        if x.is_cuda and not hasattr(x, "fake_mode"):
            self.here = torch.cuda.current_stream(x.device)
            self.there = stream_beside(self.here, "moves")

    @contextlib.contextmanager
    def beside(self, *reads):
        """Inside the block calls run there, behind what is here by now, where `reads` were made."""
        if self.there is None:
            yield
            return
        self.there.wait_stream(self.here)
        for tensor in reads:
            tensor.record_stream(self.there)
        with torch.cuda.stream(self.there):
            yield

    def mark(self, *made):
        """What wait() takes before `made`, which were made there, are read here."""
        if self.there is None:
            return None
        for tensor in made:
            tensor.record_stream(self.here)
        return self.there.record_event()

    def wait(self, mark):
        if mark is not None:
            self.here.wait_event(mark)


@functools.cache
def stream_beside(stream, purpose):
    """Of each stream another: ranks that are threads must not wait for each other's."""
    return torch.cuda.Stream(stream.device)


class SumOfParts:
    """Where the gradient of a weight goes of a call in parts, which a backward pass comes to one
    after the other: the first writes it as `sink` says, the others add to that, and with the last
    autograd, or backward_dw, gets it.
    """

    def __init__(self, sink, count):
        self.sink, self.count = sink, count
        self.accumulate_into_main_grad, self.delayed = sink.accumulate_into_main_grad, sink.delayed
        self.parameters = getattr(sink, "parameters", ())
        self.within = self.written = None

    def destination(self, fw, like, weights, needs):
        if self.within == pass_of_backward():
            return self.written, Beta(int(self.written is not None))
        self.within, self.left, self.deferred = pass_of_backward(), self.count, {}
        self.written, beta = self.sink.destination(fw, like, weights, needs)
        return self.written, beta

    def returned(self, written, needs):
        self.left -= 1
        if self.left > 0:
            return None
        self.within = self.written = None
        return self.sink.returned(written, needs)

    def defer(self, backward, run, operands, *destination):
        self.deferred[f"part {self.left - 1}"] = run, operands
        if len(self.deferred) < self.count:
            return
        runs = _OneByOne([run for run, _ in self.deferred.values()], self.sink)
        read = {
            f"{name} of {part}": value
            for part, (_, operands) in self.deferred.items()
            for name, value in operands.items()
        }
        self.sink.defer(backward, runs, read, *destination)
        self.deferred = {}


class _OneByOne:
    """The runs of all parts. A call after one that failed does not add to main_grad what that did;
    other arrays are new ones, which have none of it.
    """

    num_done = 0

    def __init__(self, runs, sink):
        self.runs, self.adds_to_main_grad = runs, sink.accumulate_into_main_grad

    def __call__(self, written, beta):
        restored_after_explaining(self, "num_done")
        self.num_done *= self.adds_to_main_grad
        for run in self.runs[self.num_done :]:
            run(written, Beta(1) if self.num_done else beta)
            self.num_done += 1
