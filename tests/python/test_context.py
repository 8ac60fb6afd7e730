"""Threads, settings, explain, strict, check, info, fork."""

import contextlib
import os
import subprocess
import sys
import threading

import moire
import pytest
import torch
import truth


def mlp(x, w1, w2, groups):
    return moire.grouped_mlp(x, w1, w2, groups)


@pytest.fixture
def call(generator):
    args = (
        truth.draw(generator, 70, 48),
        truth.draw(generator, 2, 64, 48),
        truth.draw(generator, 2, 48, 32),
    )
    return (*args, moire.Groups(splits=[30, 40]))


def test_info():
    info = moire.info()
    assert {"version", "compiler", "cuda", "library", "devices"} <= set(info)
    assert info["devices"][0]["device"] == "cpu" and os.path.exists(info["library"])


def test_explain_runs_nothing_and_lists_steps(call):
    x, w1, w2, groups = call
    leaf = x.clone().requires_grad_()
    out = torch.full((70, 48), 3.0)
    steps = moire.explain(moire.grouped_mlp, x, w1, w2, groups, out=out)
    assert (out == 3).all()
    assert [s["op"] for s in steps] == ["grouped_gemm_glu", "grouped_gemm"]
    assert all(s["implementation"] == "cpu" and s["refused"] == [] for s in steps)
    assert "grouped_gemm_glu: cpu (" in str(steps) and "workspace" in str(steps)
    both = moire.explain(lambda: mlp(leaf, w1, w2, groups).sum().backward())
    assert [s["op"] for s in both] == [
        "grouped_gemm_glu",
        "grouped_gemm",
        "grouped_gemm_glu_backward",
        "grouped_gemm",
    ]
    assert torch.equal(mlp(*call), mlp(*call))  # and everything runs again


def test_explain_still_checks_and_still_ends(call):
    x, w1, w2, groups = call
    with pytest.raises(moire.InvalidArgument, match="grouped_mlp: "):
        moire.explain(mlp, x[:, 1:], w1, w2, groups)
    with pytest.raises(moire.InvalidArgument, match="explain one call at a time"):
        moire.explain(moire.explain, mlp, *call)
    assert moire.explain(lambda: None) == []
    assert mlp(*call).isfinite().all()


def test_explain_of_routing(call):
    x, w1, w2, _ = call
    steps = moire.explain(moire.moe, x, w1, w2, torch.zeros(70, 1).long(), torch.ones(70, 1))
    assert [s["op"] for s in steps] == [
        "permute_plan",
        "permute",
        "grouped_gemm_glu",
        "grouped_gemm",
        "unpermute",
    ]


def test_any_number_of_threads_gives_the_same_bits(call):
    wanted = mlp(*call)
    for threads in (1, 2, 3):
        with moire.settings(num_threads=threads):
            assert torch.equal(mlp(*call), wanted)
            (step, *_) = moire.explain(mlp, *call)
            assert f"{threads} thread" in step["policy"]


def test_threads_follow_torch(call):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert "1 thread" in moire.explain(mlp, *call)[0]["policy"]
    finally:
        torch.set_num_threads(before)


def test_settings_nest_and_end():
    from moire.context import _settings

    def found():
        return _settings.get()[:2]

    with moire.settings(num_threads=2):
        with moire.strict(), moire.settings(num_threads=3):
            assert found() == (3, True)
        assert found() == (2, False)
    assert found() == (None, False)


def test_settings_are_of_one_thread():
    from moire.context import _settings

    found = []
    with moire.settings(num_threads=2):
        thread = threading.Thread(target=lambda: found.append(_settings.get().num_threads))
        thread.start()
        thread.join()
    assert found == [None]


def test_strict_runs_where_the_fastest_runs(call):
    wanted = mlp(*call)
    with moire.strict():
        assert torch.equal(mlp(*call), wanted)


def test_an_implementation_can_be_forced_by_name(call):
    wanted = mlp(*call)
    with moire.settings(implementation="cpu"):
        assert torch.equal(mlp(*call), wanted)
    with (
        moire.settings(implementation="sm90"),
        pytest.raises(moire.Unsupported, match='asks for "sm90"'),
    ):
        mlp(*call)


def test_check_is_quiet_when_nothing_failed(call):
    mlp(*call)
    moire.check()


def test_several_threads_call_at_once(call):
    wanted, found = mlp(*call), [None] * 4

    def work(i):
        found[i] = [mlp(*call) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(y, wanted) for ys in found for y in ys)


