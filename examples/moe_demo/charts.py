"""The report's drawings, as SVG in the text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Any

Run = dict[str, Any]
Points = list[tuple[float, float]]

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 900, 48, 16, 14, 34
LINE_WIDTHS = [7.0, 3.6, 1.6, 1.2]  # the first curve is wide, so that later ones lie visibly on it
# Colours of the style sheet, by the index in RECIPES; see report.STYLE.
COLOURS = {
    "loop-fp32": "--c0",
    "loop-bf16": "--c1",
    "grouped_mm-fp32": "--c6",
    "grouped_mm-bf16": "--c7",
    "moire-fp32": "--c2",
    "moire-bf16": "--c3",
    "moire-mxfp8": "--c4",
}


def colour(index: int, runs: list[Run]) -> str:
    return f"var({COLOURS.get(runs[index]['name'], '--c5')})"


@dataclass(frozen=True)
class Axes:
    x_max: float
    y_min: float
    y_max: float
    height: int

    def x(self, value: float) -> float:
        return LEFT + value / self.x_max * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / (self.y_max - self.y_min)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def grid(self, x_label: str) -> str:
        parts = []
        for value in ticks(self.y_min, self.y_max, 6):
            y = self.y(value)
            parts += [level(y, "grid"), text(LEFT - 8, y + 4, f"{value:g}", "end")]
        for value in ticks(0, self.x_max, 8):
            label = f"{value:g}" if value else f"{x_label} 0"
            parts.append(text(self.x(value), self.height - 12, label, "middle"))
        return "".join(parts)

    def path(self, points: Points, stroke: str, width: float) -> str:
        line = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="curve" points="{line}" stroke="{stroke}" stroke-width="{width}"/>'


def text(x: float, y: float, content: str, anchor: str = "start", style: str = "") -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(content)}</text>"
    )


def level(y: float, style: str) -> str:
    """A horizontal line through the whole drawing."""
    return f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def bar(x: float, y: float, width: float, fill: str, opacity: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width:.1f}" height="26" rx="4" fill="{fill}"'
        f' opacity="{opacity}"/>'
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values between low and high, about `count` of them."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def window(steps: int) -> int:
    return max(1, steps // 25)


def smooth(points: Points) -> Points:
    """Means over the last few steps; see `window`."""
    size = window(len(points))
    sums, total = [], 0.0
    for index, (x, y) in enumerate(points):
        total += y - (points[index - size][1] if index >= size else 0.0)
        sums.append((x, total / min(index + 1, size)))
    return sums


def svg(height: int, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'
    )


def loss(runs: list[Run], entropy: float) -> str:
    curves = [smooth(run["train"]) for run in runs]
    values = [y for curve in curves for _, y in curve]
    values += [y for run in runs for _, y in run["validation"]]
    low = math.floor(2 * min(values) - 0.2) / 2
    axes = Axes(curves[0][-1][0], low, math.ceil(2 * max(*values, entropy)) / 2, 360)
    y = axes.y(entropy)
    label = f"order-0 entropy of the text {entropy:.2f}"
    parts = [axes.grid("step"), level(y, "entropy"), text(WIDTH - RIGHT, y - 7, label, "end")]
    for index, curve in enumerate(curves):
        parts.append(axes.path(curve, colour(index, runs), LINE_WIDTHS[min(index, 3)]))
    for index, run in enumerate(runs):
        radius, fill = 7.5 - 2 * min(index, 3), colour(index, runs)
        for step, bits in run["validation"]:
            x, y = axes.x(step), axes.y(bits)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>')
    parts.append(legend(runs))
    return svg(axes.height, "".join(parts), "training and validation loss of every run")


def legend(runs: list[Run]) -> str:
    """At the upper right, where a falling curve is not."""
    parts = []
    for index, run in enumerate(runs):
        y = 70 + 22 * index
        parts.append(
            f'<line x1="{WIDTH - 160}" x2="{WIDTH - 128}" y1="{y}" y2="{y}"'
            f' stroke="{colour(index, runs)}" stroke-width="{LINE_WIDTHS[min(index, 3)]}"/>'
        )
        parts.append(text(WIDTH - 118, y + 4, run["name"], style="name"))
    return "".join(parts)


def difference(runs: list[Run]) -> str:
    base = smooth(runs[0]["train"])
    curves = [
        [(x, 1000 * (y - b)) for (x, y), (_, b) in zip(smooth(run["train"]), base)] for run in runs
    ]
    reach = 1.1 * max([abs(y) for curve in curves for _, y in curve] + [1.0])
    axes = Axes(base[-1][0], -reach, reach, 190)
    parts = [axes.grid("step")]
    for index, curve in enumerate(curves):
        parts.append(axes.path(curve, colour(index, runs), 2.5 if index == 0 else 1.8))
    return svg(axes.height, "".join(parts), "difference of the training losses")


def step_times(runs: list[Run]) -> str:
    longest = max(run["step_seconds"] for run in runs)
    left, room = 120, WIDTH - 120 - 90
    parts = []
    for index, run in enumerate(runs):
        y, fill = 8 + 40 * index, colour(index, runs)
        whole = room * run["step_seconds"] / longest
        label = f"{1000 * run['moe_seconds']:.0f} of {1000 * run['step_seconds']:.0f}"
        parts += [
            text(left - 12, y + 18, run["name"], "end", "name"),
            bar(left, y, whole, fill, 0.28),
            bar(left, y, room * run["moe_seconds"] / longest, fill, 1),
            text(left + whole + 8, y + 18, label),
        ]
    return svg(40 * len(runs) + 8, "".join(parts), "time of one step of every run")
