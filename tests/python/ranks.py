"""Ranks that are threads, each with a communicator."""

import threading

import moire

WINDOW = 1 << 20  # bytes


class Shared:
    """What all threads have."""

    def __init__(self, size):
        self.tensors, self.barrier = [None] * size, threading.Barrier(size)


class OfThreads:
    """One of them: whose group it is, and sums of tensors over all."""

    def __init__(self, communicator, shared):
        self.group, self.shared = communicator, shared
        self.rank, self.size = communicator.rank, communicator.size

    def sum(self, tensor):
        self.shared.tensors[self.rank] = tensor
        self.shared.barrier.wait(60)
        return sum(self.shared.tensors)


def in_threads(size, run, timeout_ms=60_000, window=WINDOW):
    """run(rank) on a thread for each; what they raised, by rank. One that raises leaves."""
    shared, raised = Shared(size), [None] * size
    communicators = moire.Communicator.threads(size, window, timeout_ms=timeout_ms)

    def work(communicator):
        try:
            with communicator:
                run(OfThreads(communicator, shared))
        except BaseException as e:
            raised[communicator.rank] = e

    threads = [threading.Thread(target=work, args=(c,)) for c in communicators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return raised


def succeed(raised):
    for error in raised:
        if error is not None:
            raise error
