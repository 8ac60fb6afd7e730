"""The examples of the README run as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "name, said", [("pytorch", "torch.Size([100, 64])"), ("huggingface", "experts run by moire")]
)
def test_example_runs(name, said):
    path = ROOT / "examples" / f"{name}.py"
    package = str(ROOT / "python")
    code = f"import sys; sys.path.insert(0, {package!r}); exec(open({str(path)!r}).read())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
