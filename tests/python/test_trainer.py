"""Hugging Face's Trainer over a streamed model against the plain Trainer over the module, step by step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from case_models import adversarial
from families import FAMILIES, VOCABULARY
from resident import assert_close
from torch.nn import functional as F

import megatrain

pytest.importorskip("accelerate")
import transformers

from megatrain.integrations.trainer_checkpoints import newest_whole
from megatrain.integrations.transformers import StreamedTrainer

LLAMA = FAMILIES[0]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Token rows of unequal lengths, parts of them without labels."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(count):
            length = int(torch.randint(4, 14, (), generator=generator))
            ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
            labels = ids.clone()
            labels[: int(torch.randint(0, length - 2, (), generator=generator))] = -100
            self.rows.append(dict(input_ids=ids, labels=labels))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str, value: int) -> torch.Tensor:
        return torch.stack([F.pad(row[name], (width - len(row[name]), 0), value=value) for row in rows])

    ids = padded("input_ids", 0)
    return dict(input_ids=ids, attention_mask=(ids != 0).long(), labels=padded("labels", -100))


def arguments(directory: Path, **changes: Any) -> transformers.TrainingArguments:
    settings: dict[str, Any] = dict(
        output_dir=str(directory), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=1,
        per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=6, learning_rate=1e-3, weight_decay=0.1,
        adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=2, seed=3,
    )  # fmt: skip
    return transformers.TrainingArguments(**{**settings, **changes})


def streamed(module: torch.nn.Module, **changes: Any) -> megatrain.StreamedModel:
    settings = dict(dtype=torch.float32, device=adversarial(), compile=False)
    return megatrain.StreamedModel(module, **{**settings, **changes})


def trainers(
    module: torch.nn.Module, directory: Path, kind: Any = None, model: dict[str, Any] | None = None, **changes: Any
) -> tuple[Any, Any]:
    """(plain, streamed), with the same data and arguments."""
    plain, base = kind or (StreamedTrainer, transformers.Trainer)
    settings = dict(train_dataset=Rows(20), eval_dataset=Rows(5, seed=9), data_collator=collate)
    theirs = base(model=copy.deepcopy(module), args=arguments(directory / "plain", **changes), **settings)
    ours = plain(model=streamed(module, **(model or {})), args=arguments(directory / "streamed", **changes), **settings)
    return theirs, ours


def train(*trainers: Any) -> None:
    for trainer in trainers:
        transformers.set_seed(3)  # they shuffle and drop out by the global generators
        trainer.train()


def assert_same_run(theirs: Any, ours: Any, tolerance: float = 1e-5, rounding: float = 1e-12) -> None:
    """rounding: of losses that cancel out."""
    expected, found = theirs.state.log_history, ours.state.log_history
    keys = {"loss", "grad_norm", "learning_rate", "eval_loss", "step"}
    assert [keys & set(entry) for entry in found] == [keys & set(entry) for entry in expected]
    assert any("loss" in entry for entry in found)
    for mine, other in zip(found, expected, strict=True):
        for key in keys & set(mine):
            relative = 1e-4 if key == "grad_norm" else tolerance
            assert mine[key] == pytest.approx(other[key], rel=relative, abs=rounding), (key, mine)
    state = ours.streamed.state_dict()
    for name, parameter in theirs.model.named_parameters():
        assert_close(state[name], parameter, 2 * tolerance, name)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(max_grad_norm=0.0, lr_scheduler_type="linear", gradient_accumulation_steps=1, weight_decay=0.0),
        dict(gradient_checkpointing=True, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=3),
        dict(label_smoothing_factor=0.1, max_steps=2),
    ],
    ids=["accumulation", "no clipping", "evaluation", "label smoothing"],
)
def test_every_step_is_the_plain_trainers(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = trainers(families.build(LLAMA, dropout=True), tmp_path, **changes)
    assert theirs.model_accepts_loss_kwargs and ours.model_accepts_loss_kwargs, "micro-batches weigh by their targets"
    train(theirs, ours)
    assert_same_run(theirs, ours)
    assert ours.streamed.steps == len([entry for entry in ours.state.log_history if "loss" in entry])
    decays = [group["weight_decay"] for group in ours.streamed.optimizer.param_groups]
    assert decays == [ours.args.weight_decay, 0.0]


def test_other_families_and_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    module = peft.get_peft_model(families.build(FAMILIES[5], dropout=True), config)
    theirs, ours = trainers(module, tmp_path, max_steps=3)
    train(theirs, ours)
    assert_same_run(theirs, ours)
    ours.save_model(str(tmp_path / "adapter"))
    loaded = peft.PeftModel.from_pretrained(families.build(FAMILIES[5]), tmp_path / "adapter")
    for name, value in loaded.state_dict().items():
        if "lora_" in name:
            assert torch.equal(value, ours.streamed.state_dict()[name]), name


def test_bf16_arguments_change_nothing_for_bf16_weights(tmp_path: Path) -> None:
    """Autocast around the step, as the arguments ask for, and without."""
    losses = []
    for bf16 in (False, True):
        _, ours = trainers(families.build(LLAMA), tmp_path, model=dict(dtype=torch.bfloat16), bf16=bf16, max_steps=3)
        train(ours)
        losses.append([entry["loss"] for entry in ours.state.log_history if "loss" in entry])
    assert losses[0] == losses[1] and len(losses[0]) == 3
    _, ours = trainers(families.build(LLAMA), tmp_path, bf16=True, max_steps=1)
    with pytest.raises(megatrain.UnsupportedModelError, match=r"fp32 weights under torch\.autocast"):
        ours.train()


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> Any:
        trainer = StreamedTrainer(
            model=streamed(families.build(LLAMA, dropout=True), dtype=torch.bfloat16),
            args=arguments(tmp_path / name, save_strategy="steps", save_steps=3, **changes),
            train_dataset=Rows(40),
            data_collator=collate,
        )
        trainer.train(resume_from_checkpoint=changes.pop("resume_from_checkpoint", None))
        return trainer

    straight = run("straight")
    resumed = run("resumed", resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    expected = [entry["loss"] for entry in straight.state.log_history if "loss" in entry]
    found = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert found == expected and len(found) == 6
    state = resumed.streamed.state_dict()
    for name, value in straight.streamed.state_dict().items():
        assert torch.equal(state[name], value), name
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "checkpoint-6")
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter.float(), straight.streamed.state_dict(dtype=torch.bfloat16)[name].float()), name


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """The newest one's weights, the end of the one before; a third one is whole."""

    def trainer() -> Any:
        settings = dict(save_strategy="steps", save_steps=1, max_steps=3, gradient_accumulation_steps=1)
        return StreamedTrainer(
            model=streamed(families.build(LLAMA)),
            args=arguments(tmp_path, **settings),
            train_dataset=Rows(8),
            data_collator=collate,
        )

    straight = trainer()
    straight.train()
    newest = tmp_path / "checkpoint-3"
    torn = max((newest / "streamed" / "checkpoint-3").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(torn.read_bytes())
    content[len(content) // 2] ^= 1
    torn.write_bytes(content)
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(megatrain.CheckpointError, match=f"the bytes of {torn.name}"):
        trainer().train(resume_from_checkpoint=str(newest))
    resumed = trainer()
    found = rf"checkpoint-3 is damaged: .*{torn.name}.*checkpoint-2 is damaged: trainer_state.*using .*checkpoint-1$"
    with pytest.warns(UserWarning, match=found):
        resumed.train(resume_from_checkpoint=True)
    state = resumed.streamed.state_dict()
    for name, value in straight.streamed.state_dict().items():
        assert torch.equal(state[name], value), name
    assert newest_whole(tmp_path) == newest, "what was damaged has been written anew"
    for name in (1, 2, 3):
        (tmp_path / f"checkpoint-{name}" / "scheduler.pt").write_bytes(b"PK")
    with pytest.raises(megatrain.CheckpointError, match=r"no whole checkpoint; .*checkpoint-3 .*scheduler\.pt .* torn"):
        trainer().train(resume_from_checkpoint=True)


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    trainer = StreamedTrainer(
        model=streamed(families.build(LLAMA)),
        args=arguments(
            tmp_path, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, learning_rate=0.05,
            load_best_model_at_end=True, max_grad_norm=0.0, lr_scheduler_type="constant", warmup_steps=0,
        ),
        train_dataset=Rows(20),
        eval_dataset=Rows(5, seed=9),
        data_collator=collate,
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 3 and losses[-1] > min(losses), "the last is not the best, or this shows nothing"
    assert trainer.evaluate()["eval_loss"] == min(losses)


def test_metrics_see_logits(tmp_path: Path) -> None:
    def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
        guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
        return {"accuracy": float((guesses == labels)[labels != -100].mean())}

    theirs, ours = trainers(families.build(LLAMA), tmp_path)
    found = []
    for trainer in (theirs, ours):
        trainer.compute_metrics = accuracy
        found.append(trainer.evaluate())
    assert found[1]["eval_accuracy"] == found[0]["eval_accuracy"]
    assert found[1]["eval_loss"] == pytest.approx(found[0]["eval_loss"], rel=1e-5)


def test_the_models_own_calls_still_work(tmp_path: Path) -> None:
    """step(), evaluate(), generate() and plain calls of a model that has a trainer, and of its module."""
    module = families.build(LLAMA, dropout=True)
    alone, ours = streamed(copy.deepcopy(module)), trainers(module, tmp_path)[1]
    for step in range(2):
        batch = LLAMA.batch(step)
        assert ours.streamed.step([batch]).loss == alone.step([batch]).loss
        assert ours.streamed.evaluate(batch).loss == alone.evaluate(batch).loss
        prompt = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        expected = alone.generate(**prompt, max_new_tokens=4, do_sample=False)
        assert torch.equal(ours.streamed.generate(**prompt, max_new_tokens=4, do_sample=False), expected)
        for call in (alone, ours.streamed.module):
            torch.manual_seed(step)
            call(**batch).loss.backward()
        alone.optimizer.step()
        ours.streamed.optimizer.step()
    state = alone.state_dict()
    for name, value in ours.streamed.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    model = streamed(families.build(LLAMA))
    with pytest.raises(ValueError, match="fp16 is on"):
        StreamedTrainer(model=model, args=arguments(tmp_path, fp16=True))
    with pytest.raises(ValueError, match="must be a StreamedModel"):
        StreamedTrainer(model=families.build(LLAMA), args=arguments(tmp_path))
    with pytest.raises(ValueError, match="optimizer is that of the streamed model"):
        StreamedTrainer(model=model, args=arguments(tmp_path), optimizers=(model.optimizer, None))
    trainer = StreamedTrainer(model=model, args=arguments(tmp_path))
    with pytest.raises(ValueError, match="norm_type is inf"):
        trainer.accelerator.clip_grad_norm_([], 1.0, norm_type=float("inf"))
    for name in ("bf16_full_eval", "fp16_full_eval"):
        with pytest.raises(ValueError, match=f"{name} is on"):
            StreamedTrainer(model=model, args=arguments(tmp_path, **{name: True}))
    best = dict(eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True, save_only_model=True)
    with pytest.raises(ValueError, match="save_only_model and load_best_model_at_end are on"):
        StreamedTrainer(model=model, args=arguments(tmp_path, **best), eval_dataset=Rows(2))


def test_another_optimizer_than_the_models_is_refused(tmp_path: Path) -> None:
    adamw, lion = (streamed(families.build(LLAMA), optimizer=rule) for rule in (megatrain.AdamW(), megatrain.Lion()))
    for optim in ("sgd", "adafactor", "rmsprop", "adamw_8bit", "lion_32bit", "galore_adamw"):
        with pytest.raises(ValueError, match=f"optim is {optim}, and the streamed model's optimizer adamw"):
            StreamedTrainer(model=adamw, args=arguments(tmp_path, optim=optim))
    with pytest.raises(ValueError, match=r"optim is lion_8bit, and .* lion"):
        StreamedTrainer(model=lion, args=arguments(tmp_path, optim="lion_8bit"))
    for name, value in (("optim_args", "rank=4"), ("optim_target_modules", ["q_proj"])):
        with pytest.raises(ValueError, match=f"{name} is .*; the optimizer is that of the streamed model"):
            StreamedTrainer(model=adamw, args=arguments(tmp_path, **{name: value}))
    for model, optim in ((adamw, "adamw_torch"), (lion, "lion_32bit"), (lion, "adamw_torch_fused")):
        StreamedTrainer(model=model, args=arguments(tmp_path, optim=optim))


@pytest.mark.parametrize(
    ("schedule", "settings"), [("cosine_with_min_lr", dict(min_lr=5e-4)), ("polynomial", dict(lr_end=5e-4))]
)
def test_schedules_begin_at_the_arguments_learning_rate(
    schedule: str, settings: dict[str, float], tmp_path: Path
) -> None:
    """Those that take it from the optimizer's defaults."""
    changes = dict(learning_rate=4e-3, lr_scheduler_type=schedule, lr_scheduler_kwargs=settings)
    pair = trainers(families.build(LLAMA), tmp_path, max_steps=4, **changes)
    train(*pair)
    theirs, ours = ([e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in pair)
    assert ours == theirs and len(ours) == 4 and max(ours) == 4e-3
