"""Bridge from setuptools to CMake: builds megatrain._native and the benchmark programs. Metadata is in pyproject.toml.

Environment: MEGATRAIN_CUDA (AUTO, ON or OFF) and CMAKE_ARGS (further arguments, as in a shell).
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        build = Path(self.build_temp).resolve()
        package = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            # pip builds in an environment that is gone at the next build, and the cache would name its ninja.
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DMEGATRAIN_BUILD_BENCHMARKS=ON",
            f"-DMEGATRAIN_CUDA={os.environ.get('MEGATRAIN_CUDA', 'AUTO')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
        subprocess.run(["cmake", "--install", str(build), "--prefix", str(package)], check=True)


setup(ext_modules=[Extension("megatrain._native", sources=[])], cmdclass={"build_ext": CMakeBuild})
