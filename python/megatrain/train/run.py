"""`megatrain train` from settings to a saved model. What can be refused is refused before the first
step, and nothing is written before that step has run."""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import megatrain
from megatrain.data.division import HELD_OUT, TRAIN
from megatrain.data.isolation import leaks_between_documents
from megatrain.errors import UnsupportedModelError

from .account import Account, plan_run
from .bigram import ByteBigram
from .checkpoints import Checkpoints, Finished, look_ahead, resume
from .config import TrainSettings
from .errors import RunError, UserError, one_line
from .evaluate import Evaluation, described
from .hooks import Hook, Run
from .loop import Interval, run_steps
from .model import resolve_dtype, stream
from .output import RunDirectory
from .prepare import Prepared, is_packed, prepare
from .progress import open_progress, reading
from .sample import Samples
from .signals import Terminated
from .trackers import check_trackers


def run(settings: TrainSettings) -> None:
    """Train, measure, show a sample, save. UserError before the first step, RunError after."""
    started = time.perf_counter()
    _quiet(transformers.logging)
    check_trackers(settings.report_to)
    directory = RunDirectory(settings.output, resume=settings.resume == "auto")
    try:
        look_ahead(settings, directory)
        _run(settings, directory, started)
    except Finished as note:
        print(note)


def _run(settings: TrainSettings, directory: RunDirectory, started: float) -> None:
    with reading(sys.stdout):
        prepared = prepare(settings)
    model = stream(prepared.source, settings)
    _introduce(settings, prepared, model)
    _check_packing(model, prepared, settings)
    plan_run(model, settings)
    try:
        with open_progress(prepared.steps, sys.stdout) as progress:
            state = Run(model, settings, prepared, directory, progress)
            checkpoints, account = Checkpoints(), Account()
            hooks: list[Hook] = [account, Evaluation([_KeepBest()]), Samples(), checkpoints]
            source = resume(state, checkpoints)
            if source is not None:
                progress.note(f"going on after step {state.step} of {source}")
            _train(state, hooks, checkpoints, account)
            try:
                _finish(state, hooks, started)
            except KeyboardInterrupt as interrupt:
                if not directory.saved_model:
                    _tell(state, hooks, checkpoints)
                raise type(interrupt)(f"{_word(interrupt)} after the last step; {_left(state, checkpoints)}") from None
    finally:
        directory.close()


def _quiet(logging: Any) -> None:
    """transformers' own bars and notes would come between our lines."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _introduce(settings: TrainSettings, prepared: Prepared, model: megatrain.StreamedModel) -> None:
    corpus, rows = prepared.corpus, prepared.rows
    tokens = rows.pieces.tokens
    parameters = sum(parameter.numel() for parameter in model.parameters())
    passes = settings.epochs or prepared.steps / prepared.loader.steps_per_pass
    held_out = prepared.held_out
    held = _amount(held_out.corpus, HELD_OUT) if held_out else "nothing"
    print(
        f"data: {_amount(corpus, TRAIN)}, {tokens:,} tokens, vocabulary {prepared.tokenizer.size:,}; held out: {held}"
    )
    if is_packed(rows):
        print(f"rows: {len(rows):,} of {rows.length}, {tokens / (len(rows) * rows.length):.0%} of them filled")
    for note in prepared.notes:
        print(note)
    print(
        f"model: {prepared.source.config.model_type}, {parameters / 1e6:.1f} M parameters, "
        f"{str(resolve_dtype(settings)).removeprefix('torch.')}; "
        f"{prepared.steps} steps, {passes:.2f} passes over the data",
        flush=True,
    )


def _amount(corpus: Any, role: int) -> str:
    count = corpus.count(role)
    noun = "document" if corpus.shape == "text" else "example"
    return f"{count} {noun}{'' if count == 1 else 's'}, {corpus.nbytes(role) / 1e6:.2f} MB"


def _check_packing(model: megatrain.StreamedModel, prepared: Prepared, settings: TrainSettings) -> None:
    held_out = prepared.held_out
    if not is_packed(prepared.rows) and not (held_out and is_packed(held_out.rows)):
        return
    # A compiled block is compiled anew for each shape: then in the shape of the run.
    compiled = model.device.type == "cuda" if settings.compile == "auto" else settings.compile
    micro_batch = settings.batch.micro_batch
    rows, length = (micro_batch, prepared.rows.length) if compiled else (min(2, micro_batch), 24)
    length = max(4, min(length, prepared.rows.length))
    advice = "; set data.packing: false"
    try:
        leak = leaks_between_documents(
            lambda batch: model.evaluate(batch).loss, prepared.tokenizer.size, model.dtype, rows=rows, length=length
        )
    except TypeError as error:
        raise UserError(f"model: takes no position_ids, so documents cannot be packed: {error}{advice}") from error
    except UnsupportedModelError as error:
        raise UserError(f"model: {one_line(error)}") from error
    if leak is not None:
        raise UserError(f"model: does not keep packed documents apart: {leak}{advice}")


class _KeepBest(Hook):
    def new_best(self, run: Run) -> None:
        if run.settings.eval.keep_best:
            run.directory.save_model(_writer(run), "best")


def _train(state: Run, hooks: list[Hook], checkpoints: Checkpoints, account: Account) -> None:
    settings, directory = state.settings, state.directory

    def on_interval(interval: Interval) -> None:
        for record in interval.records:
            directory.log(dataclasses.asdict(record))
        directory.log(
            {
                "through_step": interval.records[-1].step,
                "tokens_per_second": interval.tokens_per_second,
                "wait_copy_seconds": interval.wait_copy_seconds,
                "wait_update_seconds": interval.wait_update_seconds,
                "seconds": interval.seconds,
            }
        )
        account.add(state, interval)
        state.progress.show(interval)

    if directory.path is None:
        directory.open(settings)
    account.write_plan(state)
    try:
        with _nothing_left_of_a_refusal(directory):
            run_steps(state, hooks, on_interval)
        if state.stopped:
            state.progress.note(f"stopped after step {state.step} of {state.steps}: {state.stopped}")
    except KeyboardInterrupt as interrupt:
        _tell(state, hooks, checkpoints)
        raise type(interrupt)(
            f"{_word(interrupt)} after step {state.step} of {state.steps}; {_left(state, checkpoints)}"
        ) from None
    except UnsupportedModelError as error:
        raise UserError(f"model: {one_line(error)}") from error
    except torch.OutOfMemoryError as error:
        raise RunError(one_line(error)) from error


@contextmanager
def _nothing_left_of_a_refusal(directory: RunDirectory) -> Iterator[None]:
    """The directory of a run that ended before a step was logged is removed, but for want of memory: then its plan
    says what was tried."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except BaseException:
        directory.discard()
        raise


