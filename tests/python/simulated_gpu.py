"""A GPU, its sensors and its host in simulated time, for scripts/sustained.py; the same as
tests/tools/simulated_gpu.h."""

import bisect

_HOST_SECONDS = 1e-6  # to enqueue a flush
_PERIOD = 0.005  # of readings
_AVERAGED = 0.1  # seconds that a power sample looks back


class SimulatedGpu:
    """Also a meter. Work is enqueued in host time and runs in the GPU's."""

    def __init__(self, case):
        self.case = case
        self._host = self._gpu = 0.0
        self._times, self._joules = [0.0], [0.0]  # energy drawn until then
        self.marked = []

    def now(self):
        return self._host

    def flush(self):
        self._host += _HOST_SECONDS
        self._work(self.case["flush_seconds"], self.case["flush_watts"])

    def call(self):
        self._host += self.case["call_host_seconds"]
        self._work(self.case["call_seconds"], self.case["call_watts"])

    def mark(self):
        return max(self._host, self._gpu)

    def wait(self, mark):
        self._host = max(self._host, mark)

    def seconds(self, begin, end):
        return end - begin

    def start(self):
        self._started = self._host

    def stop(self):
        if not self.case["sensor"]:
            return []
        count = int((self._host - self._started) / _PERIOD)
        return [self._reading(self._started + i * _PERIOD) for i in range(count)]

    def _reading(self, seconds):
        from power import Reading

        tick = self.case["tick_seconds"]
        counter = None if tick is None else 1e3 * self._drawn(seconds // tick * tick)
        recent = self._drawn(seconds) - self._drawn(max(0.0, seconds - _AVERAGED))
        return Reading(seconds, counter, recent / _AVERAGED, 1400.0)

    def _work(self, seconds, watts):
        begin = max(self._host, self._gpu)
        self._draw(begin, self.case["idle_watts"])
        self._draw(begin + seconds, watts)
        self._gpu = begin + seconds

    def _draw(self, until, watts):
        self._joules.append(self._joules[-1] + watts * (until - self._times[-1]))
        self._times.append(until)

    def _drawn(self, seconds):
        above = min(bisect.bisect_left(self._times, seconds), len(self._times) - 1)
        if above == 0:
            return self._joules[0]
        begin, end = self._times[above - 1 : above + 1]
        share = min(1.0, (seconds - begin) / (end - begin)) if end > begin else 1.0
        return self._joules[above - 1] + share * (self._joules[above] - self._joules[above - 1])
