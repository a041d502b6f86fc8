"""The package as it is installed, and rules that the sources keep."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain
from megatrain import _native

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("pydantic", "yaml", "rich", "datasets", "matplotlib", "peft")


def native_sources() -> Iterator[tuple[str, str]]:
    """(path under the root, text) of every C++ and CUDA file."""
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
            yield str(path.relative_to(ROOT)), path.read_text()


def includes(text: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', text, re.MULTILINE)


def fresh(code: str, **environment: str) -> str:
    """What `code` prints in a new interpreter, started outside the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installed_package_is_tested() -> None:
    """Not the source tree, whose extension module may be missing or old."""
    assert ROOT / "python" not in Path(megatrain.__file__).resolve().parents
    assert Path(_native.__file__).parent == Path(megatrain.__file__).parent


def test_one_version() -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert megatrain.__version__ == _native.__version__ == importlib.metadata.version("megatrain") == version


def test_import_brings_no_extras() -> None:
    loaded = fresh("import sys, megatrain; print(*sorted({name.split('.')[0] for name in sys.modules}))").split()
    assert "torch" in loaded
    assert [name for name in EXTRAS if name in loaded] == []


def test_import_without_a_gpu() -> None:
    """No device is visible and no driver is asked for: the module loads, says why, and trains."""
    code = """
import torch, megatrain
from megatrain import _native
assert _native.cuda_device_count() == 0
class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
model = megatrain.StreamedModel(Blocks(), dtype=torch.float32)
assert model.device.type == "cpu" and model.step({"x": torch.ones(2, 4)}).loss > 0
print(_native.cuda_unavailable_reason())
"""
    assert fresh(code, CUDA_VISIBLE_DEVICES="") != ""


def test_import_opens_no_thread_and_prints_nothing() -> None:
    code = "import torch, threading; before = threading.active_count(); import megatrain._native; "
    assert fresh(code + "assert threading.active_count() == before") == ""


def test_only_the_module_entry_is_exported() -> None:
    """Another CUDA runtime, torch's, lives in the same process: none of ours may be seen by it."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", _native.__file__], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1].split("@")[0] for line in listing.splitlines()]
    assert symbols == ["PyInit__native"]


def test_no_library_of_ours_is_needed_at_run_time() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    listing = subprocess.run(["readelf", "-d", _native.__file__], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", listing)
    assert needed
    assert [name for name in needed if re.match(r"lib(cuda|cudart|torch|c10|gomp|omp|iomp)", name)] == []


def test_sources_include_no_torch_python_or_cuda_where_they_may_not() -> None:
    checked = 0
    for path, text in native_sources():
        for header in includes(text):
            checked += 1
            assert not re.match(r"(torch|ATen|c10)(/|$)|omp\.h$", header), f"{path} includes {header}"
            if re.match(r"(cuda|cu(blas|dnn|pti)|driver_types|nv)", header) and not header.startswith("device/"):
                allowed = path.startswith(("csrc/device/cuda", "csrc/kernels/"))
                assert allowed, f"{path} includes {header}; only csrc/device/cuda* and csrc/kernels may"
            if re.match(r"(pybind11/|Python\.h$)", header):
                assert path.startswith("csrc/bindings/"), f"{path} includes {header}; only csrc/bindings may"
    assert checked > 100


def test_layers_include_only_those_below() -> None:
    """Design: base < optim < device < tiles < stream, probe < bindings. The backends call the update of their
    device: optim, or the kernels, which see the device folder for its check of CUDA's return codes."""
    below = {
        "base": {"base"},
        "device": {"base", "optim", "kernels", "device"},
        "optim": {"base", "optim"},
        "kernels": {"base", "optim", "device", "kernels"},
        "tiles": {"base", "device", "optim", "tiles"},
        "stream": {"base", "device", "optim", "tiles", "stream"},
        "probe": {"base", "device", "optim", "tiles", "probe"},
        "bindings": {"base", "device", "optim", "tiles", "stream", "probe", "bindings"},
    }
    for path, text in native_sources():
        layer = path.split("/")[1]
        for header in includes(text):
            folder = header.split("/")[0]
            assert folder not in below or folder in below[layer], f"{path} includes {header}"


def test_builds_are_portable_and_keep_arithmetic() -> None:
    build = [ROOT / "CMakeLists.txt", ROOT / "setup.py", *sorted((ROOT / "tests" / "cpp").glob("CMakeLists.txt"))]
    for path in build:
        for flag in ("-march=native", "-mtune=native", "-ffast-math", "-Ofast", "-funsafe-math", "use_fast_math"):
            assert flag not in path.read_text(), f"{path.name} has {flag}"
    assert "-ffp-contract=off" in build[0].read_text()


def test_type_information_is_installed() -> None:
    package = Path(megatrain.__file__).parent
    assert (package / "py.typed").is_file()
    assert (package / "_native.pyi").read_text() == (ROOT / "python" / "megatrain" / "_native.pyi").read_text()
