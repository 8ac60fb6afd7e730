"""GPU time of functions by CUDA events: rounds in which each runs once, the last one's data flushed
out of the L2 cache before each. The GPU flushes for longer than the host needs to launch a
function, so that what is timed is the GPU, as in a training step whose host runs ahead; a function
that waits for the GPU itself, or launches for milliseconds, is timed with its host. Host times are
measured apart (host_microseconds).
"""

import math
import statistics
import subprocess
import time

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU of today
_MAX_FLUSHES = 64  # a few milliseconds
_ROUNDS = 5, 200
_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Clock:
    def __init__(self, seconds):
        self.seconds = seconds  # per function
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._flush_ms = min(self._time_of_a_flush() for _ in range(5))

    def rounds(self, run):
        """{name: milliseconds of each round}; the order turns from round to round."""
        names = list(run)
        for name in names:  # compile, fill the allocator's cache
            for _ in range(2):
                run[name]()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for name in names:
            run[name]()
        torch.cuda.synchronize()
        one = time.perf_counter() - start
        count = max(_ROUNDS[0], min(_ROUNDS[1], int(self.seconds * len(names) / one)))
        flushes = {name: self._flushes_during(run[name]) for name in names}
        samples = {name: [] for name in names}
        for i in range(count):
            turn = i % len(names)
            events = {n: self._events(run[n], flushes[n]) for n in names[turn:] + names[:turn]}
            torch.cuda.synchronize()
            for name, (begin, end) in events.items():
                samples[name].append(begin.elapsed_time(end))
        return samples

    def _time_of_a_flush(self):
        begin, end = self._events(self._flush.zero_, 1)
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def _flushes_during(self, function):
        """How many flushes the GPU needs longer for than the host for launching it twice."""
        flushes = math.ceil(2e-3 * host_microseconds(function, 3) / self._flush_ms)
        return min(max(1, flushes), _MAX_FLUSHES)

    def _events(self, function, flushes):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            self._flush.zero_()
        begin.record()
        function()
        end.record()
        return begin, end


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


def clocks():
    """What nvidia-smi says of clocks (MHz), power (W) and temperature now; {} without it."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        values = lines.stdout.splitlines()[torch.cuda.current_device()].split(",")
        return dict(zip(_QUERY.split(","), (float(v) for v in values)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, round(share * (len(values) - 1)))]


def summary(values):
    """Median, 10th and 90th percentile."""
    shares = ("median", 0.5), ("p10", 0.1), ("p90", 0.9)
    return {name: percentile(values, share) for name, share in shares}
