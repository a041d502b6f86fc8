"""The C++ suite, built and run where GoogleTest, CMake and a compiler are found."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build-pytest"  # kept, so that the next run builds only what has changed

# Configured on its own first: a machine without GoogleTest is not a project that does not build.
PROBE = """
cmake_minimum_required(VERSION 3.24)
project(probe LANGUAGES CXX)
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(FATAL_ERROR "no GoogleTest")
endif()
"""


def missing(folder: Path) -> str | None:
    """What keeps the suite from being built, in words; None if nothing does."""
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    (folder / "CMakeLists.txt").write_text(PROBE)
    probe = subprocess.run(
        ["cmake", "-S", folder, "-B", folder / "build", "-G", "Ninja"], capture_output=True, text=True
    )
    if probe.returncode == 0:
        return None
    if "no GoogleTest" in probe.stderr:
        return "GoogleTest is not installed (Debian: libgtest-dev)"
    return "CMake finds no working C++ compiler"


def run(*command: str | Path) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}", pytrace=False)


# Building it from nothing takes minutes on two cores.
@pytest.mark.timeout(1200)
def test_cpp_suite(tmp_path: Path) -> None:
    reason = missing(tmp_path)
    if reason is not None:
        pytest.skip(f"the C++ suite was not run: {reason}")
    run(
        *("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DMEGATRAIN_CUDA=AUTO"),
        *("-DMEGATRAIN_BUILD_TESTS=ON", "-DMEGATRAIN_BUILD_PYTHON=OFF"),
        # The ninja of an earlier run may have gone with its virtual environment.
        f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja')}",
    )
    run("cmake", "--build", BUILD, "--parallel", str(len(os.sched_getaffinity(0))))
    run(BUILD / "tests" / "cpp" / "megatrain_tests", "--gtest_brief=1")
