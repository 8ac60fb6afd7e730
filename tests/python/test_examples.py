"""The examples of the README and the guides run as they are."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    "name, needs, said",
    [
        ("pytorch", "torch", "torch.Size([100, 64]) torch.Size([8, 256, 64])"),
        ("mxfp8", "torch", "saved for the backward: "),
        ("quantized_gradient", "torch", "[True, True, True]"),
        ("huggingface", "transformers", "experts run by moire"),
    ],
)
def test_example_runs(capsys, name, needs, said):
    pytest.importorskip(needs)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out


def test_the_page_of_recipes_has_what_they_keep(capsys):
    pytest.importorskip("torch")
    runpy.run_path(str(EXAMPLES / "recipes.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("| `bf16` |")
    assert printed in (ROOT / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")
