"""What the command line tells a user in one line."""

import difflib
import re
from collections.abc import Iterable


class UserError(Exception):
    """The caller's mistake: shown as one line on stderr, exit status 2, nothing written."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class RunError(Exception):
    """The run failed or missed what it was asked to reach: one line, exit status 1."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: object) -> str:
    return re.sub(r"\s+", " ", str(message)).strip()


def suggest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, else the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""
