"""`megatrain export RUN_OR_CHECKPOINT OUT`."""

import argparse
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatrain.checkpoints.directory import find, has_any, is_checkpoint
from megatrain.errors import CheckpointError
from megatrain.settings import parse_bytes
from megatrain.train.errors import UserError, one_line

from .places import check_folder

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_TOKENIZER = "tokenizer"
"""Where a run keeps it, beside its checkpoints."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN_OR_CHECKPOINT", help="directory of a run, or one checkpoint in it")
    parser.add_argument("out", metavar="OUT", help="directory to be made")
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), help="fp32 is the exact master; the default is the type of training"
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="such as 5GB or 5GiB; the default is the original's files"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="copy the tokenizer from here instead of from the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    from megatrain.export import CheckpointWeights, Contents, write_directory

    source, out = Path(arguments.source), Path(arguments.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds something already; name another, or remove it")
    check_folder(out, str(out))
    _check_size(arguments.max_shard_size)
    path = _checkpoint(source)
    tokenizer = Path(arguments.tokenizer) if arguments.tokenizer else path.parent / _TOKENIZER
    if arguments.tokenizer and not tokenizer.is_dir():
        raise UserError(f"--tokenizer {tokenizer}: no such directory")
    weights = CheckpointWeights(path, _DTYPES.get(arguments.dtype))
    if weights.contents is None:
        raise UserError(f"{path}: was saved by an older megatrain, without what an export needs; resume and save again")
    if "refused" in weights.contents:
        raise UserError(f"{path}: {weights.contents['refused']}")
    with _told():
        try:
            files = write_directory(out, Contents.from_plain(weights.contents), weights, arguments.max_shard_size)
        except ValueError as error:
            raise UserError(one_line(error)) from error
    for file in sorted(tokenizer.iterdir()) if tokenizer.is_dir() else ():
        if file.is_file():
            shutil.copyfile(file, out / file.name)
    shards = "1 file" if len(files) == 1 else f"{len(files)} files"
    word = str(weights.dtype).removeprefix("torch.")
    print(f"exported {path} to {out}: {sum(files.values()) / 1e9:.2f} GB of {word} in {shards}")
    if not tokenizer.is_dir():
        print(f"no tokenizer: {tokenizer} is not there; --tokenizer DIR copies another")


def _check_size(size: str | None) -> None:
    if size is not None and size.strip().isdigit():
        raise UserError(f'--max-shard-size is "{size}"; write a number with its unit, such as 5GB or 5GiB')
    try:
        parse_bytes(size, "--max-shard-size")
    except ValueError as error:
        raise UserError(str(error)) from None


def _checkpoint(source: Path) -> Path:
    if not source.is_dir():
        raise UserError(f"{source}: no such directory")
    if not is_checkpoint(source) and not has_any(source):
        model = source / "model"
        hint = f"; {model} is its trained model" if model.is_dir() else ""
        raise UserError(f"{source}: holds no checkpoint{hint}")
    try:
        with _told():
            return find(source)
    except CheckpointError as error:
        raise UserError(one_line(error)) from error


@contextmanager
def _told() -> Iterator[None]:
    """Warnings become lines of the output."""
    with warnings.catch_warnings(record=True) as passed:
        warnings.simplefilter("always")
        yield
    for warning in passed:
        print(one_line(warning.message))
