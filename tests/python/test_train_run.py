"""What a run does beside its steps: kinds of data, evaluation, best, early stop, samples, trackers, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import chat_templates as templates
import pytest
import torch

pytest.importorskip("pydantic")
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from megatrain.cli import main
from megatrain.train.config_file import load_settings
from megatrain.train.evaluate import Evaluation, evaluate
from megatrain.train.hooks import Hook, Run
from megatrain.train.loop import run_steps
from megatrain.train.model import stream
from megatrain.train.output import RunDirectory
from megatrain.train.prepare import is_packed, prepare
from megatrain.train.progress import open_progress

CONFIG = """
model: base
data: chats.jsonl
sequence_length: 64
batch: {micro_batch: 2, accumulate: 2}
steps: 6
optimizer: {lr: 1e-2}
device: cpu
sample: {tokens: 4}
output: {directory: runs/a}
"""
CHATS = [
    {"messages": [{"role": "user", "content": f"question {i}?"}, {"role": "assistant", "content": f"answer {i}"}]}
    for i in range(60)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model directory whose tokenizer has a chat template."""
    directory = tmp_path_factory.mktemp("models") / "base"
    tokenizer = templates.with_template(templates.byte_level(), templates.CHATML).tokenizer
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=2, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=len(tokenizer), tie_word_embeddings=True, max_position_embeddings=64,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), bos_token_id=None, use_cache=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def here(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in CHATS))
    return tmp_path


def train(*overrides: str) -> int:
    return main(["train", "run.yaml", *(part for override in overrides for part in ("--set", override))])


def records(key: str, run: str = "runs/a") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if key in record]


def test_chats_are_learned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=30", 'sample={prompt: ["question 3?", Hello], tokens: 6, temperature: 0}') == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "data: 58 examples" in shown.out
    assert "held out: 2 examples" in shown.out
    assert "rows: " in shown.out and "% of them filled" in shown.out
    losses = [record["loss"] for record in records("loss")]
    assert len(losses) == 30
    assert losses[-1] < 0.5 * losses[0]
    (evaluated,) = records("eval_loss")
    assert evaluated["eval_loss"] < losses[0]
    assert "bits_per_byte" not in evaluated
    assert f"held out (2 examples, 0.00 MB): loss {evaluated['eval_loss']:.4f}, perplexity" in shown.out
    first, second = records("sample")
    assert first["sample"].startswith("question 3?\n> ")
    assert second["sample"].startswith("Hello\n> ")
    assert AutoTokenizer.from_pretrained("runs/a/model").chat_template == templates.CHATML


