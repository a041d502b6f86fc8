"""Ctrl-C at places where nothing is half done."""

from __future__ import annotations

import signal
import threading
from typing import Any


class DeferredInterrupts:
    """Within it, Python's own SIGINT handler is held back; `check` raises the KeyboardInterrupt that came
    meanwhile, and so does the end of the `with`. Does nothing outside of the main thread, or where somebody
    else handles the signal."""

    def __init__(self) -> None:
        self._came = False
        self._installed = False

    def __enter__(self) -> DeferredInterrupts:
        self._installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._installed:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def _note(self, *_: object) -> None:
        self._came = True

    def check(self) -> None:
        if self._came:
            self._came = False
            raise KeyboardInterrupt
