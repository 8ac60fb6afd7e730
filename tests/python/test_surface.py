"""What `import moire` shows, and `python -m moire`."""

import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import moire
import pytest
from moire import __main__ as command_line

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.search(r"project\(moire VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())[1]


def test_the_version_is_that_of_the_library_and_of_the_wheel():
    assert moire.__version__ == moire.info()["version"] == VERSION


@pytest.mark.parametrize("module", [moire, moire.nn, moire.hf], ids=lambda m: m.__name__)
def test_dir_shows_what_is_public_and_no_module_behind_it(module):
    shown = {name for name in dir(module) if not name.startswith("__")}
    assert shown == set(module.__all__)
    modules = {name for name in shown if isinstance(getattr(module, name), types.ModuleType)}
    assert modules == ({"nn", "hf"} if module is moire else set())


def test_python_m_moire_runs_the_command_line():
    if not command_line.program_of(moire._abi.library_path).is_file():
        pytest.skip("the command line was not built")
    command = [sys.executable, "-m", "moire"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"moire {VERSION}\n")
    done = subprocess.run([*command, "nonsense"], capture_output=True, text=True)
    assert done.returncode == 2 and "nonsense" in done.stderr


def test_a_command_line_that_was_not_built_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(command_line, "library_path", tmp_path / "lib" / "libmoire.so")
    with pytest.raises(SystemExit) as e:
        command_line.main()
    assert f"there is no {tmp_path / 'bin' / 'moire'}; build it with" in str(e.value)


def test_megatron_is_asked_for_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "moire.megatron", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ImportError, match="moire.megatron: needs megatron-core >= 0.16 and what"):
        importlib.import_module("moire.megatron")


def test_torchtitan_is_asked_for_by_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "moire.torchtitan", raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    with pytest.raises(ImportError, match="moire.torchtitan: needs torchtitan >= 0.3 and what"):
        importlib.import_module("moire.torchtitan")