def test_the_first_loss_is_that_of_the_answers_alone(here: Path) -> None:
    """Packed by the trainer, against each chat by itself in transformers, learned where the template says."""
    assert train("steps=1", "data.held_out=0", "batch={micro_batch: 64}", "sample.tokens=0") == 0
    tokenizer = AutoTokenizer.from_pretrained("base")
    model = AutoModelForCausalLM.from_pretrained("base")
    nats, targets = 0.0, 0
    for chat in CHATS:
        encoded = tokenizer.apply_chat_template(
            chat["messages"], chat_template=templates.CHATML_MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"]).bool()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        learned = mask[1:]
        nats += float(torch.nn.functional.cross_entropy(logits[learned], ids[1:][learned], reduction="sum"))
        targets += int(learned.sum())
    (record,) = records("loss")
    # Rows go on into the second pass to fill the micro-batch, and weigh there as in the first.
    prepared = prepare(load_settings("run.yaml", ["data.held_out=0", "batch={micro_batch: 64}"]))
    assert is_packed(prepared.rows)
    rows = len(prepared.rows)
    assert train("steps=1", "data.held_out=0", f"batch={{micro_batch: {rows}}}", "sample.tokens=0") == 0
    (record,) = records("loss", "runs/a-2")
    assert record["targets"] == targets
    assert record["loss"] == pytest.approx(nats / targets, rel=1e-5)


@pytest.mark.parametrize("kind", ["parquet", "csv", "alpaca", "sharegpt", "columns"])
def test_other_files_and_shapes(here: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [(f"question {i}?", f"answer {i}") for i in range(40)]
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(CHATS), "a.parquet")
        data = "data=a.parquet"
    elif kind == "csv":
        Path("a.csv").write_text("prompt,completion\n" + "".join(f"{ask},{answer}\n" for ask, answer in pairs))
        data = "data=a.csv"
    elif kind == "alpaca":
        Path("a.json").write_text(json.dumps([{"instruction": a, "input": "", "output": b} for a, b in pairs]))
        data = "data=a.json"
    elif kind == "sharegpt":
        turns = [[{"from": "human", "value": a}, {"from": "gpt", "value": b}] for a, b in pairs]
        Path("a.jsonl").write_text("\n".join(json.dumps({"conversations": turn}) for turn in turns))
        data = "data=a.jsonl"
    else:
        Path("a.jsonl").write_text("\n".join(json.dumps({"q": a, "a": b}) for a, b in pairs))
        data = "data={path: a.jsonl, columns: {prompt: q, completion: a}}"
    assert train(data, "steps=3", "sample.tokens=0") == 0
    assert capsys.readouterr().err == ""
    losses = [record["loss"] for record in records("loss")]
    assert losses[-1] < losses[0]
    # Equal questions and answers give the same tokens in every shape of a chat.
    if kind in ("alpaca", "sharegpt"):
        Path("same.jsonl").write_text("\n".join(json.dumps(chat) for chat in CHATS[:40]))
        assert train("data=same.jsonl", "steps=3", "sample.tokens=0") == 0
        same = sum(record["targets"] for record in records("loss", "runs/a-2"))
        assert abs(sum(record["targets"] for record in records("loss")) - same) < 0.2 * same


def test_bad_lines_are_reported_counted_and_left_out(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("chats.jsonl").open("a") as file:
        file.write('\n{"messages": \n{"messages": [{"role": "user", "content": "alone"}]}\n')
    assert train() == 2
    error = capsys.readouterr().err
    assert error.startswith("megatrain: chats.jsonl:61: not JSON: ")
    assert not Path("runs").exists()
    assert train("data.on_bad_line=skip", "steps=1") == 0
    shown = capsys.readouterr()
    assert "megatrain: chats.jsonl:61: not JSON" in shown.err
    assert "megatrain: chats.jsonl:62: no message of the assistant to learn from (left out)" in shown.err
    assert "2 bad lines left out" in shown.out


def test_a_template_without_an_end_is_noted(here: Path) -> None:
    endless = templates.CHATML.replace("<|im_end|>", "")
    Path("plain.jinja").write_text(endless)
    prepared = prepare(load_settings("run.yaml", ["data.chat_template=plain.jinja"]))
    assert prepared.notes == [
        "the chat template puts no end-of-turn token behind an answer, so the model will not learn to stop"
    ]
    assert prepare(load_settings("run.yaml")).notes == []


def test_a_micro_batch_of_more_rows_than_there_are_is_noted(here: Path) -> None:
    assert not [n for n in prepare(load_settings("run.yaml")).notes if "micro_batch" in n]
    prepared = prepare(load_settings("run.yaml", ["batch.micro_batch=1000"]))
    assert f"batch.micro_batch is 1000, but the data make only {len(prepared.rows)} rows" in prepared.notes


def test_epochs_are_whole_passes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=null", "epochs=2", "data.held_out=0", "sample.tokens=0", "data.packing=false") == 0
    assert "2.00 passes over the data" in capsys.readouterr().out
    assert [record["step"] for record in records("loss")] == list(range(1, 31))  # 60 chats, 4 a step
    targets = sum(record["targets"] for record in records("loss"))
    prepared = prepare(load_settings("run.yaml", ["data.held_out=0"]))
    once = sum(int((prepared.rows.pieces.read(index)[1] != -100).sum()) for index in range(60))
    assert targets == 2 * once


def test_a_separate_file_to_evaluate_on(here: Path) -> None:
    Path("apart.jsonl").write_text("\n".join(json.dumps(chat) for chat in CHATS[:5]))
    prepared = prepare(load_settings("run.yaml", ["data.validation=apart.jsonl"]))
    assert prepared.held_out is not None
    assert (prepared.corpus.count(1), prepared.held_out.corpus.count(2)) == (60, 5)
    assert train("data.validation=apart.jsonl", "steps=2", "eval.every=1") == 0
    assert [record["step"] for record in records("eval_loss")] == [1, 2]


def test_splits_of_a_saved_dataset(here: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(CHATS)
    datasets.DatasetDict({"train": made, "test": made.select(range(7))}).save_to_disk("saved")
    data = "data={path: saved, validation: saved, validation_split: test}"
    prepared = prepare(load_settings("run.yaml", [data]))
    assert prepared.held_out is not None
    assert (prepared.corpus.count(1), prepared.held_out.corpus.count(2)) == (60, 7)
    assert train(data, "steps=1", "sample.tokens=0") == 0


def test_evaluation_best_and_early_stop(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that ruins the model: the best evaluation comes early, and the run stops."""
    arguments = ["eval={every: 2, patience: 2, keep_best: true}", "sample.tokens=0", "optimizer.lr=0.5", "steps=40"]
    assert train(*arguments, "optimizer.max_grad_norm=null", "schedule.kind=constant") == 0
    shown = capsys.readouterr().out
    found = records("eval_loss")
    losses = [record["eval_loss"] for record in found]
    last = len(losses) - 1
    best = min(range(len(losses)), key=losses.__getitem__)
    assert last == best + 2
    assert [record["step"] for record in found] == [2 * (i + 1) for i in range(len(found))]
    assert found[best]["best"] is True and found[last]["best"] is False
    assert f"stopped after step {2 * last + 2} of 40: the held-out loss was not below that of step" in shown
    # best/ holds the weights of the best evaluation, model/ the last ones.
    from megatrain.data import in_order

    held_out = prepare(load_settings("run.yaml")).held_out
    assert held_out is not None
    for name, expected in (("best", losses[best]), ("model", losses[last])):
        model = AutoModelForCausalLM.from_pretrained(f"runs/a/{name}").eval()
        nats = targets = 0.0
        for batch in in_order(held_out.rows, 2):
            count = float((batch["labels"][:, 1:] != -100).sum())
            with torch.no_grad():
                nats += float(model(**batch, use_cache=False).loss) * count
            targets += count
        assert nats / targets == pytest.approx(expected, rel=1e-5)
    assert AutoTokenizer.from_pretrained("runs/a/best").chat_template == templates.CHATML


def test_evaluation_before_the_first_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the weights that the run begins with; it changes nothing of the steps."""
    assert train("eval={every: 3, at_start: true, max_bytes: null}", "sample.tokens=0") == 0
    assert "step 0  held out: loss" in capsys.readouterr().out
    first, *others = records("eval_loss")
    assert [record["step"] for record in (first, *others)] == [0, 3, 6]
    assert train("eval.max_bytes=null", "sample.tokens=0", "output.directory=runs/b") == 0
    assert [r["loss"] for r in records("loss")] == [r["loss"] for r in records("loss", "runs/b")]
    settings = load_settings("run.yaml", ["eval.max_bytes=null"])
    prepared = prepare(settings)
    assert prepared.held_out is not None
    untouched = stream(prepared.source, settings)
    assert first["eval_loss"] == evaluate(untouched, prepared.held_out, 2)["eval_loss"]


def test_the_example_of_chats(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[2] / "examples" / "chats.yaml"
    overrides = [
        "model=base",
        "data=chats.jsonl",
        "sequence_length=64",
        "device=cpu",
        "sample.tokens=3",
        "eval.every=4",
    ]
    assert main(["train", str(example), *(part for entry in overrides for part in ("--set", entry))]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "2.00 passes over the data" in shown.out
    assert Path("runs/chats/model/config.json").is_file()
    assert Path("runs/chats/best/config.json").is_file()
    assert main(["export", "runs/chats", "out", "--dtype", "fp32"]) == 0
    steps = records("loss", "runs/chats")[-1]["step"]
    assert f"exported runs/chats/checkpoint-{steps} to out" in capsys.readouterr().out


def test_the_settings_in_the_training_page_are_valid(here: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    Path("page.yaml").write_text(page.split("```yaml\n")[1].split("```")[0])
    settings = load_settings("page.yaml")
    assert settings.epochs == 2
    assert settings.report_to == ["tensorboard"]


def test_samples_every_so_many_steps(here: Path) -> None:
    assert train("steps=5", "sample={every: 2, tokens: 3}") == 0
    assert [record["step"] for record in records("sample")] == [2, 4, 5]


def test_a_line_a_step(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("steps=4", "sample.tokens=0") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]


def test_tensorboard(here: Path) -> None:
    pytest.importorskip("tensorboard")
    assert train("steps=3", "report_to=tensorboard", "eval.every=2") == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("runs/a/tensorboard")
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss")]
    assert logged == [(r["step"], pytest.approx(r["loss"], rel=1e-6)) for r in records("loss")]
    assert [event.step for event in events.Scalars("eval_loss")] == [2, 3]


def test_weights_and_biases(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class FakeRun:
        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finished")

    fake = types.ModuleType("wandb")
    fake.init = lambda **keys: calls.append(keys) or FakeRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert train("steps=2", "report_to=[wandb]", "project=mine") == 0
    assert calls[0]["project"] == "mine"
    assert calls[0]["name"] == "a"
    assert calls[0]["config"]["steps"] == 2
    assert calls[-1] == "finished"
    losses = [(call[0], call[1]["loss"]) for call in calls[1:-1] if "loss" in call[1]]
    assert losses == [(record["step"], record["loss"]) for record in records("loss")]
    assert any("sample" in call[1] for call in calls[1:-1])


def test_a_model_that_mixes_documents_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.jsonl").write_text("\n".join(json.dumps({"text": f"note {i}"}) for i in range(60)))
    shape = "model={type: mamba, hidden_size: 32, num_hidden_layers: 2, state_size: 4, use_cache: false}"
    arguments = [shape, "data=notes.jsonl", "tokenizer={type: bytes}", "steps=1", "sample.tokens=0"]
    status = train(*arguments)
    error = capsys.readouterr().err
    assert status == 2
    assert "set data.packing: false" in error
    assert error.count("\n") == 1
    assert not Path("runs").exists()


# resume


class _Losses(Hook):
    def __init__(self) -> None:
        self.interrupt_at: int | None = None

    def after_step(self, run: Run) -> None:
        if run.step == self.interrupt_at:
            raise KeyboardInterrupt


def _run(here: Path, name: str, overrides: list[str]) -> Run:
    settings = load_settings("run.yaml", [f"output.directory=runs/{name}", *overrides])
    prepared = prepare(settings)
    directory = RunDirectory(settings.output)
    directory.open(settings)
    return Run(stream(prepared.source, settings), settings, prepared, directory, open_progress(9, sys.stderr))


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_run_goes_on_exactly(here: Path, packing: str) -> None:
    """Ten steps against five, an interrupt, everything saved and loaded elsewhere, and five more."""
    overrides = [f"data.packing={packing}", "steps=10", "eval.every=2", "schedule={kind: wsd, warmup_steps: 3}"]

    def losses(run: Run, hooks: list[Hook]) -> list[tuple[int, float, float]]:
        found: list[tuple[int, float, float]] = []
        try:
            run_steps(run, hooks, lambda interval: found.extend((r.step, r.loss, r.lr) for r in interval.records))
        except KeyboardInterrupt:
            pass
        return found

    whole = _run(here, "whole", overrides)
    expected = losses(whole, [Evaluation()])
    assert [step for step, _, _ in expected] == list(range(1, 11))
    first = _run(here, "first", overrides)
    stop = _Losses()
    stop.interrupt_at = 5
    before = losses(first, [Evaluation(), stop])
    state = json.loads(json.dumps(first.state_dict()))
    assert state["step"] == 5
    weights, moments = first.model.state_dict(), first.model.optimizer.state_dict()
    second = _run(here, "second", overrides)
    second.model.load_state_dict(weights)
    second.model.optimizer.load_state_dict(moments)
    second.model.steps = first.model.steps
    second.load_state_dict(state)
    after = losses(second, [Evaluation()])
    assert before + after == expected
    assert (second.best_loss, second.best_step) == (whole.best_loss, whole.best_step)


def test_sigterm_ends_between_steps_with_status_143(here: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatrain.cli",
        "train",
        "run.yaml",
        "--set",
        "steps=1000000",
        "--set",
        "data.workers=1",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        os.kill(process.pid, signal.SIGTERM)
        process.stdout.read()
        error = process.stderr.read()
    assert process.returncode == 143
    assert error.startswith("megatrain: terminated after step ")
    step = int(error.split("after step ")[1].split()[0])
    assert f"runs/a/checkpoint-{step} is saved, --set resume=auto goes on from it" in error
    assert [record["step"] for record in records("loss")] == list(range(1, step + 1))
