"""From settings to rows: the files read and checked, the tokenizer, what is trained on and what is held out."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatrain.data import (
    BadLines,
    Corpus,
    DataError,
    Encoder,
    Loader,
    PackedRows,
    PaddedRows,
    Pieces,
    PieceWriter,
    TextTokenizer,
    TokenWriter,
    WorkerError,
    look,
    open_source,
    pack,
)
from megatrain.data.division import HELD_OUT, TRAIN
from megatrain.data.loader import Rows
from megatrain.data.store import IGNORED

from .config import ShapeSettings, TrainSettings
from .errors import RunError, UserError
from .model import ModelSource, describe_shape, open_directory
from .tokenizer import load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class HeldOut:
    corpus: Corpus
    rows: Rows

    @property
    def nbytes(self) -> int | None:
        """UTF-8 bytes of the texts; None for other data, where prompts are not measured."""
        return self.corpus.nbytes(HELD_OUT) if self.corpus.shape == "text" else None


@dataclass(frozen=True)
class Prepared:
    """Everything but the weights, checked."""

    source: ModelSource
    tokenizer: TextTokenizer
    corpus: Corpus
    rows: Rows
    loader: Loader
    held_out: HeldOut | None
    steps: int
    notes: list[str]
    """What was left out, for the user to know."""


def prepare(settings: TrainSettings, tell: Callable[[str], None] | None = None) -> Prepared:
    """`tell` hears of bad lines that are skipped. UserError for what cannot be used."""
    try:
        return _prepare(settings, tell or _tell)
    except DataError as error:
        raise UserError(str(error)) from error
    except WorkerError as error:
        raise RunError(str(error)) from error


def _tell(message: str) -> None:
    print(f"megatrain: {message}", file=sys.stderr)


def _prepare(settings: TrainSettings, tell: Callable[[str], None]) -> Prepared:
    data = settings.data
    source = (
        open_directory(settings.model, trust_remote_code=settings.trust_remote_code)
        if isinstance(settings.model, str)
        else None
    )
    template = _read_template(data.chat_template)
    loaded = None
    if source is not None and source.directory is not None:
        loaded = load_tokenizer(source.directory, settings.trust_remote_code)
        if "tokenizer" in settings.model_fields_set:
            tell(f"the key 'tokenizer' is not used; {source.directory} has its own")
    has_template = template is not None or bool(loaded and loaded.tokenizer.chat_template)

    bad = BadLines(data.on_bad_line, tell)
    corpus = _look(settings, "path", has_template, bad, data.format)
    if settings.eval.beat_bigram and corpus.shape != "text":
        raise UserError(f"eval.beat_bigram is for texts; the records of {corpus.source.names[0]} are {corpus.shape}")
    apart = None
    if data.validation:
        apart = _look(settings, "validation", has_template, bad, corpus.shape)
        apart.hold_out_all(seed=settings.seed, max_bytes=settings.eval.max_bytes)
    corpus.divide(
        seed=settings.seed,
        held_out=0.0 if apart else data.held_out,
        max_bytes=data.max_bytes,
        max_held_out_bytes=settings.eval.max_bytes,
    )
    if loaded is None:
        texts = (block for blocks in corpus.texts(TRAIN) for block in blocks)
        tokenizer = train_tokenizer(settings.tokenizer, texts)
    else:
        tokenizer = loaded
    if source is None:
        assert isinstance(settings.model, ShapeSettings)
        source = describe_shape(settings.model, tokenizer.size, tokenizer.end)
    source.check(tokenizer, settings.sequence_length)
    if template is not None:
        tokenizer.tokenizer.chat_template = template  # saved with the model

    encoder = Encoder(tokenizer, corpus.shape, loss=data.loss, chat_template=template)
    training = _writer(settings, corpus.shape, 1)
    held_out = _writer(settings, corpus.shape, settings.eval.context)
    corpus.encode(encoder, {TRAIN: training, HELD_OUT: held_out}, workers=data.workers)
    if apart:
        apart.encode(encoder, {HELD_OUT: held_out}, workers=data.workers)
    rows = _rows(settings, training, tokenizer, settings.seed)
    if not len(rows):
        raise DataError(f"data.path {', '.join(data.path)}: no example with a token to learn from")
    loader = Loader(
        rows,
        micro_batch=settings.batch.micro_batch,
        accumulate=settings.batch.accumulate,
        seed=settings.seed,
        passes=settings.epochs,
    )
    evaluated = _rows(settings, held_out, tokenizer, None)
    return Prepared(
        source=source,
        tokenizer=tokenizer,
        corpus=corpus,
        rows=rows,
        loader=loader,
        held_out=HeldOut(apart or corpus, evaluated) if len(evaluated) else None,
        steps=settings.steps or loader.steps or 1,
        notes=[*_notes(bad, training), *_few_rows(rows, settings), *_unended(rows.pieces, tokenizer, corpus.shape)],
    )


def _look(
    settings: TrainSettings, key: Literal["path", "validation"], has_template: bool, bad: BadLines, format: str
) -> Corpus:
    data = settings.data
    split = data.split if key == "path" else data.validation_split or data.split
    source = open_source(getattr(data, key), key=f"data.{key}", subset=data.subset, split=split)
    return look(source, format=format, columns=data.columns, chat_template=has_template, bad=bad, key=f"data.{key}")


def _writer(settings: TrainSettings, shape: str, context: int) -> PieceWriter:
    too_long = settings.data.too_long
    if too_long == "auto":
        too_long = "split" if shape == "text" else "truncate"
    tokens = TokenWriter(_existing(Path(settings.output.directory)))
    return PieceWriter(tokens, settings.sequence_length, too_long, context)


def _rows(settings: TrainSettings, writer: PieceWriter, tokenizer: TextTokenizer, seed: int | None) -> Rows:
    pieces = writer.finish()
    if settings.data.packing:
        return pack(pieces, length=settings.sequence_length, pad=tokenizer.end, seed=seed)
    return PaddedRows(pieces, settings.sequence_length, tokenizer.end)


def is_packed(rows: Rows) -> bool:
    """Some row holds more than one document."""
    return isinstance(rows, PackedRows) and len(rows.order) > len(rows)


def _notes(bad: BadLines, writer: PieceWriter) -> list[str]:
    notes = []
    if bad.count:
        notes.append(f"{bad.count} bad lines left out")
    if writer.truncated:
        notes.append(f"{writer.truncated} examples truncated to {writer.length} tokens")
    if writer.skipped:
        notes.append(f"{writer.skipped} examples of more than {writer.length} tokens left out")
    return notes


def _few_rows(rows: Rows, settings: TrainSettings) -> list[str]:
    asked, count = settings.batch.micro_batch, len(rows)
    return [f"batch.micro_batch is {asked}, but the data make only {count} row{'s' * (count > 1)}"] * (asked > count)


def _unended(pieces: Pieces, tokenizer: TextTokenizer, shape: str) -> list[str]:
    """A chat whose last learned token is no special one does not teach where to stop."""
    if shape in ("text", "prompt_completion"):
        return []
    labels = pieces.read(0)[1]
    last = labels[labels != IGNORED][-1]
    special = {id for id, token in tokenizer.tokenizer.added_tokens_decoder.items() if token.special}
    if len(labels) == pieces.lengths.max() or last in {*special, tokenizer.end}:
        return []
    return ["the chat template puts no end-of-turn token behind an answer, so the model will not learn to stop"]


def _read_template(name: str | None) -> str | None:
    if name is None:
        return None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template {name}: {getattr(error, 'strerror', None) or error}") from None


def _existing(path: Path) -> Path:
    """The nearest directory that is there: where a run's output goes there is room for its tokens."""
    return next(parent for parent in [path.absolute(), *path.absolute().parents] if parent.is_dir())
