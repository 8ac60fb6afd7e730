"""Progress on stderr: one line that is redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from .recipes import Config

WIDTH = 24


class Progress:
    """Of several runs that take turns."""

    def __init__(self, names: list[str], config: Config):
        self.config = config
        self.step = {name: 0 for name in names}
        self.bits: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.terminal = sys.stderr.isatty()
        self.start = time.monotonic()

    def update(self, name: str, step: int, bits: float, seconds: float) -> None:
        self.step[name] = step
        # The moving averages that people read loss curves with.
        for averages, value in ((self.bits, bits), (self.seconds, seconds)):
            averages[name] = averages.get(name, value) + 0.1 * (value - averages.get(name, value))
        if self.terminal:
            self._write(f"\r{self._text(name)}  {self._bar()} ")
        elif step % max(1, self.config.steps // 5) == 0 or step == self.config.steps:
            self._write(self._text(name) + "\n")

    def finish(self) -> None:
        if self.terminal:
            self._write("\r\033[K")

    def _bar(self) -> str:
        done = sum(self.step.values()) / (len(self.step) * self.config.steps)
        # Runs differ in speed: what is left is counted in each one's own seconds.
        left = sum(
            seconds * (self.config.steps - self.step[name])
            for name, seconds in self.seconds.items()
        )
        full = round(WIDTH * done)
        return f"{'█' * full}{'░' * (WIDTH - full)}  {left:4.0f} s left"

    def _text(self, name: str) -> str:
        step, speed = self.step[name], self.config.tokens_per_step / self.seconds[name]
        return (
            f"{name:<16}step {step:>{len(str(self.config.steps))}}/{self.config.steps}"
            f"  {self.bits[name]:5.2f} bits/byte  {speed:7,.0f} tokens/s"
        )

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
