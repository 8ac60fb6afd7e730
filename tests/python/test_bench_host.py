"""scripts/bench_host.py: every case runs, and is printed and written."""

import json
import pathlib
import subprocess
import sys

from moire import invoke

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench_host.py"


def test_every_case_is_timed(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--seconds", "0.01", "--json", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(out.read_text())
    assert {"C: grouped_mlp", "grouped_mlp", "grouped_mlp and backward", "moe"} <= set(
        report["results"]
    )
    assert ("moe, by cffi" in report["results"]) == (invoke.compiled_for is not None)
    for name, samples in report["samples"].items():
        assert f"| {name} |" in printed
        assert samples and min(samples) > 0
