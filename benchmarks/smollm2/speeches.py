"""Chats of a play: what one character says is the user's turn, the next one's answer the assistant's."""

from __future__ import annotations

import re
from collections.abc import Iterator

SYSTEM = "You are a character of a play by William Shakespeare. Answer the other one."
TURNS = 4
CHARACTERS = range(10, 500)
"""Of a speech that is used."""

_NAME = re.compile(r"(?!ACT|SCENE|Act|Scene)[A-Z][A-Za-z' ]{1,24}\.")
_DIRECTION = re.compile(r"\[[^\]]*\]")


def speeches(text: str) -> Iterator[tuple[str | None, str]]:
    """(who, what) in their order; (None, "") where a scene ends. A speech begins with its speaker's name alone on a
    line behind an empty one, as in Project Gutenberg's plain texts; directions in brackets are left out."""
    who: str | None = None
    lines: list[str] = []
    began = False  # the list of persons stands before the first scene
    before = ""
    for line in [*_DIRECTION.sub("", text).splitlines(), "SCENE"]:
        line, above, before = line.strip(), before, line.strip()
        scene = line.upper().startswith(("SCENE", "ACT "))
        if not scene and (above or not _NAME.fullmatch(line)):
            lines.append(line)
            continue
        if began and who is not None and any(lines):
            yield who, "\n".join(said for said in lines if said)
        if scene:
            yield None, ""
            began = True
        who, lines = (None if scene else line), []


def chats_of(text: str) -> list[list[dict[str, str]]]:
    """Lists of messages: TURNS speeches of two who talk to each other, or two where it is no more. No speech is used
    twice."""
    chats: list[list[dict[str, str]]] = []
    turns: list[tuple[str | None, str]] = []

    def close() -> None:
        if len(turns) >= 2:
            said = turns[: len(turns) // 2 * 2]
            roles = ["user", "assistant"] * (len(said) // 2)
            messages = [{"role": role, "content": words} for role, (_, words) in zip(roles, said, strict=True)]
            chats.append([{"role": "system", "content": SYSTEM}, *messages])
        turns.clear()

    for who, words in speeches(text):
        if who is None or len(words) not in CHARACTERS:
            close()
            continue
        if len(turns) == TURNS or (turns and who == turns[-1][0]) or (len(turns) > 1 and who != turns[-2][0]):
            close()
        turns.append((who, words))
    close()
    return chats
