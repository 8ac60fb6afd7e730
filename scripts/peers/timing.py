"""GPU time of functions by CUDA events, as in a training step: stretches of calls one behind the
other, each behind a write that flushes the L2 cache, while the host runs ahead. A stretch first
warms up for as long as a GPU at work takes to lower its clocks: some ten milliseconds behind other
work, a few hundred behind a function that let it cool. Functions take turns, stretch by stretch.
What the host cannot launch as fast as the GPU runs is timed with its host. Host times are measured
apart (host_microseconds).
"""

import statistics
import subprocess
import time

import torch

_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU of today
_ROUNDS = 4
_WARMUP_MS = 250
_QUERY = "clocks.sm,clocks.mem,power.draw,temperature.gpu"


class Clock:
    def __init__(self, seconds):
        self.milliseconds = 1e3 * seconds  # of a stretch
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def rounds(self, run):
        """{name: the median milliseconds of each round's stretch}; every other round goes
        backwards, so that the first and the last of them also follow themselves."""
        names = list(run)
        for name in names:  # compile, fill the allocator's cache
            for _ in range(2):
                run[name]()
        one_call = {name: min(self._calls(run[name], 2)) for name in names}
        samples = {name: [] for name in names}
        for i in range(_ROUNDS):
            for name in names if i % 2 == 0 else reversed(names):
                samples[name].append(self._stretch(run[name], one_call[name]))
        return samples

    def _stretch(self, function, one_call):
        warmup = max(1, round(_WARMUP_MS / one_call))
        timed = max(2, round(self.milliseconds / one_call))
        return statistics.median(self._calls(function, warmup + timed)[warmup:])

    def _calls(self, function, count):
        """Milliseconds of each of so many calls."""
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda.synchronize()
        for begin, end in pairs:
            self._flush.zero_()
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]


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
    gpu = f"GPU-{torch.cuda.get_device_properties().uuid}"  # whichever of the machine's it is
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        values = lines.stdout.splitlines()[0].split(",")
        return dict(zip(_QUERY.split(","), (float(v) for v in values)))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return {}