def _finish(state: Run, hooks: list[Hook], started: float) -> None:
    settings, directory = state.settings, state.directory
    saved = directory.save_model(_writer(state))
    for hook in hooks:
        hook.ended(state)
    note = state.progress.note
    results, bigram = state.results, None
    if settings.eval.beat_bigram:
        bigram = _bigram(state.prepared)
        state.log({"bigram_bits_per_byte": bigram})
    if results:
        held_out = state.prepared.held_out
        assert held_out is not None
        line = f"held out ({_amount(held_out.corpus, HELD_OUT)}): {described(results)}"
        note(line if bigram is None else f"{line}; a byte bigram model: {bigram:.3f}")
    note(f"saved {saved}; {time.perf_counter() - started:.0f} s in all")
    if bigram is not None and not results["bits_per_byte"] < bigram:
        raise RunError(
            f"{results['bits_per_byte']:.3f} bits per byte does not beat the byte bigram model's {bigram:.3f}"
        )


def _bigram(prepared: Prepared) -> float:
    assert prepared.held_out is not None
    return ByteBigram(prepared.corpus.texts(TRAIN)).bits_per_byte(prepared.held_out.corpus.texts(HELD_OUT))


def _writer(state: Run) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        state.model.save_pretrained(str(path))
        state.prepared.tokenizer.tokenizer.save_pretrained(str(path))

    return write


def _word(interrupt: KeyboardInterrupt) -> str:
    return "terminated" if isinstance(interrupt, Terminated) else "interrupted"


def _tell(state: Run, hooks: list[Hook], checkpoints: Checkpoints) -> None:
    """The hooks, of an interrupt."""
    try:
        for hook in hooks:
            hook.interrupted(state)
    except KeyboardInterrupt:
        checkpoints.failure = "interrupted once more"


def _left(state: Run, checkpoints: Checkpoints) -> str:
    path = state.directory.path
    if path is None:
        return "nothing was written"
    if state.directory.saved_model:
        return f"the model is saved in {path / 'model'}"
    if checkpoints.last is None:
        reason = f": {checkpoints.failure}" if checkpoints.failure else ""
        return f"no checkpoint was saved{reason}, {path} has the metrics so far"
    if checkpoints.failure:
        return f"its checkpoint was not saved ({checkpoints.failure}), {checkpoints.last} is the last one"
    return f"{checkpoints.last} is saved, --set resume=auto goes on from it"