def test_messages_belong_to_the_thread_that_failed(call):
    x, w1, w2, groups = call
    messages = []

    def work(columns):
        for _ in range(50):
            with pytest.raises(moire.InvalidArgument) as e:
                mlp(x[:, :columns], w1, w2, groups)
            messages.append((columns, str(e.value)))

    threads = [threading.Thread(target=work, args=(c,)) for c in (8, 16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(messages) == 100
    assert all(f"[70, {columns}]" in message for columns, message in messages)


@pytest.mark.parametrize("threads", [None, 2])
def test_a_forked_child_gets_threads_of_its_own(threads, call):
    with contextlib.nullcontext() if threads is None else moire.settings(num_threads=threads):
        wanted = mlp(*call)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(mlp(*call), wanted) else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_device_that_is_not_there_says_why():
    from moire.context import current

    with pytest.raises(moire.Unsupported, match="CUDA"):
        current("cuda", 0)
    with pytest.raises(
        moire.InvalidArgument, match="tensors are on xpu:1; moire runs on cpu and cuda"
    ):
        current("xpu", 1)


def test_plans_for_a_gpu_that_is_not_here(call):
    with moire.settings(plan_for="sm90"):
        if moire.info()["cuda"].startswith("off"):
            with pytest.raises(moire.Unsupported, match="this build of moire is for CPUs only"):
                moire.explain(mlp, *call)
        else:
            steps = moire.explain(mlp, *[a.bfloat16() if torch.is_tensor(a) else a for a in call])
            assert {step["implementation"] for step in steps} == {"sm90"}
            with pytest.raises(moire.Unsupported, match="plans for sm90, on which nothing runs"):
                mlp(*call)
    moire.check()
    assert mlp(*call).shape == (70, 48)
    refused = pytest.raises(moire.InvalidArgument, match="plan_for is 90, must be the name")
    with refused, moire.settings(plan_for=90):
        pass


def test_beside_torch_the_threads_are_those_of_its_openmp(call):
    if not torch.backends.openmp.is_available():
        pytest.skip("this Torch computes on threads of another kind")
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(7)  # no other test has a context of that many
    try:
        torch.randn(512, 512) @ torch.randn(512, 512)
        before = threads_of_this_process()
        mlp(*call)
        assert threads_of_this_process() <= before
    finally:
        torch.set_num_threads(torch_threads)


def threads_of_this_process():
    return len(os.listdir("/proc/self/task"))


def test_a_build_for_cpus_says_so_where_a_gpu_is_asked_for():
    if not moire.info()["cuda"].startswith("off: "):
        pytest.skip("this build has CUDA")
    what = "this build of moire is for CPUs only, because .*; build it again with nvcc on the PATH"
    with pytest.raises(moire.Unsupported, match=what):
        moire.context.current("cuda", 0)


def test_threads_that_ended_do_not_end_the_process():
    """Torch's thread-local objects take the GIL when their thread ends, maybe after Python has."""
    code = """
import threading, moire
def run():
    with moire.settings(num_threads=1):
        pass
threads = [threading.Thread(target=run) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
"""
    ends = [subprocess.run([sys.executable, "-c", code], capture_output=True) for _ in range(4)]
    assert [end.returncode for end in ends] == [0] * 4


def test_threads_of_backward_passes_on_gpus_get_the_settings(monkeypatch):
    """By Torch's thread-local storage, in each block and after it; also if a GPU comes later."""

    def carried():
        key = "moire.settings"
        return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None

    before = carried()
    with moire.settings(num_threads=3):
        assert carried() is before  # no GPU is used
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        moire.context.current()
        assert carried().num_threads == 3
        with moire.strict():
            assert carried().strict and carried().num_threads == 3
            with pytest.raises(ZeroDivisionError), moire.settings(implementation="cpu"):
                assert carried().implementation == "cpu"
                raise ZeroDivisionError
            assert carried().strict and carried().implementation is None
        assert not carried().strict and carried().num_threads == 3
    assert carried().num_threads is None and not moire.context.is_explaining()
    # A thread that has blocks of nobody takes what it was carried over from.
    moire.context._settings._stash(moire.context._DEFAULT._replace(strict=True))
    assert moire.context._settings.get().strict
    with moire.settings(num_threads=2):
        assert moire.context._settings.get() == moire.context._DEFAULT._replace(
            strict=True, num_threads=2
        )
    assert moire.context._settings.get().strict
    moire.context._settings._stash(moire.context._DEFAULT)
