"""SIGKILL at random instants of a process that trains and saves: `python tests/python/kill_while_saving.py 200`.

The process says which save has ended and what it saved. After each kill the directory must load, hold exactly what
was saved, and nothing older than the last save that ended; the next process goes on from it."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path

import families
from families import FAMILIES, text_batch

import megatrain
from megatrain.checkpoints import PendingCheckpoint
from megatrain.checkpoints.directory import has_any
from megatrain.checkpoints.tile_file import sections

KEEP = 2


def make() -> megatrain.StreamedModel:
    module = families.build(FAMILIES[0], dropout=True)
    return megatrain.StreamedModel(
        module, device="cpu", compile=False, self_check=False, moments="int8", max_grad_norm=1.0, threads=1
    )


def digest(model: megatrain.StreamedModel) -> str:
    """Of every byte that a checkpoint is to bring back."""
    model._parts.drain()
    store = model._parts.tiles.store
    found = hashlib.blake2b(repr((model.steps, model.optimizer.progress())).encode(), digest_size=16)
    for tile in range(len(store)):
        for view in sections(store, tile).values():
            found.update(view)
    return found.hexdigest()


def saver(directory: Path, log: Path) -> None:
    """Steps, each followed by a save beside the next one, until killed. Every third step is saved twice at once."""
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(*words: object) -> None:
        os.write(told, (" ".join(map(str, words)) + "\n").encode())

    model = make()
    if has_any(directory):
        model.load_checkpoint(directory)
    tell("ready")
    pending: tuple[PendingCheckpoint, int, str] | None = None
    while True:
        model.step(text_batch(model.steps))
        if pending is not None:
            saving, *saved = pending
            saving.wait()
            tell("end", *saved)
            pending = None
        made = digest(model)
        tell("begin", model.steps, made)
        if model.steps % 3 == 0:
            for _ in range(2):
                model.save_checkpoint(directory, keep=KEEP)
                tell("end", model.steps, made)
        else:
            pending = model.begin_checkpoint(directory, keep=KEEP), model.steps, made


def kill_many(directory: Path, kills: int, seed: int) -> dict[str, int]:
    """How many kills fell into a save, and the step reached. AssertionError if anything is lost."""
    # Forked from a process that has imported everything and has no threads.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["kill_while_saving"])
    generator = random.Random(seed)
    reader = make()
    saves: dict[int, str] = {}
    ended = inside = 0
    for kill in range(kills):
        log = directory / f"log-{kill}"
        process = processes.Process(target=saver, args=(directory, log))
        process.start()
        # Counted by what it says, so that a slow machine is killed as far on as a fast one; the instant within a save
        # or a step is anywhere.
        told, since = generator.randint(1, 5), time.monotonic()
        while _lines(log) <= told:
            assert process.is_alive()
            if _lines(log) == 0:
                since = time.monotonic()
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, (time.monotonic() - since) / told))
        process.kill()
        process.join()
        lines = [line.split() for line in log.read_text().splitlines()[1:]]
        last = ""
        for word, step, made in lines:
            # A process that goes on makes the same steps again, to the bit.
            assert saves.setdefault(int(step), made) == made, f"kill {kill}: step {step} is another"
            last = word
            if word == "end":
                ended = max(ended, int(step))
        inside += last == "begin"
        if not ended:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing may look damaged
            reader.load_checkpoint(directory)
        assert reader.steps >= ended, f"kill {kill}: step {ended} was saved, and {reader.steps} is the last that loads"
        assert digest(reader) == saves[reader.steps], f"kill {kill}: step {reader.steps} is not what was saved"
        names = sorted(path.name for path in directory.glob("checkpoint-*"))
        assert len(names) <= KEEP + 2, names
    return {"kills": kills, "inside a save": inside, "steps": ended}


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        print(kill_many(Path(directory), int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))


if __name__ == "__main__":
    main()
