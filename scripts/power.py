"""What a GPU draws while a benchmark runs, through NVML, which is opened when it is wanted. The
same as tools/moire/power.cpp; tests/tools/sustained.json holds both to it.

mean_power is where energy starts: the slope of the GPU's total energy counter between the moments
at which it was seen to move, because it moves a few tens of times a second only; where there is no
such counter, or it moved less than three times, the mean of the power samples.
"""

import ctypes
import threading
import time
from typing import NamedTuple, Optional

from results import slope

COUNTER, SAMPLES = "energy counter", "power samples"
_SM_CLOCK = 1  # NVML_CLOCK_SM
_FEWEST_TICKS = 3


class Reading(NamedTuple):
    seconds: float  # of the host's clock
    millijoules: Optional[float]  # since the driver was loaded
    watts: Optional[float]
    sm_mhz: Optional[float]


class Power(NamedTuple):
    watts: Optional[float] = None
    sm_mhz: Optional[float] = None
    source: Optional[str] = None  # of the watts


def mean_power(readings):
    """Over readings in the order of their time."""
    clocks = [r.sm_mhz for r in readings if r.sm_mhz is not None]
    sm_mhz = sum(clocks) / len(clocks) if clocks else None
    counted = [r for r in readings if r.millijoules is not None]
    pairs = zip(counted, counted[1:])
    ticks = [(b.seconds, b.millijoules) for a, b in pairs if a.millijoules != b.millijoules]
    if len(ticks) >= _FEWEST_TICKS:
        return Power(slope(ticks) / 1e3, sm_mhz, COUNTER)
    watts = [r.watts for r in readings if r.watts is not None]
    if watts:
        return Power(sum(watts) / len(watts), sm_mhz, SAMPLES)
    return Power(sm_mhz=sm_mhz)


class Nvml:
    """One GPU's sensors. Raises OSError with the reason where they cannot be had."""

    def __init__(self, uuid, load=ctypes.CDLL):
        self._library = load("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._require("nvmlInit_v2")
        handle = ctypes.byref(self._device)
        self._require("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(uuid.encode()), handle)

    def read(self):
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
        seconds = time.perf_counter()
        milliwatts = self._number("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        sm_mhz = self._number("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_int(_SM_CLOCK))
        watts = None if milliwatts is None else milliwatts / 1e3
        return Reading(seconds, millijoules, watts, sm_mhz)

    def _number(self, name, kind, *arguments):
        value = kind()
        status = getattr(self._library, name)(self._device, *arguments, ctypes.byref(value))
        return value.value if status == 0 else None

    def _require(self, name, *arguments):
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise OSError(f"NVML: {name} returned {status}")


class Meter:
    """Readings of a sensor in a thread of its own, between start() and stop()."""

    def __init__(self, sensor, period=0.005):
        self._sensor, self._period = sensor, period

    def start(self):
        self._readings, self._is_over = [], threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._is_over.wait(self._period):
            self._readings.append(self._sensor.read())

    def stop(self):
        """What was read."""
        self._is_over.set()
        self._thread.join()
        return self._readings


class NoMeter:
    """Where there are no sensors."""

    def start(self):
        pass

    def stop(self):
        return []


def open_meter(uuid):
    """(meter, why it reads nothing; empty where it reads)."""
    try:
        return Meter(Nvml(uuid)), ""
    except (OSError, AttributeError) as e:  # no library, no device, or one without such a function
        return NoMeter(), str(e)
