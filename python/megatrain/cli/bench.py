"""`megatrain bench NAME`: the benchmark programs that are installed with the package."""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from megatrain.cli.bench_summary import summarise
from megatrain.train.errors import UserError

_PROGRAMS = {
    "pcie_saturation": "what the link to the GPU carries, and whether our copies reach it",
    "host_memory": "what the host's memory can do, by pass, threads and NUMA node",
    "adam": "how close AdamW comes to the speed of memory",
    "contention": "what copies and updates take from each other; recommends a number of update threads",
    "pipeline": "how close the whole ring comes to the longest of its parts",
}
_ALL = {"all": "all of them, and a summary (--quick, --json FILE)"}
_FOLDER = Path(__file__).resolve().parents[1] / "bin"
_LACKING = 3  # the programs' exit status where the machine lacks what they measure


def configure(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, _PROGRAMS))
    listed = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in (_PROGRAMS | _ALL).items())
    parser.epilog = (
        f"programs:\n{listed}\n\nEach ends within 2 minutes. `megatrain bench NAME --help` lists its arguments. "
        f"Exit status {_LACKING}: the machine\nlacks what is measured, such as a GPU."
    )
    parser.add_argument("program", metavar="NAME", choices=[*_PROGRAMS, *_ALL])
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="passed on, such as --quick --json FILE"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.program in _ALL:
        return run_all(arguments.arguments)
    return subprocess.run([program(arguments.program), *arguments.arguments], check=False).returncode


def run_all(words: Sequence[str]) -> int:
    """Every program in turn, then one table. One that lacks its device, or fails, leaves the others' results."""
    parser = argparse.ArgumentParser(prog="megatrain bench all", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    try:
        options, unknown = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from None
    if unknown:
        raise UserError(f"bench all takes --quick and --json FILE only, not {' '.join(unknown)}")
    programs = {name: program(name) for name in _PROGRAMS}
    results: dict[str, Any] = {}
    failed: dict[str, int] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        written = None if options.json is None else stack.enter_context(_replaced(options.json))
        for name, executable in programs.items():
            path = folder / f"{name}.json"
            command = [str(executable), "--json", str(path), *(["--quick"] if options.quick else [])]
            status = subprocess.run(command, check=False).returncode
            if status in (0, _LACKING):
                results[name] = json.loads(path.read_text())
            else:
                failed[name] = status
            print(flush=True)
        if written is not None:
            written.write(json.dumps(results, indent=2) + "\n")
    lines = list(summarise(results))
    lines += [(name, "-", f"failed with status {status}") for name, status in failed.items()]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for name, value, against in lines:
        print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {against}".rstrip())
    return next(iter(failed.values()), 0)


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    """A file that takes the place of `path` when it is whole; UserError, before anything is measured, where it could
    not."""
    part = path.with_name(path.name + ".part")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from None
    try:
        with file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def program(name: str) -> Path:
    """The installed executable."""
    path = _FOLDER / name
    if not path.is_file():
        raise UserError(
            f"{path} is missing: this installation was built without benchmarks; reinstall, or build them with "
            "cmake -DMEGATRAIN_BUILD_BENCHMARKS=ON"
        )
    return path
