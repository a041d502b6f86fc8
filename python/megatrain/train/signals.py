"""SIGTERM, as batch systems send it: the step under way is finished, then the run ends as by Ctrl-C."""

import signal
import threading
from typing import Any


class Terminated(KeyboardInterrupt):
    """Raised between two steps after SIGTERM; the command line's exit status is 143."""


class Termination:
    """Within it, SIGTERM is noted for `check`; a second one ends the process at once. Does nothing outside of the
    main thread, or where somebody else handles the signal."""

    def __init__(self) -> None:
        self._came = False
        self._installed = False

    def __enter__(self) -> "Termination":
        self._installed = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._installed:
            signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, *_: Any) -> None:
        self._came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def check(self) -> None:
        if self._came:
            self._came = False
            raise Terminated
