"""Micro-batches over windows: what may run beside what, in streams that are none, and how large a
window has to be.
"""

import contextlib
import itertools

import moire
import pytest
import torch
from moire import nn
from ranks import in_threads, succeed

HIDDEN, WIDTH, EXPERTS = 64, 32, 4


class Stream:
    """What was done when what comes next here begins."""

    def __init__(self):
        self.before, self.reads = set(), []

    def wait_stream(self, other):
        self.before |= other.before

    def record_event(self):
        return frozenset(self.before)

    def wait_event(self, event):
        self.before |= event


class Streams:
    """The caller's and that of the moves. Each D, E and C of a part has all that was before it."""

    def __init__(self, monkeypatch):
        self.here = self.now = Stream()
        self.there, self.before, self.order, self.parts = Stream(), {}, [], {}
        self.halves = {}  # of the window, by what works on one
        ours, way = self, moire.travel.OverWindows

        def begin(moves, x):
            moves.here, moves.there = ours.here, ours.there

        @contextlib.contextmanager
        def stream(other):
            last, ours.now = ours.now, other
            yield
            ours.now = last

        monkeypatch.setattr(moire.micro_batches.Moves, "__init__", begin)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: s.reads.append(t))
        for name in ("spread", "gather"):
            monkeypatch.setattr(way, name, self.noted(getattr(way, name), name))
        for name in ("forward", "gradients"):
            run = getattr(moire.layers.Moe, name)
            monkeypatch.setattr(moire.layers.Moe, name, self.noted(run, "experts"))

    def noted(self, run, what):
        def call(first, *args, **kwargs):
            places = first if what != "experts" else args[2].route  # of (fw, fields, how, ...)
            part = self.parts.setdefault(id(places), len(self.parts))
            moves = "DC" if not self.is_backward else "CD"  # each is the gradient of the other
            letter = {"spread": moves[0], "gather": moves[1], "experts": "E"}[what]
            self.order.append(f"{letter}{part}")
            self.halves[self.order[-1]] = places.half
            self.before[self.order[-1]] = set(self.now.before)
            self.now.before.add(self.order[-1])
            return run(first, *args, **kwargs)

        return call

    is_backward = False


def layer_on(communicator, count, **options):
    torch.manual_seed(3)
    group = moire.ExpertParallel(communicator, num_experts=EXPERTS, **options)
    experts = nn.GroupedMLP(group.num_local_experts, HIDDEN, WIDTH)
    return nn.MoE(experts, nn.Router(HIDDEN, EXPERTS, k=2), group=group, micro_batches=count)


@pytest.mark.parametrize("count", (2, 3, 5))
def test_tokens_of_a_part_move_beside_the_experts_of_another(monkeypatch, count):
    (rank,) = moire.Communicator.threads(1, 1 << 20)
    layer, x = layer_on(rank, count, max_tokens=20), torch.randn(20, HIDDEN, requires_grad=True)
    streams = Streams(monkeypatch)
    y = layer(x)
    before, parts = streams.before, range(count)
    assert len(before) == 3 * count == len(streams.order)
    for i in parts:
        assert f"D{i}" in before[f"E{i}"] and f"E{i}" in before[f"C{i}"]
        assert f"C{i}" in streams.here.before  # y is whole
    for i in parts[1:]:
        assert f"D{i}" not in before[f"E{i - 1}"] and f"E{i - 1}" not in before[f"D{i}"]
        assert f"C{i - 1}" not in before[f"E{i}"] and f"E{i}" not in before[f"C{i - 1}"]
    for one, other in itertools.combinations(streams.order, 2):
        if streams.halves[one] == streams.halves[other]:
            assert one in before[other] or other in before[one]
    # What is made in one stream and read in the other: x, idx and weights of each part and y of it;
    # rows, weights and the plan, and what goes into y.
    assert len(streams.there.reads) == 4 * count and len(streams.here.reads) == 6 * count
    forward = streams.order[:]
    streams.order.clear()
    streams.is_backward = True
    y.sum().backward()
    assert streams.order == forward[::-1]


@pytest.mark.parametrize("size", (1, 2))
def test_explain_says_how_large_a_window_of_parts_has_to_be(size):
    x = torch.randn(21, HIDDEN)

    def step(communicator, count=3):
        layer = layer_on(communicator, count, max_tokens=21)
        layer(x.clone().requires_grad_()).sum().backward()

    rank = moire.Communicator.threads(size, 0)[0]
    needed = moire.explain(step, rank).window_bytes
    choices = size * 7 * 2 * 4  # of each part, up to a multiple of 256
    assert needed == 2 * (size * 7 * HIDDEN * 4 + 2 * (choices + -choices % 256))
    succeed(in_threads(size, lambda at: step(at.group), window=needed))
    found = f"the window has {needed - 256:,} bytes, needs {needed:,} for "
    for error in in_threads(size, lambda at: step(at.group), window=needed - 256):
        assert isinstance(error, moire.InvalidArgument) and found in str(error)


def test_the_halves_of_a_window_are_apart():
    (rank,) = moire.Communicator.threads(1, 1300)
    first, second = (rank.divide(((2, 64), torch.float32), half=h)[0] for h in (0, 1))
    assert first.data_ptr() == rank.window.data_ptr() == second.data_ptr() - 512
    for bad, found in ((2, "2"), (-1, "-1"), ("0", "'0'")):
        with pytest.raises(moire.InvalidArgument, match=f"half is {found}, must be an integer, 0"):
            rank.divide(((1,), torch.int32), half=bad)
    with pytest.raises(moire.InvalidArgument, match="the window has 1,300 bytes, needs 1,536 for"):
        rank.divide(((3, 64), torch.float32), half=1)
