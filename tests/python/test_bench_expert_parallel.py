"""scripts/bench_expert_parallel.py: every case of ranks that are threads runs, on a CPU."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench_expert_parallel.py"


def test_every_case_is_timed(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, str(SCRIPT), "--threads", "2", "--device", "cpu", "--tokens", "16"]
    command += ["--hidden", "64", "--layer", "64x32", "--micro-batches", "2", "3"]
    command += ["--rounds", "2", "--json", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(out.read_text())
    assert (report["ranks"], report["tokens"], report["gpu"]) == (2, 16, None)
    moves = ["plan", "dispatch", "dispatch in MXFP8", "combine", "plan, dispatch, combine"]
    layers = ["alone", "alone, shared expert", "over windows", "over windows, shared expert"]
    layers += [f"over windows, {n} micro-batches" for n in (2, 3)]
    layers += ["over windows, shared expert beside"]
    assert [row["case"] for row in report["rows"]] == moves + layers
    for row in report["rows"]:
        assert row["case"] in printed and len(row["seconds"]) == 2 and min(row["seconds"]) > 0
    assert [row["GB/s"] > 0 for row in report["rows"][:5]] == [False, True, False, True, True]
    assert all(row["x alone"] > 0 for row in report["rows"][5:])
