"""Trained weights as other programs read them: a Hugging Face model directory, or a PEFT adapter's.

Read in this order: contents (what belongs into the directory, plain values that a checkpoint holds too), parts (which
tensors of the files a parameter becomes), weights (the tensors, of a model or of a checkpoint, a piece at a time),
shards (which file has which), safetensors_file, directory (all of it, in its place)."""

from megatrain.export.contents import Contents, contents_of
from megatrain.export.directory import write_directory
from megatrain.export.weights import CheckpointWeights, ModelWeights

__all__ = ["CheckpointWeights", "Contents", "ModelWeights", "contents_of", "write_directory"]
