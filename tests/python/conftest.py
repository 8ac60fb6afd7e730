"""Every test draws from a generator whose seed is printed with a failure; `pytest --seed N` draws
from that one again.

The `device` fixture runs a test on the CPU, and on a GPU where Torch has one: there new tensors lie
on it by default, so that the same test judges both.
"""

import os
import random

import moire
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="of every test's generator (default: a fresh one)")


@pytest.fixture
def seed(request):
    value = request.config.getoption("--seed")
    if value is None:
        value = random.SystemRandom().randrange(2**31)
    print(f"seed {value} in {os.path.basename(request.node.nodeid)}")
    return value


@pytest.fixture
def generator(seed, request):
    device = "cpu"
    if "device" in request.fixturenames:
        device = request.getfixturevalue("device")
    return torch.Generator(device).manual_seed(seed)


def _has_gpu():
    return torch.cuda.is_available() and any(d["device"] == "cuda" for d in moire.info()["devices"])


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("cuda", marks=pytest.mark.skipif(not _has_gpu(), reason="needs a GPU")),
    ]
)
def device(request):
    if request.param == "cpu":
        yield "cpu"
        return
    with torch.device("cuda"):
        yield "cuda"
    moire.check()  # nothing that the test left unsaid


@pytest.fixture(autouse=True)
def _leaves_no_finding():
    """What calls found in a test's values is not the next test's, which may be any other's."""
    yield
    for _ in range(10):  # a context says one at a time
        try:
            return moire.check()
        except moire.Error:
            continue


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """What a CPU alone does is skipped, with the reason."""
    try:
        return (yield)
    except moire.Unsupported as e:
        if "which the CPU emulates" in str(e):
            pytest.skip(str(e))
        raise
