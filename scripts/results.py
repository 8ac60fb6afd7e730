"""What the benchmarks' results have in common."""

import statistics

import moire


def library():
    """The library that ran: what it is, not where somebody keeps it."""
    return {k: v for k, v in moire.info().items() if k not in ("library", "header")}


def percentile(values, share):
    values = sorted(values)
    return values[round(share * (len(values) - 1))]


def summary(values):
    """Median, 10th and 90th percentile."""
    tenths = {"p10": percentile(values, 0.1), "p90": percentile(values, 0.9)}
    return {"median": statistics.median(values), **tenths}
