"""Calls go from Torch straight to C where nobody watches ops, and through Torch's dispatcher where
somebody does.
"""

import moire
import pytest
import torch
from moire import invoke
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class WatchingFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    """A subclass that changes nothing."""


class Rewriting(torch.Tensor):
    """A subclass whose memory is not its own: ops have to be seen, to be run on what it stands
    for.
    """

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrapped(value):
            if isinstance(value, (list, tuple)):
                return [unwrapped(v) for v in value]
            return value.inner if isinstance(value, cls) else value

        seen.append(str(function))
        kwargs = {key: unwrapped(value) for key, value in (kwargs or {}).items()}
        return function(*unwrapped(args), **kwargs)


seen = []


@pytest.fixture
def ways(monkeypatch):
    """True for each call that went straight to C, False for one that the dispatcher saw."""
    taken, run = [], invoke.invoke

    def watched(name, values, views, is_direct=False):
        result = run(name, values, views, is_direct)
        taken.append(is_direct)
        return result

    monkeypatch.setattr(invoke, "invoke", watched)
    return taken


def operands(generator):
    x, w = torch.randn(5, 4, generator=generator), torch.randn(2, 3, 4, generator=generator)
    return x, w, moire.Groups(splits=[2, 3])


def expected(x, w):
    return torch.cat([x[:2] @ w[0].T, x[2:] @ w[1].T])


def test_plain_tensors_and_parameters_go_straight_to_c(generator, ways):
    x, w, groups = operands(generator)
    y = moire.grouped_linear(x, torch.nn.Parameter(w), groups)
    y.sum().backward()
    assert ways == [True] * 3  # splits, forward, backward
    torch.testing.assert_close(y, expected(x, w))


@pytest.mark.parametrize("watching", [Watching, WatchingFunctions])
def test_a_mode_sees_every_op(generator, ways, watching):
    x, w, groups = operands(generator)
    with watching() as mode:
        y = moire.grouped_linear(x, w, groups)
    assert any("moire.grouped_linear" in seen for seen in mode.seen)
    assert ways == [True, False]
    torch.testing.assert_close(y, expected(x, w))


def test_a_profiler_sees_every_op(generator, ways):
    x, w, groups = operands(generator)
    with torch.profiler.profile() as profile:
        moire.grouped_linear(x, w, groups)
    assert "moire::grouped_linear" in {event.key for event in profile.key_averages()}
    assert ways == [True, False]


def test_subclasses_are_left_to_the_dispatcher(generator, ways):
    x, w, groups = operands(generator)
    y = moire.grouped_linear(x.as_subclass(Marked), w, groups)
    assert ways == [True, False]
    torch.testing.assert_close(y.as_subclass(torch.Tensor), expected(x, w))


def test_a_subclass_that_rewrites_ops_is_asked(generator):
    x, w, groups = operands(generator)
    seen.clear()
    y = torch.empty(5, 3)
    moire.grouped_linear(Rewriting(x), w, groups, out=y)
    assert "moire.grouped_linear.default" in seen
    torch.testing.assert_close(y, expected(x, w))


def test_meta_tensors_are_left_to_the_dispatcher(generator, ways):
    x, w, groups = operands(generator)
    y = moire.grouped_linear(x.to("meta"), w.to("meta"), groups)
    assert y.is_meta and y.shape == (5, 3)
    assert ways == [True]


def test_a_tracer_records_every_op(generator):
    x, w, groups = operands(generator)
    traced = torch.jit.trace(lambda t: moire.grouped_linear(t, w, groups), x, check_trace=False)
    assert "moire::grouped_linear" in str(traced.graph)
    torch.testing.assert_close(traced(2 * x), expected(2 * x, w))
