"""`megatrain report RUN`: a run drawn, as PNG files and one page."""

import argparse
import importlib.util
from pathlib import Path

from megatrain.train.errors import UserError

from .places import check_folder

_NEEDS = ("matplotlib", "pydantic")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="directory of a run of `megatrain train`")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for the files; RUN/report unless given")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'{", ".join(missing)} not installed; run: pip install "megatrain[report]"')
    from megatrain.charts import RunFiles, write_report

    found = RunFiles.read(arguments.run_directory)
    folder = arguments.output or arguments.run_directory / "report"
    check_folder(folder, f"--output {folder}" if arguments.output else str(folder))
    print(write_report(found, folder))
