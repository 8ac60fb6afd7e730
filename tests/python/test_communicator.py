"""Communicators by themselves: calls of moire.h on windows, who leaves, and what is refused."""

import copy
import ctypes
import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import moire
import numpy as np
import pytest
from ranks import NEEDS_GLOO, alone_in_gloo, in_threads, succeed

torch = pytest.importorskip("torch")
dist = torch.distributed
FAILED = moire.Code.RANK_FAILED


def two(window=4096, **options):
    return moire.Communicator.threads(2, window, **options)


def two_on(device, window=4096):
    return two(window, devices=None if device == "cpu" else [0, "cuda:0"])


class LibraryWithoutGpu:
    """The C library, of which ranks that ask for CUDA get the CPU's, and all that they asked."""

    def __init__(self, lib):
        self._lib, self.asked, self.indices, self.ends, self.made_ahead = lib, [], {}, [], []

    def __getattr__(self, name):
        return getattr(self._lib, name)

    def moire_communicator_threads(self, options, made):
        indices = list(options.indices[0 : options.num_ranks])
        numbers = options.window_bytes, options.timeout_ms, options.num_multiprocessors
        self.asked.append((options.device, *numbers, indices))
        options.device = self.MOIRE_CPU
        code = self._lib.moire_communicator_threads(options, made)
        self.indices.update((made[rank], index) for rank, index in enumerate(indices))
        return code

    def moire_communicator_nccl(self, options, made):
        """Of an ncclComm_t it is the second rank of three, on device 2."""
        ffi = moire.communicator.ffi
        if not options.nccl_comm:
            self.asked.append((options.rank, bytes(ffi.buffer(options.nccl_id, 128))))
            return self.moire_communicator_threads(options, made)
        self.asked.append(int(ffi.cast("uintptr_t", options.nccl_comm)))
        assert not (options.rank or options.num_ranks or options.indices or options.nccl_id)
        indices, three = ffi.new("int32_t[]", [0, 1, 2]), ffi.new("moire_communicator *[3]")
        options.num_ranks, options.indices = 3, indices
        code = self.moire_communicator_threads(options, three)
        made[0], self.indices[three[1]] = three[1], 2
        return code

    def moire_communicator_rank(self, pointer, rank, num_ranks, index):
        code = self._lib.moire_communicator_rank(pointer, rank, num_ranks, index)
        assert index[0] == -1
        index[0] = self.indices.get(pointer, -1)
        return code

    def moire_communicator_destroy(self, pointer):
        self.ends.append("left")
        self._lib.moire_communicator_destroy(pointer)

    def moire_context_destroy(self, context):
        self.ends.append("memory")
        self._lib.moire_context_destroy(context)

    def moire_context_create(self, options, made):
        self.asked.append((options.device, options.index))
        options.device, options.index = self.MOIRE_CPU, 0
        return self._lib.moire_context_create(options, made)


def as_tensor_without_gpu(memory, device):
    says = memory.__cuda_array_interface__
    assert (device.type, says["typestr"], says["data"][1]) == ("cuda", "|u1", False)
    array = (ctypes.c_uint8 * says["shape"][0]).from_address(says["data"][0])
    array.memory = memory  # as long as the tensor has it
    return torch.frombuffer(array, dtype=torch.uint8)


