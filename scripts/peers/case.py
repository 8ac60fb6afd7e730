"""One thing that every peer does: its functions, its FLOP, what they have to agree on."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Case:
    name: str
    flop: int
    run: dict  # peer -> function, which returns tensors
    absent: dict = field(default_factory=dict)  # peer -> why it is not among them
    # Of others.py: peer -> what makes torch's results (the first of them at least) of its own.
    comparable: dict = field(default_factory=dict)
    check: Any = None  # () -> pairs of tensors to agree; None: what moire and torch return
    check_added: Any = None  # () -> such pairs of "moire, FP32 added", from zero
    limit: float = 2e-2  # of a relative difference (of norms), between two BF16 computations
    keeps: tuple = ()  # (peer, forward): count the bytes that it keeps for its backward
    operands: dict = field(default_factory=dict)  # for peers of others.py; "kind" says which
    dense: torch.dtype = torch.bfloat16  # of the dense product that it is compared with

    def difference(self):
        """The largest relative difference (of norms) from what torch computes: moire's, that of
        its FP32 gradients, the loop's."""
        pairs = list(self.check() if self.check else self._pairs("moire"))
        if self.check_added:
            pairs += self.check_added()
        if "loop" in self.run:
            pairs += self._pairs("loop")
        return max(relative_difference(a, b) for a, b in pairs)

    def difference_of(self, name):
        """The same of one of others.py, or None."""
        if name not in self.comparable:
            return None
        results = self.comparable[name](self.run[name]())
        return max(relative_difference(a, b) for a, b in zip(results, self.run["torch"]()))

    def _pairs(self, name):
        return list(zip(self.run[name](), self.run["torch"]()))


def relative_difference(found, wanted):
    """|found - wanted| / |wanted|, in double but for memory: piece by piece."""
    difference = norm = 0.0
    for a, b in zip(found.flatten().split(2**26), wanted.flatten().split(2**26)):
        a, b = a.double(), b.double()
        difference += (a - b).square().sum().item()
        norm += b.square().sum().item()
    return (difference / norm) ** 0.5 if norm else difference


def grouped_mm():
    """torch's grouped_mm, public since 2.10."""
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def no_grad(function):
    def run():
        with torch.no_grad():
            return function()

    return run
