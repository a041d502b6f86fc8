"""The `megatrain` command. Mistakes of the caller are one line on stderr and exit status 2, failed
runs one line and 1, Ctrl-C one line and 130, SIGTERM in a run one line and 143."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatrain import _native
from megatrain.train.errors import RunError, UserError, one_line

_COMMANDS = {
    "train": "train or fine-tune a language model from a YAML file",
    "plan": "predict where a model's parts would go on a machine and how long a step would take",
    "report": "draw a run: the timeline of a step, memory, curves, achieved against predicted",
    "export": "write a checkpoint's weights as a Hugging Face model directory, or a LoRA adapter's",
    "info": "show what megatrain sees of this machine",
    "bench": "measure what the machine's memory, link and GPU can do, and whether megatrain reaches it",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return _fail(error, 2)
    except KeyboardInterrupt as error:
        status = 143 if type(error).__name__ == "Terminated" else 130
        return _fail(error if error.args else "interrupted; nothing was written", status)
    except BrokenPipeError:
        # The reader of our output has gone; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RunError, MemoryError, OSError) as error:
        return _fail(error, 1)


def make_parser() -> argparse.ArgumentParser:
    """Of the whole command line; raises UserError for what it does not know."""
    parser = _Parser(
        prog="megatrain",
        description="Train language models larger than the GPU from host memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatrain {_native.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        importlib.import_module(f"{__name__}.{name}").configure(command)
    return parser


def _run(argv: Sequence[str]) -> int:
    try:
        arguments = make_parser().parse_args(argv)
    except SystemExit as exit_:  # --help and --version
        return int(exit_.code or 0)
    status: int | None = arguments.run(arguments)
    return status or 0


def _fail(message: object, status: int) -> int:
    print(f"megatrain: {one_line(message)}", file=sys.stderr)
    return status
