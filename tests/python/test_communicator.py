"""Communicators by themselves: calls of moire.h on windows, who leaves, and what is refused."""

import copy
import gc
import os
import pickle
import re
import sys
import threading
from pathlib import Path

import moire
import numpy as np
import pytest
from ranks import in_threads, succeed

torch = pytest.importorskip("torch")
FAILED = moire.Code.RANK_FAILED


def two(window=4096, **options):
    return moire.Communicator.threads(2, window, **options)


@pytest.mark.parametrize("kind", ("torch", "numpy"))
def test_calls_of_moire_h_are_those_of_a_rank(kind):
    """Token t of rank s goes to rank t % 3, and comes back; windows begin poisoned."""
    fw, near = (torch, torch.from_numpy) if kind == "torch" else (np, np.asarray)

    def run(at):
        x = (np.arange(12, dtype=np.float32) + 100 * at.rank).reshape(4, 3)
        topk_idx = np.arange(4).reshape(4, 1) % 3
        places, counts = np.empty((4, 3), np.int32), np.empty(3, np.int64)
        x, topk_idx, places, counts = map(near, (x, topk_idx, places, counts))
        at.group.window.fill_(255)
        (x_recv,) = at.group.divide(((6, 3), torch.float32))
        if kind == "numpy":
            x_recv = x_recv.numpy()
        with moire.settings(communicator=at.group):
            options = {"topk_idx": topk_idx, "num_experts": 3, "capacity": 2}
            moire.call("dispatch_plan", **options, places=places, counts=counts)
            assert places.tolist() == [[0, -1, -1], [-1, 0, -1], [-1, -1, 0], [1, -1, -1]]
            moire.call("dispatch", x=x, places=places, counts=counts, x_recv=x_recv)
            for rank in range(3):
                first = 100.0 * rank + 3 * at.rank
                assert x_recv[2 * rank].tolist() == [first, first + 1, first + 2]
                assert np.isnan(x_recv[2 * rank + 1].tolist()).all() == (at.rank != 0)
            y = fw.zeros((4, 3), dtype=fw.float32)
            moire.call("combine", rows=x_recv, places=places, y=y)
        assert y.tolist() == x.tolist()

    succeed(in_threads(3, run))


def test_a_rank_that_raises_ends_the_calls_of_the_others():
    def run(at):
        if at.rank == 1:
            raise KeyError("a data loader's")
        group = moire.ExpertParallel(at.group, num_experts=3, max_tokens=4)
        x, idx = torch.zeros(4, 8), torch.zeros(4, 1, dtype=torch.int64)
        for _ in range(2):
            with pytest.raises(moire.Error, match="dispatch: rank 1 has left") as error:
                group.dispatch(x, idx, x[:, :1])
            assert error.value.code == FAILED

    raised = in_threads(3, run, timeout_ms=0)
    assert isinstance(raised[1], KeyError) and raised[0] is None and raised[2] is None


def test_a_rank_that_does_not_come_is_named():
    communicators = two(timeout_ms=50)
    group = moire.ExpertParallel(communicators[1], num_experts=2, max_tokens=1)
    x = torch.zeros(1, 8)
    with pytest.raises(moire.Error, match="rank 0 has not come within 50 ms of rank 1"):
        group.dispatch(x, torch.zeros(1, 1, dtype=torch.int64), x[:, :1])


def test_a_window_is_divided_alike_and_says_what_it_needs():
    (rank, _) = two(window=1024)
    rows, idx = rank.divide(((3, 5), torch.bfloat16), ((2, 2), torch.int32))
    assert rows.data_ptr() == rank.window.data_ptr() and rows.dtype == torch.bfloat16
    assert idx.data_ptr() == rank.window.data_ptr() + 256 and idx.shape == (2, 2)
    assert rank.window.data_ptr() % 256 == 0 and not rank.window.any()
    found = r"the window has 1,024 bytes, needs 1,280 for \[5, 64\] of torch.float32"
    with pytest.raises(moire.InvalidArgument, match=found):
        rank.divide(((5, 64), torch.float32))
    with pytest.raises(moire.InvalidArgument, match="a size is -3, must be an integer"):
        rank.divide(((-3, 5), torch.float32))
    for bad, found in ((3, "3"), (0, "0"), (None, "None"), ("float32", "'float32'")):
        with pytest.raises(moire.InvalidArgument, match=f"a dtype is {found}, must be a torch.dt"):
            rank.divide(((5, 3), bad))
    assert rank.divide(((0, 7), torch.float32))[0].shape == (0, 7)
    assert len(moire.Communicator.threads(1, 0)[0].window) == 0


