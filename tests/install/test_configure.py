"""What a configure takes for Highway and for nvcc, and what it says of those that are too old."""

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The dependencies alone: the rest of the project takes longer to configure.
PROJECT = f"""
cmake_minimum_required(VERSION 3.25)
project(dependencies LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH {ROOT}/cmake)
add_library(moire_flags INTERFACE)
set(MOIRE_CUDA AUTO CACHE STRING "")
include(MoireDependencies)
"""
NO_NVCC = "-DMOIRE_CUDA=OFF"


@pytest.fixture
def configure(tmp_path):
    """configure(*options) returns (exit code, what CMake says, in one line)."""
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)

    def run(*options, **environment):
        done = subprocess.run(
            ["cmake", "-S", tmp_path, "-B", tmp_path / "build", *map(str, options)],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    return run


def highway(folder, version):
    """A folder of sources that says it is that version."""
    names = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    (folder / "hwy").mkdir(parents=True)
    (folder / "hwy" / "highway.h").write_text("")
    text = "".join(f"#define HWY_{name} {number}\n" for name, number in names)
    (folder / "hwy" / "base.h").write_text(text)
    return folder


def nvcc(folder, release):
    """A program that says it is the nvcc of that release."""
    folder.mkdir()
    program = folder / "nvcc"
    program.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.0'\n"
    )
    program.chmod(0o755)
    return program


def test_a_given_folder_of_highway_is_taken(configure, tmp_path):
    code, said = configure(
        NO_NVCC, f"-DMOIRE_HIGHWAY_INCLUDE_DIR={highway(tmp_path / 'a', '1.9.0')}"
    )
    assert code == 0 and f"Highway 1.9.0 of {tmp_path}/a" in said


def test_given_sources_of_highway_are_taken_before_an_installed_one(configure, tmp_path):
    sources = highway(tmp_path / "sources", "1.9.0")
    code, said = configure(NO_NVCC, f"-DFETCHCONTENT_SOURCE_DIR_HIGHWAY={sources}")
    assert code == 0 and f"Highway 1.9.0 of {sources}" in said


def test_a_highway_that_is_too_old_is_refused(configure, tmp_path):
    sources = highway(tmp_path / "sources", "1.0.0")
    code, said = configure(NO_NVCC, f"-DMOIRE_HIGHWAY_INCLUDE_DIR={sources}")
    assert code != 0 and f"needs Highway 1.0.1 or newer, but {sources}/hwy is version 1.0.0" in said


def test_what_is_fetched_for_highway_has_its_hash(configure, tmp_path):
    archive = tmp_path / "other.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(highway(tmp_path / "sources", "1.9.0"), "highway-1.9.0")
    never = "-DFETCHCONTENT_TRY_FIND_PACKAGE_MODE=NEVER"
    code, said = configure(NO_NVCC, never, f"-DMOIRE_HIGHWAY_URL=file://{archive}")
    assert "without a network say where it is: -DMOIRE_HIGHWAY_INCLUDE_DIR=FOLDER" in said
    assert code != 0 and "does not match expected value" in said


def test_an_nvcc_that_is_too_old_is_refused(configure, tmp_path):
    sources = f"-DMOIRE_HIGHWAY_INCLUDE_DIR={highway(tmp_path / 'sources', '1.9.0')}"
    old = nvcc(tmp_path / "cuda", "11.8")
    code, said = configure(sources, CUDACXX=str(old))
    assert code != 0 and f"needs CUDA 12.4 or newer, but {old} is of CUDA 11.8" in said


def test_an_nvcc_is_found_that_an_earlier_configure_did_not_find(configure, tmp_path):
    sources = f"-DMOIRE_HIGHWAY_INCLUDE_DIR={highway(tmp_path / 'sources', '1.9.0')}"
    later = nvcc(tmp_path / "cuda", "11.8")
    path = f"{later.parent}{os.pathsep}{os.environ['PATH']}"
    code, said = configure(sources, "-DCMAKE_CUDA_COMPILER=NOTFOUND", PATH=path, CUDACXX="")
    assert code != 0 and f"{later} is of CUDA 11.8" in said


@pytest.mark.parametrize("word", ["OFF", "off", "0", "No", "FALSE", "maybe", ""])
def test_cuda_is_left_out_by_cmakes_words(configure, tmp_path, word):
    sources = f"-DMOIRE_HIGHWAY_INCLUDE_DIR={highway(tmp_path / 'sources', '1.9.0')}"
    code, said = configure(sources, f"-DMOIRE_CUDA={word}")
    if word in ("maybe", ""):
        assert code != 0 and f"MOIRE_CUDA is {word}, must be AUTO, ON or OFF" in said
    else:
        assert code == 0 and "CUDA is off: it was built with MOIRE_CUDA=OFF" in said


def test_make_lib_leaves_cuda_out_if_told_so():
    done = subprocess.run(
        ["make", "-n", "lib", "CUDA=OFF"], cwd=ROOT, capture_output=True, text=True
    )
    assert "-DMOIRE_CUDA=OFF" in done.stdout
