"""`pip install .` as users do it: a wheel for any Python 3 with library, header and Highway."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r"project\(moire VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]

# Runs in the fresh environment: a grouped linear layer whose numbers are known, without Torch.
PROGRAM = """
import importlib.util, json
import numpy as np
import moire

assert importlib.util.find_spec("torch") is None
x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
w = np.array([[[1, 0], [0, 1]], [[1, 1], [1, -1]]], np.float32)
y = moire.grouped_linear(x, w, moire.Groups(splits=[1, 2]))
info = moire.info()
print(json.dumps({"y": y.tolist(), "version": info["version"], "library": info["library"]}))
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, ROOT, cwd=folder
    )
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_one_wheel_serves_every_python_3(wheel):
    assert re.fullmatch(rf"moire_moe-{re.escape(VERSION)}-py3-none-\w+\.whl", wheel.name)


@pytest.mark.slow
def test_the_wheel_holds_the_library_its_header_and_nothing_that_only_tests_need(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"moire/__init__.py", "moire/lib/libmoire.so", "moire/include/moire.h"} <= names
    outside = {name for name in names if not name.startswith(("moire/", "moire_moe-"))}
    assert not outside
    assert not [name for name in names if re.search(r"test|example|\.cpp$", name)]


@pytest.mark.slow
def test_the_installed_wheel_computes_with_numpy_alone(wheel, tmp_path):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, env=environment, cwd=tmp_path)
    found = json.loads(run(python, "-c", PROGRAM, env=environment, cwd=tmp_path))
    assert found["y"] == [[1, 2], [7, -1], [11, -1]]
    assert found["version"] == VERSION
    assert Path(found["library"]).is_relative_to(tmp_path / "venv")
