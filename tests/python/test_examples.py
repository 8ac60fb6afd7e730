"""The examples of the README and the guides run as they are."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
