"""Everything that an exact resume needs, on the disk: the tiles as they are, and plain values beside them.

Read in this order: tile_file (the bytes of a tile), directory (whole or not at all), random_states, model_state
(what is saved of a model, and whether it fits another), pending (beside the next steps), store (save and load)."""

from megatrain.checkpoints.pending import PendingCheckpoint
from megatrain.checkpoints.store import begin, load, save

__all__ = ["PendingCheckpoint", "begin", "load", "save"]
