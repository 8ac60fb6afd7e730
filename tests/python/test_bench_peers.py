"""scripts/bench_peers.py: every case on small tensors, where moire and its peers have to agree; no
GPU is needed for that.
"""

import importlib
import json
import pathlib
import sys

import pytest
import torch
from simulated_gpu import SimulatedGpu

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SIMULATED = json.loads((ROOT / "tests" / "tools" / "sustained.json").read_text())["cases"][0]


@pytest.fixture
def peers(monkeypatch):
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped_mm, which is the peer")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(torch, "compile", lambda *function, **_: (*function, lambda f: f)[0])
    import peers
    from peers import fp8, kernels, layers, mlps, others, products, shapes  # noqa: F401

    yield peers
    ours = {path.stem for path in SCRIPTS.glob("*.py")} | {"peers"}
    for name in [name for name in sys.modules if name.split(".")[0] in ours]:
        del sys.modules[name]


@pytest.fixture
def bench(peers, monkeypatch):
    """A Bench whose GPU is simulated; functions run on the CPU, and their time is the case's."""
    from peers.timing import Bench

    for name in ("synchronize", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    gpu = SimulatedGpu({**SIMULATED, "flush_seconds": 0.2})
    gpu.uuid, gpu.flush_bytes = "GPU-1", 2**20

    class Simulated(Bench):
        def measure(self, functions, tick=lambda: None, dense=torch.bfloat16):
            def with_time(run):
                return lambda: (run(), gpu.call())

            timed = {n: (with_time(f), x) for n, (f, x) in functions.items()}
            return super().measure(timed, tick, dense)

    made = Simulated(gpu, False, lambda dtype: {"dense": (gpu.call, 1e9)})
    made.meter, made.no_power = gpu, ""
    return made


@pytest.mark.parametrize("kind", ["products", "mlps", "layers", "fp8"])
def test_peers_agree_on_every_case(peers, kind):
    tensors = peers.shapes.Tensors(peers.shapes.TINY, "cpu")
    names = []
    for case in getattr(peers, kind).cases(tensors):
        names.append(case.name)
        limit = max(case.limit, 1e-2) if kind == "fp8" else 1e-2
        assert case.difference() < limit, case.name
        peers.others.join(case)
        assert set(case.absent) <= set(peers.others.makers(case.operands.get("kind")))
        first = case.run["torch"]()
        for name, run in case.run.items():
            found = case.comparable.get(name, list)(run())
            if name != "moire, FP32 added":  # returns dummies, or what was added up
                for a, b in zip(found, first):
                    assert peers.case.relative_difference(a, b) < limit, (case.name, name)
    assert len(names) == {"products": 6, "fp8": 3}.get(kind, 2)


def test_a_library_that_is_not_there_is_said_of_its_case(peers):
    tensors = peers.shapes.Tensors(peers.shapes.TINY, "cpu")
    names = ["DeepGEMM, padded", "DeepGEMM, padded", "Transformer Engine"]
    for case, name in zip(peers.fp8.cases(tensors), names):
        peers.others.join(case)
        if name not in case.run:
            assert "No module named" in case.absent[name]


def test_what_a_library_computes_is_compared_with_torch(peers, monkeypatch):
    def twice(operands):
        w1 = operands["w1"].detach()
        return lambda: [2 * w1], lambda results: [results[0][0] / 2]

    monkeypatch.setattr(peers.others, "_MAKERS", {"mlp": {"twice": twice}})
    tensors = peers.shapes.Tensors(peers.shapes.TINY, "cpu")
    case = next(peers.mlps.cases(tensors))
    peers.others.join(case)
    w1 = case.operands["w1"].detach()
    case.run["torch"] = lambda: [w1[0]]
    assert case.difference_of("twice") == 0 and case.difference_of("moire") is None
    case.run["torch"] = lambda: [2 * w1[0]]
    assert case.difference_of("twice") == pytest.approx(0.5)


def test_the_difference_notices_a_wrong_row(peers):
    wanted = torch.randn(64, 16)
    found = wanted.clone()
    assert peers.case.relative_difference(found, wanted) == 0
    found[5] = 0
    assert peers.case.relative_difference(found, wanted) > 0.05


def test_splits_are_ragged_and_complete(peers):
    for shape in peers.shapes.SHAPES.values():
        splits = peers.shapes.ragged_splits(shape.experts, shape.rows)
        assert splits.sum() == shape.rows and (splits >= 0).all()
        assert (splits % 8 != 0).any()
        aligned = peers.shapes.ragged_splits(shape.experts, shape.rows, 0, 128)
        assert aligned.sum() == shape.rows and (aligned % 128 == 0).all()


@pytest.mark.parametrize("part", ["gemm", "mlp", "layer", "fp8"])
def test_every_case_is_timed_as_planned(peers, bench, part, monkeypatch):
    import bench_peers

    monkeypatch.setattr(peers.others, "_MAKERS", {})
    monkeypatch.setattr(peers.others, "MODULES", {})
    args = bench_peers.arguments(["--shapes", "tiny", "--parts", part])
    tensors, ticks = peers.shapes.Tensors(peers.shapes.TINY, "cpu"), []
    cases = bench_peers.PARTS[part](tensors)
    tick = lambda: ticks.append(1)  # noqa: E731
    rows = list(bench_peers.timed_cases(cases, peers.shapes.TINY, bench, False, tick))
    assert (len(ticks), len(rows)) == bench_peers.planned(args)
    for row in rows:
        assert row["agrees"], row
        for name, peer in row["peers"].items():
            assert peer["ms"]["median"] == pytest.approx(SIMULATED["ms"], rel=1e-3)
            assert peer["mj"] == pytest.approx(SIMULATED["mj"], rel=0.05)
            assert name == "dense" or peer["host_us"] > 0
        assert row["ratios"]["moire / torch"]["most"] == pytest.approx(1, rel=1e-3)
        assert set(row["of_dense"]) == set(row["peers"]) - {"dense"}
        bench_peers.print_row(row)


def test_kernels_are_those_of_the_mlp_and_have_their_table(peers, bench):
    import bench_kernels

    tensors = peers.shapes.Tensors(peers.shapes.TINY, "cpu")
    shape = bench_kernels.measured_shape(tensors, bench)
    assert shape["differs"] == [] and len(shape["kernels"]) == bench_kernels.NUM_KERNELS
    assert shape["sum"]["moire"]["ms"] == pytest.approx(6 * SIMULATED["ms"], rel=1e-3)
    assert shape["sum"]["bare"]["mj"] == pytest.approx(6 * SIMULATED["mj"], rel=0.05)
    lines = bench_kernels.table(shape).splitlines()
    assert len({line.count(" | ") for line in lines[2:]}) == 1 and len(lines) == 2 + 7 + 2
    layer = peers.kernels.Layer(tensors)
    layer.grad_w2[0] += 1
    assert layer.differs_from_mlp() == ["grad_w2"]


def test_a_table_without_power_has_gaps(peers, bench):
    import bench_kernels
    from power import NoMeter

    bench.meter = NoMeter()
    shape = bench_kernels.measured_shape(peers.shapes.Tensors(peers.shapes.TINY, "cpu"), bench)
    assert shape["sum"]["moire"]["mj"] is None and shape["kernels"][0]["energy"] is None
    assert "| - |" in bench_kernels.table(shape)


@pytest.mark.parametrize(
    "script", ["bench_peers", "bench_kernels", "bench_recipes", "bench_decode"]
)
def test_a_whole_run_reports(peers, bench, script, monkeypatch, tmp_path, capsys):
    """main() on simulated hardware: the plan first, and everything in the file."""
    import moire
    from peers.shapes import Tensors

    module = importlib.import_module(script)
    out = tmp_path / "made" / "out.json"
    monkeypatch.setattr(sys, "argv", [script, "--shapes", "tiny", "--json", str(out)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(moire, "info", lambda: {"cuda": "13.0", "library": "kept quiet"})
    monkeypatch.setattr(module, "TorchGpu", lambda: None)
    monkeypatch.setattr(module, "Bench", lambda gpu, is_short, **options: bench)
    monkeypatch.setattr(module, "Tensors", lambda shape, _, *rest: Tensors(shape, "cpu", *rest))
    monkeypatch.setattr(peers.others, "_MAKERS", {})
    monkeypatch.setattr(peers.others, "MODULES", {})
    assert module.main() == 0
    printed = capsys.readouterr().out
    assert printed.index("a GPU") < printed.index("plan: ") < printed.index("tiny")
    report = json.loads(out.read_text())
    assert report["protocol"]["warm_seconds"] == 0.7 and not report["protocol"]["is_short"]
    assert report["machine"]["moire"] == {"cuda": "13.0"}
    if script == "bench_kernels":
        assert len(report["shapes"]) == 1
        return
    assert len(report["rows"]) == {"bench_peers": 13, "bench_recipes": 7, "bench_decode": 6}[script]
    if script != "bench_peers":
        return
    monkeypatch.setattr(sys, "argv", [script, "--table", str(out)])
    assert module.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 13 and len({line.count("|") for line in lines}) == 1
    assert "torch: TFLOP/s, ms, GHz, W, mJ; its time over moire's" in lines[0]
    assert "4.00, 1.40, " in lines[2] and "**1.000** [1.000, 1.000]" in lines[2]


def test_a_recipe_has_a_row_for_each_way_to_keep_its_weights(peers, bench):
    import bench_recipes

    tensors = peers.shapes.Tensors(peers.shapes.TINY, "cpu")
    rows = bench_recipes.rows_of(tensors, ["mxfp8", "fp8_block"], bench, lambda: None)
    assert [row["recipe"] for row in rows] == [
        "bf16",
        "mxfp8",
        "mxfp8, weights at each call",
        "mxfp8, weights kept dequantized",
        "mxfp8, weights kept dequantized, FP32 gradients added",
        "mxfp8, weights from FP32 masters at each call",
        "mxfp8, module compiled",
        "fp8_block",
        "fp8_block, weights at each call",
        "fp8_block, weights prepared",
        "fp8_block, weights prepared, FP32 gradients added",
        "fp8_block, weights from FP32 masters at each call",
        "fp8_block, module compiled",
    ]
    for row in rows:
        assert row["of_bf16"]["median"] > 0 and row["of_dense"]["median"] > 0
    assert bench_recipes.table(rows).count("\n") == len(rows) + 1


def test_few_tokens_are_timed_as_graphs_of_calls(peers, bench):
    import bench_decode

    bench._dense_of = lambda dtype: {}
    tensors, ticks = peers.shapes.Tensors(peers.shapes.TINY, "cpu"), []
    rows = list(
        bench_decode.rows_of(tensors, [1, 5], ["fp8_block"], bench, lambda: ticks.append(1))
    )
    assert [(row["tokens"], row["kind"]) for row in rows] == [
        (tokens, kind) for tokens in (1, 5) for kind in ("mlp", "layer")
    ]
    assert len(ticks) == 2 * 3 * len(rows)  # turns and functions
    for row in rows:
        assert list(row["peers"]) == ["torch", "bf16", "fp8_block"]
        assert row["agrees"], row["differences"]
        assert 0 < row["chosen_experts"] <= peers.shapes.TINY.experts
        assert row["weight_elements"] == 3 * 64 * 32 * row["chosen_experts"]
        assert bench_decode.microseconds(row, "bf16") * 16e-3 == pytest.approx(
            SIMULATED["ms"], rel=1e-3
        )
        assert "µs" in bench_decode.row_text(row)
    assert bench_decode.table(rows).count("\n") == len(rows) + 1
