"""Where a command is to write: refused before the work is done, not after."""

from pathlib import Path

from megatrain.train.errors import UserError


def check_folder(folder: Path, name: str) -> None:
    """`folder` is there, or can be made. UserError that begins with `name`, an option or the path itself."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"{name}: {existing} is not a directory")


def check_file(file: Path, name: str) -> None:
    """`file` can be written in a directory that is there. UserError that begins with `name`."""
    if file.is_dir():
        raise UserError(f"{name}: is a directory; name a file")
    if not file.parent.is_dir():
        raise UserError(f"{name}: {file.parent} is not a directory")
