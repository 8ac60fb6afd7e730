"""What whole runs of the GPU benchmarks have in common: their arguments, the GPU that they need,
what a report begins with, and its file."""

import json
import pathlib
import sys

import moire
import torch
from results import library

from .shapes import SHAPES


def add_arguments(parser):
    shapes = [*SHAPES, "tiny"]
    parser.add_argument(
        "--shapes", nargs="+", choices=shapes, default=list(SHAPES), help="default: all but tiny"
    )
    parser.add_argument("--short", action="store_true", help="daily work: not steady state")
    parser.add_argument("--json", type=pathlib.Path, help="write everything to this file")


def need_gpu(script):
    if not torch.cuda.is_available():
        sys.exit(f"{script}: Torch finds no GPU")
    if moire.info()["cuda"].startswith("off"):
        sys.exit(f"{script}: this build of moire has no CUDA backend")


def new_report(bench):
    """Its beginning, of which the run's first line says a part."""
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "moire": library(),
    }
    print(f"{machine['gpu']}, torch {torch.__version__}; {bench.about_text()}")
    return {"command": " ".join(sys.argv), "machine": machine, **bench.about()}


def write(path, report):
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
