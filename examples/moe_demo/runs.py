"""The recipes side by side: each trains in a process of its own, so that peak memory is that of one
recipe, and they take turns of some steps, so that what else the machine does slows all of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Callable
from typing import Any

from .progress import Progress
from .recipes import Config, Recipe

ROUND = 20  # steps before another recipe has its turn


def train_all(
    recipes: list[Recipe], config: Config, command: Callable[[Recipe], list[str]]
) -> list[dict[str, Any]]:
    """What each run reported; `command` starts the process that trains a recipe."""
    runs = [Run(recipe, command(recipe)) for recipe in recipes]
    progress = Progress([recipe.name for recipe in recipes], config)
    try:
        waiting = runs
        while waiting:
            waiting = [run for run in waiting if run.advance(progress)]
    finally:
        for run in runs:
            run.stop()
    progress.finish()
    return [run.found for run in runs]


class Run:
    """One recipe; the process waits for a line before each round of steps."""

    def __init__(self, recipe: Recipe, command: list[str]):
        self.name = recipe.name
        self.found: dict[str, Any] = {**dataclasses.asdict(recipe), "train": [], "validation": []}
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def advance(self, progress: Progress) -> bool:
        """Trains a round; whether there is another."""
        try:
            self.child.stdin.write("go\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass  # it has failed; what it printed tells why
        for line in self.child.stdout:
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "pause":
                return True
            if kind == "step":
                self.found["train"].append([event["step"], event["bits"]])
                progress.update(self.name, **event)
            elif kind == "validation":
                self.found["validation"].append([event["step"], event["bits"]])
            else:
                self.found.update(event)
        if self.child.wait() != 0 or "step_seconds" not in self.found:
            raise SystemExit(f"{self.name} failed; its message is above")
        return False

    def stop(self) -> None:
        self.child.kill()
        self.child.communicate()
