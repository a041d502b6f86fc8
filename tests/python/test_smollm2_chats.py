"""The chats of benchmarks/smollm2."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "benchmarks" / "smollm2" / "speeches.py"
PLAY = """A PLAY

Persons.
First, a man.

ACT I.

SCENE I. A room.

[Enter two.]

FIRST.
Who is there, at this
late hour? [Aside.] Nobody.

[He listens.]

SECOND.
A friend of yours, I think.

FIRST.
Then come in, my friend.

SECOND.
I thank you for the fire.

THIRD.
And who might I be, then?

SCENE II. Elsewhere.

FIRST.
It is quiet here, at last.

SECOND.
No.

FIRST.
It is quiet here, I said.
"""


def test_speeches_become_turns() -> None:
    """Of two who talk to each other, within a scene; without directions, and what is too short."""
    specification = importlib.util.spec_from_file_location("speeches", FILE)
    assert specification is not None and specification.loader is not None
    module: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    (chat,) = module.chats_of(PLAY)
    assert [message["role"] for message in chat] == ["system", "user", "assistant", "user", "assistant"]
    assert [message["content"] for message in chat[1:]] == [
        "Who is there, at this\nlate hour?  Nobody.",
        "A friend of yours, I think.",
        "Then come in, my friend.",
        "I thank you for the fire.",
    ]
