"""scripts/bench_torch.py: its MLPs agree, and both of PyTorch's are named, also the one that is not
there.
"""

import json
import pathlib
import sys

import pytest
import torch

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    import bench_torch

    small = {"groups": "3", "hidden": "32", "ffn": "16", "splits": [5, 0, 7]}
    monkeypatch.setitem(bench_torch.SHAPES, "small", small)
    yield bench_torch
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("bench_torch", "peers", "results"):
            del sys.modules[name]


def rows_of(bench, monkeypatch, path):
    words = ["--shapes", "small", "--seconds", "0.001", "--json", str(path)]
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["bench_torch.py", *words])
    monkeypatch.setattr(bench, "SHAPES", {"small": bench.SHAPES["small"]})
    try:
        bench.main()
    finally:
        torch.set_num_threads(threads)
    return json.loads(path.read_text())["rows"]


def test_each_peer_is_named_and_agrees(bench, monkeypatch, tmp_path, capsys):
    rows = rows_of(bench, monkeypatch, tmp_path / "out.json")
    shown = capsys.readouterr().out
    assert {row["peer"] for row in rows} == {"PyTorch loop over experts", "torch grouped_mm"}
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert row["peer"] in shown
        if "absent" not in row:
            assert row["relative_difference"] < (1e-5 if row["dtype"] == "fp32" else 3e-2), row
            assert row["ratio"] > 0


def test_a_torch_without_grouped_mm_says_so(bench, monkeypatch, tmp_path, capsys):
    def none():
        raise AttributeError("module 'torch' has no attribute '_grouped_mm'")

    monkeypatch.setattr(bench, "grouped_mm", none)
    rows = rows_of(bench, monkeypatch, tmp_path / "out.json")
    absent = [row for row in rows if row["peer"] == "torch grouped_mm"]
    assert len(absent) == 4
    reason = f"torch {torch.__version__} has none here: module 'torch' has no attribute"
    assert all(row["absent"].startswith(reason) for row in absent)
    assert reason in capsys.readouterr().out