@pytest.fixture
def library(monkeypatch):
    """That of C, where device 1 of CUDA seems to be Torch's current one."""
    library = LibraryWithoutGpu(moire.communicator.lib)
    monkeypatch.setattr(moire.communicator, "lib", library)
    monkeypatch.setattr(moire.communicator, "_destroy_context", library.moire_context_destroy)
    monkeypatch.setattr(moire.context, "make_first_on", library.made_ahead.append)
    monkeypatch.setattr(torch, "as_tensor", as_tensor_without_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return library


@pytest.fixture
def asked(library):
    """What C was asked for."""
    return library.asked


def test_ranks_on_cuda_are_on_their_devices(library):
    asked = library.asked
    told = {"timeout_ms": 7, "num_multiprocessors": 16}
    ranks = moire.Communicator.threads(3, 0, devices=[1, "cuda:0", "cuda"], **told)
    assert asked == [(1, 1, 7, 16, [1, 0, 1]), (1, 1), (1, 0), (1, 1)]
    assert library.made_ahead == [1, 0, 1]  # what plain calls there need, before a rank waits
    assert [list(rank.contexts) for rank in ranks[:2]] == [[("cuda", i, None)] for i in (1, 0)]
    window = moire.Communicator.threads(1, 4096, devices=["cuda:2"])[0].window
    gc.collect()
    assert not window.any() and window.fill_(3).sum() == 3 * 4096
    for rank in ranks[::2]:  # which share device 1
        assert rank.contexts_of_calls(5) is rank.contexts
        with pytest.raises(moire.InvalidArgument, match="calls on the default stream of .* other"):
            rank.contexts_of_calls(0)
    assert ranks[1].contexts_of_calls(0) is ranks[1].contexts


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        (["cuda:0"], r"threads: devices has 1, needs 2, one for each rank"),
        ("cuda:0", "devices is 'cuda:0', must be a list of CUDA devices, one for each rank"),
        (0, "devices is 0, must be a list of CUDA devices"),
        (["cuda:0", "cpu"], r"devices\[1\] is cpu, must be one of CUDA; without devices it is"),
        ([-1, 0], r"devices\[0\] is -1, must be an integer, at least 0"),
        ([0, True], r"devices\[1\] is True, must be an integer, at least 0"),
        ([0, "gpu"], r"devices\[1\] is 'gpu', must be a device, such as"),
    ],
)
def test_devices_are_of_cuda_and_one_for_each_rank(devices, found):
    with pytest.raises(moire.InvalidArgument, match=found):
        two(devices=devices)
    if not torch.cuda.is_available():
        with pytest.raises(moire.Unsupported, match="given, but Torch finds none of CUDA"):
            two(devices=[0, 0])


@NEEDS_GLOO
def test_a_process_group_of_nccl_is_connected_by_an_id(asked, monkeypatch):
    connect = moire.Communicator.from_process_group
    with alone_in_gloo():
        found = "has cpu:gloo.*, needs cuda:nccl, .*; give the process group itself to moire.Exp"
        with pytest.raises(moire.Unsupported, match=found):
            connect(window_bytes=64)
        other = two(devices=[0, 0])[0]
        asked.clear()
        for bad, found in (
            (other, "a Communicator, must be a process group that this rank belongs to$"),
            (3, "is 3, must be"),
        ):
            with pytest.raises(moire.InvalidArgument, match=found):
                connect(bad, window_bytes=64)
        assert asked == []
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        monkeypatch.setattr(torch.cuda.nccl, "unique_id", lambda: bytes(range(128)))
        told = {"timeout_ms": 9, "num_multiprocessors": 8}
        rank = connect(dist.group.WORLD, window_bytes=64, **told)
        assert asked == [(0, bytes(range(128))), (1, 64, 9, 8, [1]), (1, 1)]
        assert (rank.rank, rank.size, len(rank.window)) == (0, 1, 64)
        assert rank.contexts_of_calls(0) is rank.contexts


def test_an_nccl_comm_says_rank_size_and_device_and_outlives_the_window(library):
    address = 2**63 + 4096  # of which a signed integer knows nothing
    told = {"window_bytes": 64, "timeout_ms": 9, "num_multiprocessors": 8}
    rank = moire.Communicator.from_nccl(address, **told)
    assert library.asked == [address, (1, 64, 9, 8, [0, 1, 2]), (1, 2)]
    assert (rank.rank, rank.size, list(rank.contexts)) == (1, 3, [("cuda", 2, None)])
    assert len(rank.window) == 64 and rank.contexts_of_calls(0) is rank.contexts
    last = rank.window[60:]
    rank.close()
    del rank
    gc.collect()
    assert library.ends == ["left"] and last.fill_(3).sum() == 12
    del last
    gc.collect()
    assert library.ends == ["left", "memory"]


