"""scripts/sustained.py, power.py and results.py: the protocol on simulated GPUs, and statistics, by
the tables that tests/tools/sustained_test.cpp reads as well.
"""

import ctypes
import io
import json
import pathlib
import sys
import time
import types

import pytest
from simulated_gpu import SimulatedGpu

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = json.loads((ROOT / "tests" / "tools" / "sustained.json").read_text())["cases"]
STATISTICS = json.loads((ROOT / "tests" / "tools" / "statistics.json").read_text())


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import power
    import results
    import sustained

    yield types.SimpleNamespace(power=power, results=results, sustained=sustained)
    for name in ("power", "results", "sustained"):
        del sys.modules[name]


def test_statistics_are_those_of_the_table(scripts):
    for case in STATISTICS["summaries"]:
        found = scripts.results.summary(case["values"])
        assert found == pytest.approx({k: case[k] for k in found}), case
    for case in STATISTICS["ratio_spans"]:
        found = scripts.results.ratio_span(case["numerators"], case["denominators"])
        assert found == pytest.approx({k: case[k] for k in found}), case
    for case in STATISTICS["slopes"]:
        assert scripts.results.slope(case["points"]) == pytest.approx(case["slope"]), case


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_a_simulated_call_is_measured(scripts, case):
    s = scripts.sustained
    gpu = SimulatedGpu(case)
    flush = s.stretch(gpu, lambda: None, s.SUSTAINED, gpu)
    ticks = []
    turns = s.take_turns(gpu, {"a": gpu.call}, s.SUSTAINED, gpu, lambda: ticks.append(1))["a"]
    found = s.Measured(turns, 1e9, flush).to_json()
    assert len(ticks) == len(turns) == 2
    assert found["ms"]["median"] == pytest.approx(case["ms"], rel=1e-3)
    assert found["energy"] == case["energy"]
    assert found["sm_mhz"] == case["sm_mhz"]
    assert found["tflops"] == pytest.approx(1 / case["ms"], rel=1e-3)
    if case["mj"] is None:
        assert found["mj"] is None and found["watts"] is None
    else:
        assert found["mj"] == pytest.approx(case["mj"], rel=0.01)
    for turn in turns:
        assert turn.window_seconds >= s.SUSTAINED.timed_seconds


def test_what_is_timed_is_warm_and_turns_go_both_ways(scripts):
    s, case = scripts.sustained, CASES[0]
    gpu = SimulatedGpu(case)
    order = []

    def named(name):
        def call():
            order.append((name, gpu.now()))
            gpu.call()

        return call

    protocol = s.SUSTAINED
    s.take_turns(gpu, {"a": named("a"), "b": named("b")}, protocol, gpu)
    runs = [name for i, (name, _) in enumerate(order) if i == 0 or order[i - 1][0] != name]
    assert "".join(runs) == "aba"  # a, b, then b, a
    alone = [seconds for name, seconds in order if name == "b"]
    least = 2 * (protocol.warm_seconds + protocol.timed_seconds)
    assert least < alone[-1] - alone[0] < 2 * protocol.stretch_seconds + 0.2


def test_ratios_are_taken_within_a_turn(scripts):
    s = scripts.sustained
    power = scripts.power.Power()
    slow = s.Measured([s.Stretch([t], 1.0, power) for t in (2.0, 6.0)], 8.0, None)
    fast = s.Measured([s.Stretch([t], 1.0, power) for t in (1.0, 2.0)], 4.0, None)
    assert s.time_ratio(fast, slow) == {"median": 2.5, "least": 2.0, "most": 3.0}
    assert s.rate_ratio(fast, slow) == {"median": 1.25, "least": 1.0, "most": 1.5}
    assert slow.turn_mj() is None


class FakeLibrary:
    """What is used of libnvidia-ml: statuses and numbers of one GPU."""

    def __init__(self, **changed):
        self.numbers = {
            "nvmlDeviceGetTotalEnergyConsumption": (0, 123456789012),
            "nvmlDeviceGetPowerUsage": (0, 691500),
            "nvmlDeviceGetClockInfo": (0, 1410),
            **changed,
        }
        self.opened = []

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        self.opened.append(uuid.value)
        return 0 if uuid.value.startswith(b"GPU-") else 6

    def __getattr__(self, name):
        status, number = self.numbers[name]

        def read(_, *arguments):
            arguments[-1]._obj.value = number
            return status

        return read


def test_nvml_is_read(scripts):
    library = FakeLibrary()
    reading = scripts.power.Nvml("GPU-1", lambda name: library).read()
    assert (reading.millijoules, reading.watts, reading.sm_mhz) == (123456789012, 691.5, 1410)
    assert library.opened == [b"GPU-1"]
    without = FakeLibrary(nvmlDeviceGetTotalEnergyConsumption=(3, 0))
    assert scripts.power.Nvml("GPU-1", lambda name: without).read().millijoules is None
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID returned 6"):
        scripts.power.Nvml("none", lambda name: library)


def test_absent_sensors_are_said(scripts, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(scripts.power.Nvml.__init__, "__defaults__", (missing,))
    meter, reason = scripts.power.open_meter("GPU-1")
    assert reason == "libnvidia-ml.so.1: cannot open shared object file"
    meter.start()
    assert meter.stop() == []
    assert scripts.power.mean_power([]) == (None, None, None)


def test_a_meter_reads_while_it_runs(scripts):
    sensor = scripts.power.Nvml("GPU-1", lambda name: FakeLibrary())
    meter = scripts.power.Meter(sensor, period=0.001)
    meter.start()
    time.sleep(0.05)
    readings = meter.stop()
    seconds = [r.seconds for r in readings]
    assert len(readings) >= 2 and seconds == sorted(seconds)


def test_a_plan_is_said_and_its_progress_shown_on_terminals_only(scripts):
    s = scripts.sustained
    said = s.plan_text(10, 2, s.SUSTAINED, 6)
    assert said.startswith("plan: 10 stretches of 1.8 s = 18 s") and said.endswith("cases: 30 s")
    out = io.StringIO()
    progress = s.Progress(2, out)
    progress.tick()
    assert out.getvalue() == ""
    out.isatty = lambda: True
    progress.tick()
    assert "2 of 2 stretches" in out.getvalue()
