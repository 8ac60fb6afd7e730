"""The build backend: scikit-build-core, and what a wheel says of itself.

The version of a wheel that is built in the tree says what its library runs on: 0.1.0+cu130 with the
CUDA backend, by nvcc 13.0, and 0.1.0+cpu without. A wheel that is built from the sdist has the
sdist's plain version: pip insists on it, and package indexes take no other. The description is the
README, whose links to files of the tree lead into the repository, if pyproject.toml names one, or
else are plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from scikit_build_core import build as core
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "dynamic_metadata",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parents[1]
_CUDA = "cmake.define.MOIRE_CUDA"
_WORDS = {  # of CMake
    "AUTO": "AUTO",
    **dict.fromkeys(("ON", "1", "YES", "Y", "TRUE"), "ON"),
    **dict.fromkeys(("OFF", "0", "NO", "N", "FALSE"), "OFF"),
}
_label = None  # of the wheel that is being built; None for an sdist


def build_wheel(directory, config_settings=None, metadata_directory=None):
    return core.build_wheel(directory, _decide(config_settings), metadata_directory)


def build_editable(directory, config_settings=None, metadata_directory=None):
    return core.build_editable(directory, _decide(config_settings), metadata_directory)


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    return core.prepare_metadata_for_build_wheel(directory, _decide(config_settings))


def prepare_metadata_for_build_editable(directory, config_settings=None):
    return core.prepare_metadata_for_build_editable(directory, _decide(config_settings))


def dynamic_metadata(settings, project):
    """What pyproject.toml leaves to this file: version and readme."""
    found = re.search(r"project\(moire VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text())
    is_sdist = (ROOT / "PKG-INFO").exists()
    version = found[1] if _label is None or is_sdist else f"{found[1]}+{_label}"
    text = readme((ROOT / "README.md").read_text(), project.get("urls", {}).get("Source"))
    return {"version": version, "readme": {"text": text, "content-type": "text/markdown"}}


def readme(text, source):
    """A README whose links work wherever it is read; `source` is the repository's address."""
    link = re.compile(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)]+)\)")
    if source is None:
        return link.sub(r"\1", text)
    return link.sub(rf"[\1]({source}/blob/main/\2)", text)


def _decide(config_settings):
    """The settings with CUDA on or off, which AUTO leaves to CMake, and the label that goes with
    that.
    """
    global _label
    settings = dict(config_settings or {})
    given = str(settings.get(_CUDA, "AUTO"))
    asked = _WORDS.get(given.upper())
    if asked is None:
        raise ValueError(f"{_CUDA} is {given}, must be AUTO, ON or OFF")
    release = nvcc_release() if asked != "OFF" else None
    _label = "cpu" if release is None else f"cu{release}"
    if asked == "AUTO":
        asked = "OFF" if release is None else "ON"
    return {**settings, _CUDA: asked}


def nvcc_release():
    """ "130" for nvcc 13.0, None without one; it is looked for where cmake/MoireCuda.cmake does."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [os.environ.get("PATH"), *(f"{home}/bin" for home in homes if home)]
    wanted = os.environ.get("CUDACXX") or "nvcc"
    nvcc = shutil.which(wanted, path=os.pathsep.join(place for place in places if place))
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return "".join(re.search(r"release (\d+)\.(\d+)", said).groups())
