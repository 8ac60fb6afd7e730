"""What the benchmarks' results have in common. The statistics are those of
tools/moire/statistics.cpp, and tests/tools/statistics.json holds both to one table."""

import math

import moire


def library():
    """The library that ran: what it is, not where somebody keeps it."""
    return {k: v for k, v in moire.info().items() if k not in ("library", "header")}


def percentile(values, share):
    """Linear between the two values around it."""
    values = sorted(values)
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def summary(values):
    """Median, 10th and 90th percentile."""
    names = {"median": 0.5, "p10": 0.1, "p90": 0.9}
    return {name: percentile(values, share) for name, share in names.items()}


def ratio_span(numerators, denominators):
    """Ratios turn by turn: their median, the least and the largest."""
    ratios = [a / b for a, b in zip(numerators, denominators)]
    return {"median": percentile(ratios, 0.5), "least": min(ratios), "most": max(ratios)}


def slope(points):
    """Of the straight line of least squares through (x, y)."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
