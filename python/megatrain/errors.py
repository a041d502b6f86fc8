"""What the Python face raises beyond the native errors (ValueError, RuntimeError, MemoryError)."""

from __future__ import annotations


class UnsupportedModelError(ValueError):
    """The model does something that streaming cannot reproduce exactly; says which block and what."""


class StaleGraphError(RuntimeError):
    """A backward through a forward that ran under weights which have been updated or edited since."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, or of another model; the message names the first thing that is wrong."""