def test_windows_outlive_their_communicators():
    ranks = two()
    window = ranks[0].window
    window.fill_(3)
    ranks[1].close()
    del ranks
    gc.collect()
    assert window.sum() == 3 * 4096


def test_check_goes_on_while_others_make_communicators():
    is_done, interval = threading.Event(), sys.getswitchinterval()

    def make():
        while not is_done.is_set():
            moire.Communicator.threads(20, 0)

    thread, kept = threading.Thread(target=make), moire.Communicator.threads(100, 0)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(500):
            moire.check()
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        thread.join()
    assert len(kept) == 100


def test_explain_says_how_large_windows_have_to_be_without_other_ranks():
    rank = moire.Communicator.threads(8, 0)[3]
    experts = moire.nn.GroupedMLP(2, 64, 32)
    group = moire.ExpertParallel(rank, num_experts=16, max_tokens=10)
    layer = moire.nn.MoE(experts, moire.nn.Router(64, 16, k=2), group=group)
    x = torch.randn(10, 64)
    found = moire.explain(lambda: layer(x).sum().backward())
    ops = [step["op"] for step in found]
    assert [ops.count(op) for op in ("dispatch_plan", "dispatch", "combine")] == [1, 2, 2]
    needed = 8 * 10 * 64 * 4 + 2 * 768  # rows, and 640 bytes each of choices and of weights
    assert found.window_bytes == needed and f"window of each rank: {needed:,} B" in str(found)


def test_the_guide_trains_a_layer_on_threads():
    page = Path(__file__).parents[2] / "docs" / "guides" / "expert_parallel.md"
    block = re.search(r"```python\n(def train.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = {"experts": 8, "hidden": 64, "width": 32, "x": torch.randn(4, 10, 64)}
    names.update(moire=moire, threading=threading, torch=torch)
    exec(block[1], names)
    for rank in names["ranks"]:
        rank.close()
    for name in ("ranks", "threads"):
        assert len(names[name]) == 4
    succeed(in_threads(4, lambda at: names["train"](at.group)))


def test_what_is_closed_forked_or_no_communicator_is_refused():
    ranks = two()
    x, idx = torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int64)
    group = moire.ExpertParallel(ranks[0], num_experts=2)
    assert copy.deepcopy(group) is group and copy.copy(group) is group
    with pytest.raises(moire.Unsupported, match="cannot be pickled; save the state_dict"):
        pickle.dumps(group)
    child = os.fork()
    if child == 0:
        try:
            group.dispatch(x, idx, x[:, :1])
        except moire.InvalidArgument as e:
            os._exit(0 if "process that forked this" in str(e) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ranks[0].close()
    ranks[0].close()
    assert repr(ranks[0]) == "Communicator(rank 0 of 2, 4,096 bytes, closed)"
    with pytest.raises(moire.InvalidArgument, match="communicator: rank 0 of 2 is closed"):
        group.dispatch(x, idx, x[:, :1])
    for bad, found in ((3, "is 3"), (np.zeros(3), "is a NumPy array")):  # which has no hash
        with pytest.raises(moire.InvalidArgument, match=f"{found}, must be a moire.Communicator"):
            moire.settings(communicator=bad).__enter__()
    with pytest.raises(moire.InvalidArgument, match="num_ranks is 0, must be an integer, 1 to"):
        moire.Communicator.threads(0, 1)
    with pytest.raises(moire.OutOfMemory, match="no memory for a window"):
        moire.Communicator.threads(1, 2**62)
    with pytest.raises(moire.Unsupported, match="windows of threads of the CPU"):
        moire.Communicator.from_process_group(window_bytes=1)
