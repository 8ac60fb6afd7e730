"""cmake/wheel_backend.py: what a wheel is named, and what its description shows."""

import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(monkeypatch):
    """The module, over a backend that builds nothing."""
    core = types.ModuleType("scikit_build_core.build")
    for kind in ("editable", "sdist", "wheel"):
        setattr(core, f"get_requires_for_build_{kind}", None)
        setattr(core, f"build_{kind}", lambda directory, settings, metadata=None: settings)
    package = types.ModuleType("scikit_build_core")
    package.build = core
    monkeypatch.setitem(sys.modules, "scikit_build_core", package)
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", core)
    monkeypatch.syspath_prepend(ROOT / "cmake")
    sys.modules.pop("wheel_backend", None)
    import wheel_backend

    yield wheel_backend
    sys.modules.pop("wheel_backend", None)


def version(backend):
    return backend.dynamic_metadata({}, {})["version"]


def test_a_wheel_is_named_by_the_nvcc_that_is_there(backend, monkeypatch):
    plain = version(backend)
    monkeypatch.setattr(backend, "nvcc_release", lambda: "130")
    assert backend.build_wheel("out") == {"cmake.define.MOIRE_CUDA": "ON"}
    assert version(backend) == f"{plain}+cu130"
    monkeypatch.setattr(backend, "nvcc_release", lambda: None)
    assert backend.build_wheel("out") == {"cmake.define.MOIRE_CUDA": "OFF"}
    assert version(backend) == f"{plain}+cpu"


def test_who_leaves_cuda_out_gets_a_wheel_for_cpus(backend, monkeypatch):
    monkeypatch.setattr(backend, "nvcc_release", lambda: "130")
    name = "cmake.define.MOIRE_CUDA"
    for word in ("OFF", "off", "0", "No", "false"):
        assert backend.build_wheel("out", {name: word}) == {name: "OFF"}
        assert version(backend).endswith("+cpu")
    assert backend.build_wheel("out", {name: "yes"}) == {name: "ON"}
    with pytest.raises(ValueError, match="MOIRE_CUDA is maybe, must be AUTO, ON or OFF"):
        backend.build_wheel("out", {name: "maybe"})


def test_a_wheel_of_the_sdist_has_the_version_of_the_sdist(backend, monkeypatch, tmp_path):
    for name in ("CMakeLists.txt", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / "PKG-INFO").write_text("")
    monkeypatch.setattr(backend, "ROOT", tmp_path)
    backend.build_wheel("out")
    assert "+" not in version(backend)


def test_nvcc_is_asked_for_its_release(backend, monkeypatch, tmp_path):
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    program.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(program))
    assert backend.nvcc_release() == "124"
    monkeypatch.delenv("CUDACXX")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    assert backend.nvcc_release() == "124"


def test_links_of_the_readme_lead_somewhere_outside_the_tree(backend):
    text = "[a](docs/a.md#b), [c](https://c.example/), [d](#d)"
    assert backend.readme(text, None) == "a, [c](https://c.example/), [d](#d)"
    shown = backend.readme(text, "https://host.example/moire")
    assert shown.startswith("[a](https://host.example/moire/blob/main/docs/a.md#b), [c](https://c")