@pytest.mark.parametrize(
    ("comm", "found"), [(0, "0"), (-8, "-8"), (2**64, str(2**64)), (True, "True"), (None, "None")]
)
def test_an_nccl_comm_is_an_address(library, comm, found):
    needs = f"from_nccl: comm, the address of an ncclComm_t, is {found}, must be an integer, 1 to"
    with pytest.raises(moire.InvalidArgument, match=needs):
        moire.Communicator.from_nccl(comm, window_bytes=64)
    with pytest.raises(moire.InvalidArgument, match="from_nccl: window_bytes is -1, must be"):
        moire.Communicator.from_nccl(8, window_bytes=-1)
    assert library.asked == []


def test_an_nccl_comm_needs_a_library_for_it():
    if moire.info()["cuda"]:
        pytest.skip("this build reads the ncclComm_t: see test_cuda_windows.py")
    with pytest.raises(moire.Unsupported, match="^communicator: .*CUDA"):
        moire.Communicator.from_nccl(8, window_bytes=64)


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


def test_a_window_is_divided_alike_and_says_what_it_needs(device):
    (rank, _) = two_on(device, window=1024)
    assert rank.window.device.type == rank.divide(((1,), torch.int32))[0].device.type == device
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


def test_windows_outlive_their_communicators(device):
    ranks = two_on(device)
    window = ranks[0].window
    window.fill_(3)
    ranks[1].close()
    del ranks
    gc.collect()
    assert window.sum() == 3 * 4096


WINDOW_GOES_WITHIN_CFFI = """
import moire
from moire._abi import ffi

rank = moire.Communicator.threads(1, 64)[0]
window = rank.window
rank.close()
del rank
with ffi._lock:  # as where the garbage collector runs while cffi parses a type
    del window
"""


def test_a_window_may_go_while_its_thread_is_within_cffi():
    command = [sys.executable, "-c", WINDOW_GOES_WITHIN_CFFI]
    subprocess.run(command, check=True, timeout=100)


def test_memory_of_gpus_stays_while_ranks_of_threads_may_wait(monkeypatch):
    """Giving it back waits for all GPUs, and the garbage collector does so on any thread."""
    from moire import communicator

    gone, ranks = [], two()
    for rank in ranks:
        monkeypatch.setattr(rank, "_meets_threads", True)  # as on GPUs
    monkeypatch.setattr(communicator, "_destroy_context", gone.append)
    communicator._gone({None: "of threads"}, os.getpid(), True, None)
    communicator._gone({None: "of one rank of NCCL"}, os.getpid(), False, None)
    communicator._gone({None: "of a parent"}, os.getpid() + 1, True, None)
    assert gone == ["of one rank of NCCL"]
    ranks[0].close()
    assert len(gone) == 1
    ranks[1].close()
    assert gone[1:] == ["of threads"]
    communicator._gone({None: "of others"}, os.getpid(), True, None)
    assert gone[2:] == ["of others"]


def test_a_window_is_left_alone_where_the_interpreter_ends(monkeypatch):
    from moire import communicator

    process = os.getpid()
    monkeypatch.setattr(communicator, "os", None)  # as modules are, then
    monkeypatch.setattr(communicator, "_destroy_context", None)
    communicator._gone({None: "of nobody"}, process, False, None)


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


