"""GPU time of functions by CUDA events: rounds in which each runs once, the last one's data flushed
out of the L2 cache before each.
"""

import statistics
import subprocess
import time

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU of today
_ROUNDS = 5, 200
_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Clock:
    def __init__(self, seconds):
        self.seconds = seconds  # per function
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

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
        samples = {name: [] for name in names}
        for i in range(count):
            turn = i % len(names)
            events = {n: self._timed(run[n]) for n in names[turn:] + names[:turn]}
            torch.cuda.synchronize()
            for name, (begin, end) in events.items():
                samples[name].append(begin.elapsed_time(end))
        return samples

    def _timed(self, function):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()  # and gives the host a start over the GPU
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
