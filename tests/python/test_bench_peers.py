"""scripts/bench_peers.py: every case on small tensors, where moire and its peers have to agree; no
GPU is needed for that.
"""

import pathlib
import sys

import pytest
import torch

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(torch, "compile", lambda *function, **_: (*function, lambda f: f)[0])
    import peers
    from peers import layers, mlps, others, products, shapes  # noqa: F401

    yield peers
    for name in [name for name in sys.modules if name.split(".")[0] == "peers"]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["products", "mlps", "layers"])
def test_peers_agree_on_every_case(peers, kind):
    tensors = peers.shapes.Tensors(peers.shapes.TINY, "cpu")
    names = []
    for case in getattr(peers, kind).cases(tensors):
        names.append(case.name)
        assert case.difference() < 1e-2, case.name
        peers.others.join(case)
        assert set(case.absent) <= {"DeepGEMM, padded", "Transformer Engine", "SonicMoE"}
        first = case.run["torch"]()
        for name, run in case.run.items():
            found = run()
            if name != "moire, FP32 added":  # returns dummies, or what was added up
                for a, b in zip(found, first):
                    assert peers.case.relative_difference(a, b) < 1e-2, (case.name, name)
    assert len(names) == (6 if kind == "products" else 2)


def test_the_difference_notices_a_wrong_row(peers):
    wanted = torch.randn(64, 16)
    found = wanted.clone()
    assert peers.case.relative_difference(found, wanted) == 0
    found[5] = 0
    assert peers.case.relative_difference(found, wanted) > 0.05


def test_the_median_of_an_even_number_lies_between(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import results

    found = results.summary([4.0, 1.0, 3.0, 2.0])
    assert found == {"median": 2.5, "p10": 1.0, "p90": 4.0}


def test_splits_are_ragged_and_complete(peers):
    for shape in peers.shapes.SHAPES.values():
        splits = peers.shapes.ragged_splits(shape.experts, shape.rows)
        assert splits.sum() == shape.rows and (splits >= 0).all()
        assert (splits % 8 != 0).any()
