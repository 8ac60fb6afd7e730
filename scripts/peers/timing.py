"""Torch's GPU as scripts/sustained.py wants it, and what is measured apart: the host's time of a
call, the memory that it keeps. What the host cannot launch as fast as the GPU runs is timed with
its host.
"""

import functools
import statistics
import time

import torch
from power import NoMeter, open_meter
from sustained import SHORT, SHORT_NOTICE, SUSTAINED, Measured, stretch, take_turns

_CACHES_FLUSHED = 2  # what is read is more than stays, also where a cache has two halves
_DENSE = 8192


class TorchGpu:
    """Marks are CUDA events on the current stream. The flush reads and writes nothing: lines that
    it leaves are clean, so that no call has to write back those of the flush before it."""

    def __init__(self):
        properties = torch.cuda.get_device_properties()
        self.uuid = f"GPU-{properties.uuid}"
        self.flush_bytes = _CACHES_FLUSHED * properties.L2_cache_size
        self._read = torch.zeros(self.flush_bytes // 4, device="cuda")
        self._sum = torch.zeros((), device="cuda")

    now = staticmethod(time.perf_counter)

    def flush(self):
        torch.sum(self._read, dim=0, out=self._sum)

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark):
        mark.synchronize()

    def seconds(self, begin, end):
        return begin.elapsed_time(end) / 1e3


class Bench:
    """Measures functions that take turns, dense cuBLAS among them: what dense_of(type) says."""

    def __init__(self, gpu, is_short, dense_of=None, turns=SUSTAINED.turns):
        self.gpu, self.is_short = gpu, is_short
        self.protocol = (SHORT if is_short else SUSTAINED)._replace(turns=turns)
        self.meter, self.no_power = (NoMeter(), "short mode") if is_short else open_meter(gpu.uuid)
        self._dense_of = functools.cache(dense_of or _dense_product)
        self._flush = None

    def measure(self, functions, tick=lambda: None, dense=torch.bfloat16):
        """{name: Measured} of {name: (function, its FLOP)}, and of "dense", of that type."""
        functions = functions | self._dense_of(dense)
        if self._flush is None:
            self._flush = stretch(self.gpu, lambda: None, self.protocol, self.meter)
        run = {name: function for name, (function, _) in functions.items()}
        stretches = take_turns(self.gpu, run, self.protocol, self.meter, tick)
        return {
            name: Measured(stretches[name], flop, self._flush)
            for name, (_, flop) in functions.items()
        }

    def about(self):
        """For the report."""
        return {
            "protocol": {"is_short": self.is_short, **self.protocol._asdict()},
            "energy": self.no_power or "see each peer",
            "flush_bytes": self.gpu.flush_bytes,
        }

    def about_text(self):
        p = self.protocol
        text = f"each alone {p.warm_seconds} s, then timed {p.timed_seconds} s, {p.turns} turns"
        return f"{SHORT_NOTICE}; {text}" if self.is_short else text + self._without_power()

    def _without_power(self):
        return f"; NO POWER, CLOCK OR ENERGY: {self.no_power}" if self.no_power else ""


def _dense_product(dtype):
    """Of BF16, or of FP8 by cuBLAS with one scale a matrix and its fast accumulation."""
    a, b = (torch.randn(_DENSE, _DENSE, device="cuda").to(dtype) for _ in range(2))
    one = torch.ones((), device="cuda")

    def scaled():
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    product = scaled if dtype.itemsize == 1 else lambda: a @ b
    return {"dense": (product, 2 * _DENSE**3)}


def host_microseconds(function, calls=10):
    """Median time of a call as the host sees it, which does not wait for the GPU."""
    torch.cuda.synchronize()
    samples = []
    for _ in range(calls):
        begin = time.perf_counter()
        function()
        samples.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(samples)


def bytes_kept(forward):
    """Memory that a forward leaves allocated for its backward, besides its result."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = forward()
    after = torch.cuda.memory_allocated()
    return after - before - sum(t.nbytes for t in result)
