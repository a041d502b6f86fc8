"""TRL's trainers over a streamed model against themselves over the module, step by step."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import transformers
from families import FAMILIES, VOCABULARY
from test_trainer import assert_same_run, streamed, train

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

LLAMA = FAMILIES[0]


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 3))]
    vocabulary = {word: index for index, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def pairs() -> Any:
    generator = torch.Generator().manual_seed(1)

    def text(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (), generator=generator))
        return " ".join(f"w{int(i)}" for i in torch.randint(0, VOCABULARY - 3, (count,), generator=generator))

    rows = [(text(2, 6), " " + text(1, 7)) for _ in range(20)]
    return datasets.Dataset.from_dict(dict(prompt=[p for p, _ in rows], completion=[c for _, c in rows]))


def arguments(directory: Path, kind: Any = trl.SFTConfig, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        output_dir=str(directory), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no",
        logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3,
        weight_decay=0.1, adam_epsilon=1e-6, max_grad_norm=0.5, seed=3,
    )  # fmt: skip
    if kind is not trl.GRPOConfig:
        settings["max_length"] = 16
    return kind(**{**settings, **changes})


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **changes)


def adapted(**changes: Any) -> torch.nn.Module:
    config = lora(**{"init_lora_weights": False, **changes})
    torch.manual_seed(5)
    return importlib.import_module("peft").get_peft_model(families.build(LLAMA), config)


def integration() -> Any:
    return importlib.import_module("megatrain.integrations.trl")


@pytest.mark.parametrize("make", [lambda: families.build(LLAMA, dropout=True), adapted], ids=["full", "lora"])
def test_fine_tuning(make: Any, tokenizer: Any, pairs: Any, tmp_path: Path) -> None:
    module = make()
    theirs = trl.SFTTrainer(
        model=copy.deepcopy(module), args=arguments(tmp_path / "plain"), train_dataset=pairs, processing_class=tokenizer
    )
    ours = integration().StreamedSFTTrainer(
        model=streamed(module), args=arguments(tmp_path / "streamed"), train_dataset=pairs, processing_class=tokenizer
    )
    train(theirs, ours)
    assert_same_run(theirs, ours)
    assert_same_logs(theirs, ours, "mean_token_accuracy", "entropy")


@pytest.fixture(scope="module")
def preferences(pairs: Any) -> Any:
    chosen = list(pairs["completion"])
    rejected = [*chosen[7:], *chosen[:7]]
    return datasets.Dataset.from_dict(dict(prompt=pairs["prompt"], chosen=chosen, rejected=rejected))


def frozen() -> torch.nn.Module:
    return families.build(LLAMA).requires_grad_(False)


@pytest.mark.parametrize("reference", ["streamed", "module", "base"])
def test_preferences(reference: str, tokenizer: Any, preferences: Any, tmp_path: Path) -> None:
    """Of a new adapter the base is the reference, of other models a frozen one."""
    data = dict(train_dataset=preferences, processing_class=tokenizer)
    plain, ours = (arguments(tmp_path / name, trl.DPOConfig, beta=0.3) for name in ("plain", "streamed"))
    if reference == "base":
        module = adapted(init_lora_weights=True)
        theirs = trl.DPOTrainer(model=families.build(LLAMA), peft_config=lora(), args=plain, **data)
        theirs.model.load_state_dict(module.state_dict())
        given = None
    else:
        module = families.build(LLAMA, dropout=True)
        theirs = trl.DPOTrainer(model=copy.deepcopy(module), ref_model=frozen(), args=plain, **data)
        given = streamed(frozen()) if reference == "streamed" else frozen()
    mine = integration().StreamedDPOTrainer(model=streamed(module), ref_model=given, args=ours, **data)
    train(theirs, mine)
    assert_same_run(theirs, mine)
    assert_same_logs(theirs, mine, "rewards/margins", "logps/chosen")
    assert any(abs(entry.get("rewards/margins", 0.0)) > 1e-4 for entry in theirs.state.log_history)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


@pytest.mark.parametrize("learns", ["all", "adapter"])
def test_policies(learns: str, tokenizer: Any, pairs: Any, tmp_path: Path) -> None:
    """Samples, rewards and updates, twice over each group; with an adapter also the penalty on leaving the base."""
    data = dict(train_dataset=pairs.select_columns("prompt"), processing_class=tokenizer, reward_funcs=reward)
    settings: dict[str, Any] = dict(
        per_device_train_batch_size=4, num_generations=4, max_completion_length=6, num_iterations=2,
        learning_rate=1e-3 if learns == "all" else 3e-2, beta=0.0 if learns == "all" else 0.1,
    )  # fmt: skip
    plain, ours = (arguments(tmp_path / name, trl.GRPOConfig, **settings) for name in ("plain", "streamed"))
    if learns == "all":
        module = families.build(LLAMA, dropout=True)
        theirs = trl.GRPOTrainer(model=copy.deepcopy(module), args=plain, **data)
    else:
        module = adapted(init_lora_weights=True)
        theirs = trl.GRPOTrainer(model=families.build(LLAMA), peft_config=lora(), args=plain, **data)
        theirs.model.load_state_dict(module.state_dict())
    mine = integration().StreamedGRPOTrainer(model=streamed(module), args=ours, **data)
    train(theirs, mine)
    assert_same_run(theirs, mine, rounding=3e-7)  # of advantages, whose mean is 0
    assert_same_logs(theirs, mine, "reward", "entropy", "kl")
    assert learns == "all" or any(entry.get("kl", 0.0) > 1e-5 for entry in theirs.state.log_history)


def assert_same_logs(theirs: Any, ours: Any, *keys: str) -> None:
    compared = 0
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key in set(keys) & set(other):
            compared += 1
            assert mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    assert compared


def test_references_that_would_be_wrong_are_refused(tokenizer: Any, preferences: Any, tmp_path: Path) -> None:
    data = dict(train_dataset=preferences, processing_class=tokenizer)
    preference, policy = integration().StreamedDPOTrainer, integration().StreamedGRPOTrainer
    settings = arguments(tmp_path, trl.DPOConfig)
    for module in (families.build(LLAMA), adapted()):  # the second one's adapter changes the base
        with pytest.raises(ValueError, match="ref_model is None"):
            preference(model=streamed(module), args=settings, **data)
    with pytest.raises(ValueError, match="peft_config is given"):
        preference(model=streamed(families.build(LLAMA)), args=settings, peft_config=lora(), **data)
    ahead = arguments(tmp_path, trl.DPOConfig, precompute_ref_log_probs=True)
    with pytest.raises(ValueError, match="precompute_ref_log_probs is on"):
        preference(model=streamed(families.build(LLAMA)), ref_model=frozen(), args=ahead, **data)
    sizes: dict[str, Any] = dict(per_device_train_batch_size=4, num_generations=4)
    with pytest.raises(ValueError, match=r"beta is 0\.04"):
        policy(
            model=streamed(families.build(LLAMA)), reward_funcs=reward, processing_class=tokenizer,
            args=arguments(tmp_path, trl.GRPOConfig, beta=0.04, **sizes), train_dataset=preferences,
        )  # fmt: skip


def test_a_moving_reference_and_plain_modules_are_refused(tmp_path: Path) -> None:
    trainers = integration()
    preference, policy, tuning = (getattr(trainers, f"Streamed{kind}Trainer") for kind in ("DPO", "GRPO", "SFT"))
    with pytest.raises(ValueError, match="sync_ref_model is on"):
        preference(
            model=streamed(families.build(LLAMA)), ref_model=frozen(),
            args=arguments(tmp_path, trl.DPOConfig, sync_ref_model=True),
        )  # fmt: skip
    sizes: dict[str, Any] = dict(per_device_train_batch_size=4, num_generations=4)
    sampling = arguments(tmp_path, trl.GRPOConfig, sync_ref_model=True, **sizes)
    with pytest.raises(ValueError, match="sync_ref_model is on"):
        policy(model=streamed(adapted(init_lora_weights=True)), reward_funcs=reward, args=sampling)
    for model, kind in (("path", "str"), (families.build(LLAMA), "LlamaForCausalLM")):
        for make in (preference, tuning, lambda model: policy(model=model, reward_funcs=reward)):
            with pytest.raises(ValueError, match=f"model is a {kind}; it must be a StreamedModel"):
                make(model=model)
