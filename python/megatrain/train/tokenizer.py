"""Text to token ids and back: a BPE trained on the spot, plain bytes, or a model's own tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatrain.data import TextTokenizer

from .config_data import TokenizerSettings
from .errors import UserError, one_line

BOUNDARY = "<|endoftext|>"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


def train_tokenizer(settings: TokenizerSettings, texts: Iterable[str]) -> TextTokenizer:
    """Byte-level, so that every text can be encoded and comes back as it was."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if settings.type == "bytes":
        vocabulary = {symbol: i for i, symbol in enumerate([BOUNDARY, *alphabet])}
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
        tokenizer.add_special_tokens([BOUNDARY])
    else:
        tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if settings.type == "bpe":
        trainer = trainers.BpeTrainer(
            vocab_size=settings.vocab_size,
            special_tokens=[BOUNDARY],
            initial_alphabet=alphabet,
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast  # untyped
    wrapped = make(tokenizer_object=tokenizer, eos_token=BOUNDARY, clean_up_tokenization_spaces=False)
    return TextTokenizer(wrapped, begin=None, end=wrapped.eos_token_id)


def load_tokenizer(directory: Path, trust_remote_code: bool = False) -> TextTokenizer:
    """The tokenizer of a model directory, with its own habit of a begin token."""
    # Without one of these, transformers makes an empty tokenizer of the model type, silently.
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(f"model {directory}: holds no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # transformers raises many kinds for a missing or broken tokenizer
        raise UserError(f"model {directory}: no tokenizer could be loaded: {one_line(error)}") from None
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(f"model {directory}: its tokenizer names no end-of-text token")
    begin = tokenizer.bos_token_id
    if begin is None or begin not in tokenizer("a").input_ids[:1]:
        begin = None
    return TextTokenizer(tokenizer, begin=begin, end=end)
