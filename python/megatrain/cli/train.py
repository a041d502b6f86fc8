"""`megatrain train CONFIG`."""

import argparse
import importlib.util
import sys
import warnings

from megatrain.train.errors import UserError, one_line

_NEEDS = ("tokenizers", "yaml", "pydantic", "rich")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help="YAML file of the run, such as examples/quickstart.yaml"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a key of the file, such as --set optimizer.lr=2e-5; may be given more than once",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'{", ".join(missing)} not installed; run: pip install "megatrain[train]"')
    from megatrain.train.config_file import load_settings

    settings = load_settings(arguments.config, arguments.overrides)
    from megatrain.train.run import run as run_training

    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        run_training(settings)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"megatrain: {one_line(message)}", file=sys.stderr)
