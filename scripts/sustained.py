"""The protocol of the GPU benchmarks: a function alone, call behind call, for as long as a GPU
takes to come to its power limit and then for as long as is timed. docs/performance.md says why each
part is as it is. tools/moire/sustained.cpp is the same; tests/tools/sustained.json holds both to
it.

The main path is `take_turns`, which calls `stretch`. A GPU here is anything with now(), flush(),
mark(), wait(mark) and seconds(mark, mark); tests give a simulated one.
"""

import sys
import time
from collections import deque
from typing import NamedTuple, Optional

from power import Power, mean_power
from results import ratio_span, summary


class Protocol(NamedTuple):
    warm_seconds: float = 0.7
    timed_seconds: float = 1.0
    turns: int = 2
    chunk_seconds: float = 0.05  # of calls that are enqueued at once; the host is two ahead

    @property
    def stretch_seconds(self):
        return self.warm_seconds + self.timed_seconds + 2 * self.chunk_seconds


SUSTAINED = Protocol()
SHORT = Protocol(warm_seconds=0.1, timed_seconds=0.2)
SHORT_NOTICE = (
    "SHORT MODE: the GPU does not come to its power limit; clocks and ratios are not those of "
    "steady state, and no energy is measured"
)


class Stretch(NamedTuple):
    call_seconds: list  # of the function alone, one per timed call
    window_seconds: float  # GPU time of those calls, their flushes and the gaps
    power: Power

    @property
    def millijoules(self):
        """Of a call, with its flush; None where power is not known."""
        if self.power.watts is None:
            return None
        return 1e3 * self.power.watts * self.window_seconds / len(self.call_seconds)


class _Chunk(NamedTuple):
    marks: list  # (before, behind) of each call

    @property
    def end(self):
        return self.marks[-1][1]


def _enqueue(gpu, function, calls):
    marks = []
    for _ in range(calls):
        gpu.flush()
        begin = gpu.mark()
        function()
        marks.append((begin, gpu.mark()))
    return _Chunk(marks)


def _seconds_of_an_iteration(gpu, function):
    """The second of two calls, with its flush; whatever has to be compiled is compiled before."""
    for _ in range(2):
        function()
    first, second = _enqueue(gpu, function, 1), _enqueue(gpu, function, 1)
    gpu.wait(second.end)
    return gpu.seconds(first.end, second.end)


def stretch(gpu, function, protocol, meter):
    """One Stretch. The GPU never waits for the host between its chunks."""
    calls = max(1, round(protocol.chunk_seconds / _seconds_of_an_iteration(gpu, function)))
    meter.start()
    started = gpu.now()
    chunks = deque([_enqueue(gpu, function, calls)])
    window, call_seconds, begin = 0.0, [], None
    while window < protocol.timed_seconds:
        chunks.append(_enqueue(gpu, function, calls))
        done = chunks.popleft()
        gpu.wait(done.end)
        if begin is not None:
            call_seconds += [gpu.seconds(*marks) for marks in done.marks]
            window = gpu.seconds(begin, done.end)
        elif gpu.now() - started >= protocol.warm_seconds:
            begin, timed_from = done.end, gpu.now()
    timed_to = gpu.now()
    gpu.wait(chunks.pop().end)
    readings = [r for r in meter.stop() if timed_from <= r.seconds <= timed_to]
    return Stretch(call_seconds, window, mean_power(readings))


def take_turns(gpu, functions, protocol, meter, tick=lambda: None):
    """{name: its Stretch of each turn}; every other turn goes backwards."""
    stretches = {name: [] for name in functions}
    for turn in range(protocol.turns):
        for name in functions if turn % 2 == 0 else reversed(functions):
            stretches[name].append(stretch(gpu, functions[name], protocol, meter))
            tick()
    return stretches


class Measured(NamedTuple):
    """What the turns of one function say."""

    turns: list  # Stretch
    flop: float
    flush: Optional[Stretch]  # of a function that does nothing

    def turn_ms(self):
        return [1e3 * summary(t.call_seconds)["median"] for t in self.turns]

    def turn_mj(self):
        """Of a call, less what an iteration costs in which nothing is called; None without it."""
        idle = self.flush.millijoules if self.flush else None
        found = [t.millijoules for t in self.turns]
        if idle is None or None in found:
            return None
        return [mj - idle for mj in found]

    def to_json(self):
        ms = summary([1e3 * s for t in self.turns for s in t.call_seconds])
        mj = self.turn_mj()
        per_turn = [
            {
                "ms": turn_ms,
                "calls": len(t.call_seconds),
                "window_seconds": t.window_seconds,
                "watts": t.power.watts,
                "sm_mhz": t.power.sm_mhz,
                "mj": mj[i] if mj else None,
            }
            for i, (t, turn_ms) in enumerate(zip(self.turns, self.turn_ms()))
        ]
        return {
            "ms": ms,
            "tflops": self.flop / ms["median"] / 1e9,
            "sm_mhz": _mean(t.power.sm_mhz for t in self.turns),
            "watts": _mean(t.power.watts for t in self.turns),
            "mj": _mean(mj or [None]),
            "flush_mj": self.flush.millijoules if self.flush else None,  # subtracted from mj
            "energy": self.turns[0].power.source,
            "turns": per_turn,
        }


def _mean(values):
    values = list(values)
    return None if not values or None in values else sum(values) / len(values)


def time_ratio(ours, theirs):
    """Their time over ours, turn by turn."""
    return ratio_span(theirs.turn_ms(), ours.turn_ms())


def rate_ratio(ours, theirs):
    """Our FLOP/s over theirs, turn by turn."""
    rates = ([m.flop / ms for ms in m.turn_ms()] for m in (ours, theirs))
    return ratio_span(*rates)


def plan_text(stretches, cases, protocol, seconds_per_case):
    """What a run will take, said before it begins."""
    on_gpu = stretches * protocol.stretch_seconds
    setup = cases * seconds_per_case
    return (
        f"plan: {stretches} stretches of {protocol.stretch_seconds:.1f} s = {on_gpu:.0f} s, and "
        f"some {setup:.0f} s to make and compile {cases} cases: {on_gpu + setup:.0f} s"
    )


class Progress:
    """A bar on stderr of the stretches that are done; nothing if stderr is no terminal."""

    def __init__(self, stretches, out=sys.stderr):
        self._planned, self._done, self._out = max(stretches, 1), 0, out
        self._began = time.perf_counter()

    def tick(self):
        self._done += 1
        if not self._out.isatty():
            return
        share = min(1.0, self._done / self._planned)
        spent = time.perf_counter() - self._began
        bar = f"{'#' * round(30 * share):<30}"
        words = f"{self._done} of {self._planned} stretches, {spent:.0f} s"
        print(f"\r[{bar}] {words}\033[K", end="", file=self._out, flush=True)

    def clear(self):
        """Makes room for a line of output."""
        if self._out.isatty():
            print("\r\033[K", end="", file=self._out, flush=True)
