"""Real text as bytes: the running Python's standard library, or files of the user's choice."""

from __future__ import annotations

import math
import random
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Share of the bytes that training never sees: enough files that no odd one decides.
HELD_OUT = 0.2
MAX_BYTES = 8_000_000
MAX_FILE_BYTES = 100_000  # of one library file: some are tables of millions of characters


@dataclass(frozen=True)
class Text:
    train: bytes
    held_out: bytes
    source: str

    @property
    def entropy(self) -> float:
        """Order-0 entropy in bits: what knowing how often each byte occurs, and no more, needs."""
        counts = Counter(self.held_out)
        total = len(self.held_out)
        return -sum(n / total * math.log2(n / total) for n in counts.values())


def load(paths: list[str] | None, seed: int) -> Text:
    """Whole files are held out, so that no held-out text continues a trained one; a single file
    is cut."""
    files = [Path(p) for p in paths] if paths else standard_library()
    source = f"{len(files)} files of your choice" if paths else "the Python standard library"
    random.Random(seed).shuffle(files)
    contents, size = [], 0
    for file in files:
        if size >= MAX_BYTES:
            break
        contents.append(file.read_bytes()[: None if paths else MAX_FILE_BYTES])
        size += len(contents[-1])
    if len(contents) == 1:
        cut = int(size * (1 - HELD_OUT))
        contents = [contents[0][cut:], contents[0][:cut]]
    held_out = contents[:1]
    while sum(map(len, held_out)) < HELD_OUT * size and len(held_out) + 1 < len(contents):
        held_out.append(contents[len(held_out)])
    train = b"".join(contents[len(held_out) :])
    return Text(train, b"".join(held_out), f"{source}, {size / 1e6:.1f} MB")


def standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
