"""Progress on stderr: one line that is redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

WIDTH = 24


class Progress:
    def __init__(self, name: str, steps: int):
        self.name, self.steps = name, steps
        self.terminal = sys.stderr.isatty()
        self.bits = self.speed = 0.0
        self.start = time.monotonic()

    def update(self, step: int, bits: float, tokens_per_second: float) -> None:
        weight = 0.1 if step > 1 else 1.0  # the moving average that people read loss curves with
        self.bits += weight * (bits - self.bits)
        self.speed += weight * (tokens_per_second - self.speed)
        if self.terminal:
            full = round(WIDTH * step / self.steps)
            left = (time.monotonic() - self.start) / step * (self.steps - step)
            bar = "█" * full + "░" * (WIDTH - full)
            self._write(f"\r{self._text(step)}  {bar}  {left:4.0f} s left ")
        elif step % max(1, self.steps // 8) == 0 or step == self.steps:
            self._write(self._text(step) + "\n")

    def finish(self, text: str) -> None:
        clear = "\r\033[K" if self.terminal else ""
        self._write(f"{clear}{self.name:<14}{text}\n")

    def _text(self, step: int) -> str:
        return (
            f"{self.name:<14}step {step:>{len(str(self.steps))}}/{self.steps}"
            f"  {self.bits:5.2f} bits/byte  {self.speed:7,.0f} tokens/s"
        )

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
