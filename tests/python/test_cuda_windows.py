"""The cases of test_expert_parallel.py on windows of CUDA: ranks that are threads, spread over the
GPUs, and wait for each other on one that they share, and ranks of NCCL, each a process on a GPU of
its own. A process loads all kernels at once, since a kernel's first use may wait for those that
wait. Where ranks wait in vain for each other, a case says where each of them was, and those behind
it are left out.
"""

import faulthandler
import os
import traceback

import moire
import pytest
import test_expert_parallel as on_any
import torch
import torch.distributed as dist
import worlds
from moire.errors import unsupported
from ranks import WINDOW, in_threads, join_processes

THREADS, NCCL, COMM = (f"cuda windows of {what}" for what in ("threads", "NCCL", "an ncclComm_t"))
TIMEOUT_MS = 30_000  # until who waits for another gives up, on GPUs that others use as well
WORLDS = [(n, THREADS) for n in (1, 2, 4)] + [(n, kind) for kind in (NCCL, COMM) for n in (1, 2)]

# Of what kernels find, the next call of any thread says the first; a capture waits for the whole
# GPU, and so may a graph's first replay, of which tests/gpu has a test with several ranks.
OF_ONE_RANK = {"more_rows_than_there_is_room_for_are_an_error", "a_step_is_one_graph_on_gpus"}
OF_OTHERS = {  # who raise at once
    "what_the_ranks_are_told_has_to_be_equal",
    "bad_arguments_are_refused_before_anything_is_sent",
}


def rows_move_as_on_the_cpu(at):
    """To the bit, there and back, and their gradients."""
    if not hasattr(at, "share"):  # those on the CPU are threads
        return
    ranks = at.share(moire.Communicator.threads(at.size, WINDOW) if at.rank == 0 else None)[0]
    world, moved = worlds.World(at, 5, torch.bfloat16), []
    for communicator, device in ((at.group, worlds.DEVICE), (ranks[at.rank], "cpu")):
        group = moire.ExpertParallel(communicator, num_experts=worlds.EXPERTS, max_tokens=64)
        own = [t[world.mine].to(device) for t in (world.x, world.idx, world.weights, world.grad_y)]
        x, weights = (own[i].clone().requires_grad_() for i in (0, 2))
        got = group.dispatch(x, own[1], weights)
        y = group.combine(got.x, got)
        grads = own[3].to(y.dtype), got.topk_weights.detach()
        torch.autograd.backward((y, got.topk_weights), grads)
        moved.append((*got[:3], y, x.grad, weights.grad))
    for on_gpu, on_cpu in zip(*moved):
        assert torch.equal(on_gpu.cpu(), on_cpu)


CASES = {name: run for name, run in on_any.CASES.items() if name not in OF_OTHERS}
CASES[rows_move_as_on_the_cpu.__name__] = rows_move_as_on_the_cpu


def connected(kind):
    """By NCCL: of the process group anew, or of its own ncclComm_t."""
    told = {"window_bytes": WINDOW, "timeout_ms": TIMEOUT_MS}
    if kind == NCCL:
        return moire.Communicator.from_process_group(**told)
    backend = dist.group.WORLD._get_backend(torch.device("cuda"))
    if not hasattr(backend, "_comm_ptr"):
        raise unsupported("this Torch does not tell the ncclComm_t of a process group")
    return moire.Communicator.from_nccl(backend._comm_ptr(), **told)


def in_process(run, kind, stacks):
    """What the rank of this process raised, by rank, of those that NCCL connects."""
    at = worlds.OfProcesses()
    faulthandler.dump_traceback_later(TIMEOUT_MS / 1000 * 0.8, file=stacks)
    try:
        with connected(kind) as group:
            at.group = group
            run(at)
            torch.cuda.synchronize()
    except moire.Unsupported:
        raise
    except BaseException as e:
        return {at.rank: e}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {at.rank: None}


def on_devices(size, window, **options):
    """Communicators of threads that are spread over the GPUs."""
    devices = [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(size)]
    return moire.Communicator.threads(size, window, devices=devices, **options)


def work(process, size, kind, folder):
    """What run_cases does; what ends the process instead goes into a file of its own."""
    with (folder / f"end of process {process}").open("w") as file:
        faulthandler.enable(file)
        try:
            run_cases(process, size, kind, folder)
        except BaseException:
            traceback.print_exc(file=file)
            file.flush()
    os._exit(0)


def run_cases(process, size, kind, folder):
    """A world's ranks, or one: what each raised in a case goes into a file of the case's name."""
    worlds.DEVICE = torch.device("cuda")  # the one that is current in a rank's thread
    if kind != THREADS:
        torch.cuda.set_device(process)
        ranks = {"store": dist.FileStore(str(folder / "store"), size), "world_size": size}
        there = {} if kind == NCCL else {"device_id": torch.device("cuda", process)}  # at once
        dist.init_process_group("nccl", rank=process, **ranks, **there)
    for name, run in CASES.items():
        if is_skipped(size, kind, name):
            continue
        stacks = folder / f"{name}.stacks of process {process}"
        try:
            with stacks.open("w") as file:
                if kind != THREADS:
                    raised = in_process(run, kind, file)
                else:
                    options = {"timeout_ms": TIMEOUT_MS, "make": on_devices, "stacks": file}
                    raised = dict(enumerate(in_threads(size, run, **options)))
        except moire.Unsupported as e:  # NCCL is too old
            (folder / "unsupported").write_text(str(e))
            break
        for of, error in raised.items():
            found = error and traceback.format_exception(None, error, error.__traceback__)
            (folder / f"{name}.{of}").write_text("".join(found or ()))
        has_waited = bool(stacks.read_text())
        if kind == THREADS and has_waited and any(raised.values()):
            (folder / "in vain").write_text(name)
            break


def is_skipped(size, kind, name):
    return kind == THREADS and size > 1 and name in OF_ONE_RANK


@pytest.fixture(scope="module", params=WORLDS, ids="{0[0]} ranks on {0[1]}".format)
def world(request, tmp_path_factory):
    if not torch.cuda.is_available() or moire.info()["devices"][-1]["device"] != "cuda":
        pytest.skip("needs a GPU, and a build of moire with CUDA")
    size, kind = request.param
    processes = 1 if kind == THREADS else size
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_MODULE_LOADING", "EAGER")
        environment.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        args = (size, kind, folder)
        ranks = torch.multiprocessing.spawn(work, args, nprocs=processes, join=False)
    join_processes(ranks.processes)
    return size, kind, folder


@pytest.mark.parametrize("name", CASES)
def test_experts_over_windows(world, name):
    size, kind, folder = world
    if is_skipped(size, kind, name):
        pytest.skip("where ranks share a GPU, there is a case of one alone")
    if (folder / "unsupported").exists():
        pytest.skip((folder / "unsupported").read_text())
    ends = [folder / f"{name}.{rank}" for rank in range(size)]
    in_vain = folder / "in vain"
    if in_vain.exists() and not any(end.exists() for end in ends):
        pytest.skip(f"ranks waited in vain for each other in {in_vain.read_text()}, before this")
    told = (*folder.glob(f"{name}.stacks*"), *folder.glob("end of process *"))
    stacks = "".join(f"{file.name}:\n{file.read_text()}" for file in told)
    assert all(end.exists() for end in ends), f"a rank did not come to the end\n{stacks}"
    raised = [f"rank {rank}: {end.read_text()}" for rank, end in enumerate(ends) if end.read_text()]
    assert not raised, "".join((*raised, stacks))  # who fails leaves, which the others then raise
