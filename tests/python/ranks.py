"""Ranks that are threads, each with a communicator; on a GPU each with a stream of its own. And
ranks that are processes of gloo.
"""

import contextlib
import functools
import os
import sys
import threading
import time
import traceback

import moire
import pytest
import torch
import torch.distributed as dist

WINDOW = 1 << 20  # bytes

NEEDS_GLOO = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this Torch has no gloo"
)


class Shared:
    """What all threads have."""

    def __init__(self, size):
        self.values, self.barrier = [None] * size, threading.Barrier(size)


class OfThreads:
    """One of them: whose group it is, and what all of them say."""

    def __init__(self, communicator, shared):
        self.group, self.shared = communicator, shared
        self.rank, self.size = communicator.rank, communicator.size

    def share(self, value):
        """The value of each rank."""
        if self.group.window.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.shared.values[self.rank] = value
        self.shared.barrier.wait(60)
        found = list(self.shared.values)
        self.shared.barrier.wait(60)
        return found

    def sum(self, tensor):
        return sum(t.to(tensor.device) for t in self.share(tensor))


@functools.cache
def streams(device):
    """Made together and kept: one that comes later may get the hardware queue of one that waits."""
    return [torch.cuda.Stream(device) for _ in range(8)]


def stream_of(communicator):
    """What a rank's thread runs its calls in."""
    if not communicator.window.is_cuda:
        return contextlib.nullcontext()
    return torch.cuda.stream(streams(communicator.window.device)[communicator.rank])


def in_threads(
    size, run, timeout_ms=60_000, window=WINDOW, make=moire.Communicator.threads, stacks=None
):
    """run(rank) on a thread for each; what they raised, by rank. One that raises leaves. Into
    `stacks`, a file, goes where each is shortly before the first deadline.
    """
    shared, raised = Shared(size), [None] * size
    communicators = make(size, window, timeout_ms=timeout_ms)
    streams_of = [stream_of(communicator) for communicator in communicators]

    def work(communicator):
        try:
            with communicator, streams_of[communicator.rank]:
                run(OfThreads(communicator, shared))
                if communicator.window.is_cuda:
                    torch.cuda.current_stream().synchronize()
        except BaseException as e:
            raised[communicator.rank] = e

    threads = [threading.Thread(target=work, args=(c,)) for c in communicators]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    if stacks is not None:
        join_until(began + timeout_ms / 1000 * 0.8, threads)
        stacks.write(where(threads))
        stacks.flush()
    join_until(began + max(60, 3 * timeout_ms / 1000), threads)
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            raised[rank] = TimeoutError(f"rank {rank} has not come to its end")
    for error in raised:
        let_go(error)
    return raised


def join_until(end, threads):
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))


def where(threads):
    """The stacks of those that run. Not faulthandler's, which looks while they run on and was seen
    to end the process.
    """
    frames = sys._current_frames()
    return "".join(
        f"rank {rank}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for rank, thread in enumerate(threads)
        if thread.ident in frames
    )


def let_go(error):
    """Of what the frames have that raised it: they and the list of what was raised have each other,
    and a window that the garbage collector gives back, on a rank's thread, waits for the others'
    GPUs, which may wait for that rank.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


_FOR_EVER = []  # process groups


@contextlib.contextmanager
def alone_in_gloo():
    """A process group of this process. NOTE: torch 2.4 ends a group's threads while it holds the
    GIL, for which one of them may wait to let go of a tensor; so no group ends before its process.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _FOR_EVER.append(dist.group.WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def in_gloo(rank, size, path, cases):
    """What torch.multiprocessing.spawn starts `size` times: case(rank) of each. The group is not
    destroyed: see alone_in_gloo.
    """
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
    try:
        for case in cases:
            case(rank)
        dist.barrier()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def join_processes(processes, seconds=300):
    """Waits so long for all of them; those that hang are killed, and left what they wrote."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        process.kill()


def succeed(raised):
    for error in raised:
        if error is not None:
            raise error