def test_check_leaves_out_what_may_be_waiting_for_its_thread(monkeypatch):
    """The streams of ranks that other threads are: on GPUs of their own, and on one of all."""
    from moire import context

    def checked_by(rank, devices):
        waited = []
        check = types.SimpleNamespace(moire_context_check=lambda c: waited.append(c) or 0)
        plain = {("cuda", device, f"stream {r}"): f"{r}" for r, device in enumerate(devices)}
        plain["cuda", devices[-1], "moves"] = "moves of 2"
        ranks, others, before = moire.Communicator.threads(3, 0), two(0), two(0)
        for r, device in zip(ranks, devices):
            at, key = r.rank, ("cuda", device, f"stream {r.rank}")
            r.contexts = {("cuda", device, None): f"rank {at}", key: f"rank {at} in its stream"}
        for r, device in zip(before, devices):  # in the streams that others took over
            r.contexts = {("cuda", device, f"stream {r.rank}"): f"before {r.rank}"}
            r.close()

        def work(at):
            if at is not None:
                ranks[at].contexts_of_calls(1)
            with monkeypatch.context() as patch:
                patch.setattr(context, "lib", check)
                patch.setattr(context, "_contexts", plain)
                patch.setattr(context, "_current_stream", lambda _: f"stream {at}", raising=False)
                context.check()

        for at in (*range(3), rank):  # by now all have made calls
            waited.clear()
            thread = threading.Thread(target=work, args=(at,))
            thread.start()
            thread.join()
        assert all(c in waited for other in others for c in other.contexts.values())
        return [c for c in waited if isinstance(c, str)]

    of_rank = [[f"rank {at}", f"rank {at} in its stream"] for at in range(3)]
    assert checked_by(0, [0, 1, 1]) == ["0", *of_rank[0], "before 0"]
    assert checked_by(1, [0, 1, 1]) == ["1", *of_rank[1], "before 1"]
    assert checked_by(2, [0, 1, 2]) == ["2", "moves of 2", *of_rank[2]]
    everything = ["0", "1", "2", "moves of 2", *of_rank[0], *of_rank[1], *of_rank[2]]
    everything += ["before 0", "before 1"]
    assert checked_by(None, [0, 1, 1]) == everything  # a thread that is no rank


def test_explain_says_how_large_windows_have_to_be_without_other_ranks(device):
    devices = None if device == "cpu" else [0] * 8
    rank = moire.Communicator.threads(8, 0, devices=devices)[3]
    experts = moire.nn.GroupedMLP(2, 64, 32)
    group = moire.ExpertParallel(rank, num_experts=16, max_tokens=10)
    layer = moire.nn.MoE(experts, moire.nn.Router(64, 16, k=2), group=group)
    x = torch.randn(10, 64)
    found = moire.explain(lambda: layer(x).sum().backward())
    ops = [step["op"] for step in found]
    assert [ops.count(op) for op in ("dispatch_plan", "dispatch", "combine")] == [1, 2, 2]
    (x,) = (entry for entry in found.saved if entry["name"] == "x")  # which nobody else has
    assert (x["shape"], x["by_reference"]) == ([8 * 10, 64], False)
    needed = 8 * 10 * 64 * 4 + 2 * 768  # rows, and 640 bytes each of choices and of weights
    assert found.window_bytes == needed and f"window of each rank: {needed:,} B" in str(found)


def test_tensors_are_where_the_window_is(device):
    (rank, _) = two_on(device)
    group = moire.ExpertParallel(rank, num_experts=2, max_tokens=1)
    there = torch.device("meta")
    x, idx = torch.zeros(1, 8, device=there), torch.zeros(1, 1, dtype=torch.int64, device=there)
    found = f"dispatch: x is on meta, must be on {device}(:0)?, as the communicator's window is"
    with pytest.raises(moire.InvalidArgument, match=found):
        group.dispatch(x, idx, x[:, :1])
    if device == "cuda":
        x, idx = torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int64)
        with pytest.raises(moire.InvalidArgument, match="rank 0 of 2 calls on the default stream"):
            group.dispatch(x, idx, x[:, :1])


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
    for of_ranks in (group, ranks[0]):
        assert copy.deepcopy(of_ranks) is of_ranks and copy.copy(of_ranks) is of_ranks
        with pytest.raises(moire.Unsupported, match="cannot be pickled; save the state_dict"):
            pickle.dumps(of_ranks)
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
    with pytest.raises(moire.InvalidArgument, match="process_group: .* needs init_process_group"):
        moire.Communicator.from_process_group(window_bytes=1)
