"""`pip install .` as users do it: one wheel for any Python 3, with all that it needs."""

import json
import os
import re
import subprocess
import sys
import tarfile
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


def build_wheel(tree, folder):
    """The wheel of a tree, for CPUs; ccache has its objects from the build under test."""
    environment = {"CC": "cc", "CXX": "c++", **os.environ, "CCACHE_BASEDIR": str(tree)}
    options = ("--quiet", "--no-deps", "-Ccmake.define.MOIRE_CUDA=OFF", "-w", folder)
    run(sys.executable, "-m", "pip", "wheel", *options, tree, cwd=folder, env=environment)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_one_wheel_serves_every_python_3_and_says_that_it_is_for_cpus(wheel):
    assert re.fullmatch(rf"moire_moe-{re.escape(VERSION)}\+cpu-py3-none-\w+\.whl", wheel.name)


@pytest.mark.slow
def test_the_wheel_holds_library_header_command_line_and_nothing_that_only_tests_need(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {"__init__.py", "lib/libmoire.so", "include/moire.h", "bin/moire"}
    assert {f"moire/{name}" for name in inside} <= names
    libraries = {"moire/lib/libmoire.so", "moire/lib/moire_invoke.abi3.so"}
    assert {name for name in names if ".so" in name} == libraries
    assert not {name for name in names if not name.startswith(("moire/", "moire_moe-"))}
    assert not [name for name in names if re.search(r"test|example|\.cpp$", name)]


@pytest.mark.slow
def test_the_wheel_has_licences_and_a_description_whose_links_lead_somewhere(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"moire_moe-{VERSION}+cpu.dist-info"
    for name in ("LICENSE", "licenses/highway.txt", "licenses/cli11.txt"):
        assert archive.read(f"{info}/licenses/{name}")
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata and "Keywords: " in metadata
    assert not [to for to in re.findall(r"\]\(([^)]+)\)", metadata) if "://" not in to]


@pytest.mark.slow
def test_the_wheel_needs_nothing_but_the_system_of_a_manylinux(wheel):
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel)
    assert re.search(r'platform tag: "manylinux_2_\d+_\w+"', shown)
    needed = set(re.findall(r"\blib\w+\.so\.\d+", shown))
    assert needed <= {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"}, shown


@pytest.mark.slow
def test_the_sdist_makes_a_wheel_of_its_own_version(tmp_path):
    run(sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    with tarfile.open(tmp_path / f"moire_moe-{VERSION}.tar.gz") as archive:
        archive.extractall(tmp_path)
    wheel = build_wheel(tmp_path / f"moire_moe-{VERSION}", tmp_path)
    assert wheel.name.startswith(f"moire_moe-{VERSION}-py3-none-")


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
    for command in ((tmp_path / "venv" / "bin" / "moire",), (python, "-m", "moire")):
        assert run(*command, "--version", env=environment, cwd=tmp_path) == f"moire {VERSION}\n"
