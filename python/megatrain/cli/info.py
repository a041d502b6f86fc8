"""`megatrain info`: what decides speed and limits on this machine."""

import argparse
import contextlib
import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatrain import _native
from megatrain.cli.pci import link


def configure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    lines = list(describe())
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:<{width}}  {value}")


def describe() -> Iterator[tuple[str, str]]:
    """(name, value) pairs; a name may come more than once."""
    yield "megatrain", _native.__version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.release()}"
    for package in ("torch", "transformers", "safetensors", "numpy"):
        yield package, metadata.version(package)
    for package in ("peft", "datasets", "accelerate"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)
    yield "CPU", _native.cpu_model()
    yield "update kernel", f"{_isa()} (of {', '.join(_native.isa_names())})"
    yield "usable cores", str(_native.usable_cores())
    yield "memory", _memory()
    limit, said_by = _native.host_memory_limit()
    yield "memory limit", f"{_size(limit)} may still be allocated ({said_by})"
    yield "locked memory", _locked_memory()
    yield "huge pages", _huge_pages()
    yield from _gpus()


def _isa() -> str:
    try:
        return _native.select_isa("")
    except ValueError as error:  # MEGATRAIN_ISA names one that this CPU lacks
        return f"none: {error}"


def _memory() -> str:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return f"{_size(total)}, {_size(available)} available"


def _locked_memory() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{_size(soft)} (ulimit -l)"


def _huge_pages() -> str:
    try:
        choices = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "not offered by the kernel"
    chosen = choices[choices.find("[") + 1 : choices.find("]")]
    advised = {"always": "used", "madvise": "used where asked for, as megatrain does", "never": "not used"}
    return f"{chosen} ({advised[chosen]})" if chosen in advised else chosen


def _gpus() -> Iterator[tuple[str, str]]:
    yield "NVIDIA driver", _driver()
    count = _native.cuda_device_count()
    if count == 0:
        yield "GPU", f"none: {_native.cuda_unavailable_reason()}"
    elif not torch.cuda.is_available():
        yield "GPU", f"{count} found, but this torch ({torch.__version__}) cannot use it"
    else:
        yield "CUDA of torch", str(torch.version.cuda)
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            yield f"GPU {index}", f"{properties.name}, {_size(properties.total_memory)}, {link(_address(properties))}"


def _address(properties: Any) -> str:
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _driver() -> str:
    """Of NVIDIA's kernel module."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return "not loaded, or not told by the kernel"
    return next((word for word in words if word[0].isdigit() and "." in word), " ".join(words))


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
