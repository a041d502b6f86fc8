"""`megatrain train` from settings to a saved model. What can be refused is refused before the first
step, and nothing is written before that step has run."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import megatrain
from megatrain.errors import UnsupportedModelError

from .bigram import ByteBigram
from .config import TrainSettings
from .data import Rows, training_steps
from .errors import RunError, UserError, one_line
from .evaluate import bits_per_byte
from .loop import Interval, run_steps
from .model import ModelSource, describe_shape, open_directory, resolve_dtype, stream
from .output import RunDirectory
from .progress import open_progress
from .sample import draw
from .text import Document, cut, read_documents, split
from .tokenizer import TextTokenizer, load_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Prepared:
    """Everything but the weights, checked."""

    source: ModelSource
    tokenizer: TextTokenizer
    training: list[Document]
    held_out: list[Document]
    rows: Rows


def run(settings: TrainSettings) -> None:
    """Train, measure, show a sample, save. UserError before the first step, RunError after."""
    started = time.perf_counter()
    _quiet(transformers.logging)
    directory = RunDirectory(settings.output)
    prepared = prepare(settings)
    model = stream(prepared.source, settings)
    _introduce(settings, prepared, model)
    _train(model, prepared, settings, directory)
    try:
        _finish(model, prepared, settings, directory, started)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted after the last step; {_left(directory)}") from None


def _quiet(logging: Any) -> None:
    """transformers' own bars and notes would come between our lines."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def prepare(settings: TrainSettings) -> Prepared:
    source = open_directory(settings.model) if isinstance(settings.model, str) else None
    documents = read_documents(settings.data, settings.seed)
    training, held_out = split(documents, settings.data.held_out, settings.seed)
    if source is None:
        assert not isinstance(settings.model, str)
        tokenizer = train_tokenizer(settings.tokenizer, training)
        source = describe_shape(settings.model, tokenizer.size, tokenizer.end)
    else:
        assert source.directory is not None
        tokenizer = load_tokenizer(source.directory)
        if "tokenizer" in settings.model_fields_set:
            print(
                f"megatrain: the key 'tokenizer' is not used; {source.directory} has its own", file=sys.stderr
            )
    source.check(tokenizer, settings.sequence_length)
    tokens = tokenizer.stream(training)
    if len(tokens.ids) < settings.sequence_length:
        raise UserError(
            f"data.path {settings.data.path}: {len(tokens.ids)} tokens to train on, "
            f"shorter than one sequence of {settings.sequence_length}"
        )
    return Prepared(source, tokenizer, training, held_out, Rows(tokens, settings.sequence_length))


def _introduce(settings: TrainSettings, prepared: Prepared, model: megatrain.StreamedModel) -> None:
    targets = (
        settings.steps * settings.batch.micro_batch * settings.batch.accumulate * settings.sequence_length
    )
    tokens = len(prepared.rows.stream.ids)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"text: {_documents(prepared.training)}, {tokens:,} tokens, "
        f"vocabulary {prepared.tokenizer.size:,}; held out: {_documents(prepared.held_out)}"
    )
    print(
        f"model: {prepared.source.config.model_type}, {parameters / 1e6:.1f} M parameters, "
        f"{str(resolve_dtype(settings)).removeprefix('torch.')}; "
        f"{settings.steps} steps, {targets:,} tokens, {targets / tokens:.2f} passes",
        flush=True,
    )


def _documents(documents: Sequence[Document]) -> str:
    size = sum(document.nbytes for document in documents)
    noun = "document" if len(documents) == 1 else "documents"
    return f"{len(documents)} {noun}, {size / 1e6:.2f} MB"


def _train(
    model: megatrain.StreamedModel, prepared: Prepared, settings: TrainSettings, directory: RunDirectory
) -> None:
    last_step = 0

    def on_interval(interval: Interval) -> None:
        nonlocal last_step
        if directory.path is None:
            directory.open(settings)
        for record in interval.records:
            directory.log(dataclasses.asdict(record))
        last_step = interval.records[-1].step
        directory.log(
            {
                "through_step": last_step,
                "tokens_per_second": interval.tokens_per_second,
                "wait_copy_seconds": interval.wait_copy_seconds,
                "wait_update_seconds": interval.wait_update_seconds,
                "seconds": interval.seconds,
            }
        )
        progress.show(interval)

    batches = training_steps(prepared.rows, settings.batch, settings.steps, settings.seed)
    try:
        with open_progress(settings.steps, sys.stdout) as progress:
            run_steps(model, batches, settings, on_interval)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted after step {last_step} of {settings.steps}; {_left(directory)}"
        ) from None
    except UnsupportedModelError as error:
        raise UserError(f"model: {one_line(error)}") from error
    except torch.OutOfMemoryError as error:
        raise RunError(one_line(error)) from error


def _finish(
    model: megatrain.StreamedModel,
    prepared: Prepared,
    settings: TrainSettings,
    directory: RunDirectory,
    started: float,
) -> None:
    tokenizer = prepared.tokenizer

    def write(path: Path) -> None:
        model.save_pretrained(str(path))
        tokenizer.tokenizer.save_pretrained(str(path))

    saved = directory.save_model(write)
    held_out = cut(prepared.held_out, settings.eval.max_bytes)
    ours = bits_per_byte(
        model,
        tokenizer,
        held_out,
        sequence_length=settings.sequence_length,
        context=settings.eval.context,
        micro_batch=settings.batch.micro_batch,
    )
    bigram = ByteBigram(prepared.training).bits_per_byte(held_out)
    directory.log({"bits_per_byte": ours, "bigram_bits_per_byte": bigram, "held_out": _documents(held_out)})
    if settings.sample.tokens:
        text = draw(
            model, tokenizer, settings.sample, sequence_length=settings.sequence_length, seed=settings.seed
        )
        encoding = sys.stdout.encoding or "utf-8"
        print(f"sample:\n{text.encode(encoding, 'replace').decode(encoding)}\n")
    print(f"held out ({_documents(held_out)}): {ours:.3f} bits per byte; a byte bigram model: {bigram:.3f}")
    print(f"saved {saved}; {time.perf_counter() - started:.0f} s in all", flush=True)
    if settings.eval.beat_bigram and not ours < bigram:
        raise RunError(f"{ours:.3f} bits per byte does not beat the byte bigram model's {bigram:.3f}")


def _left(directory: RunDirectory) -> str:
    if directory.path is None:
        return "nothing was written"
    if (directory.path / "model").is_dir():
        return f"the model is saved in {directory.path / 'model'}"
    return f"no model was saved, {directory.path} has the metrics so far"
