"""`megatrain bench NAME`: the benchmark programs that are installed with the package."""

import argparse
import subprocess
from pathlib import Path

from megatrain.train.errors import UserError

_PROGRAMS = {
    "pcie_saturation": "what the link to the GPU carries, and whether our copies reach it",
    "host_memory": "what the host's memory can do, by pass, threads and NUMA node",
    "adam": "how close AdamW comes to the speed of memory",
    "contention": "what copies and updates take from each other; recommends a number of update threads",
    "pipeline": "how close the whole ring comes to the longest of its parts",
}
_FOLDER = Path(__file__).resolve().parents[1] / "bin"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, _PROGRAMS))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in _PROGRAMS.items())
    parser.epilog = (
        f"programs:\n{listed}\n\nEach ends within 2 minutes. `megatrain bench NAME --help` lists its arguments. "
        "Status 3: the machine\nlacks what is measured, such as a GPU."
    )
    parser.add_argument("program", metavar="NAME", choices=list(_PROGRAMS))
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="passed on, such as --quick --json FILE"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return subprocess.run([program(arguments.program), *arguments.arguments], check=False).returncode


def program(name: str) -> Path:
    """The installed executable."""
    path = _FOLDER / name
    if not path.is_file():
        raise UserError(
            f"{path} is missing: this installation was built without benchmarks; reinstall, or build them with "
            "cmake -DMEGATRAIN_BUILD_BENCHMARKS=ON"
        )
    return path
