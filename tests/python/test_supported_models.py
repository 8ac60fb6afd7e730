"""The list of supported models is what the installed transformers gives."""

import importlib
import pathlib

import pytest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
transformers = pytest.importorskip("transformers", "5")


@pytest.fixture
def supported_models(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("supported_models")


@pytest.mark.slow
def test_the_page_lists_what_this_transformers_gives(supported_models):
    version, lists = supported_models.listed()
    if transformers.__version__ != version:
        pytest.skip(f"the page lists transformers {version}, found {transformers.__version__}")
    regenerate = "the page is out of date: python scripts/supported_models.py --write"
    assert lists == supported_models.lists(), regenerate
