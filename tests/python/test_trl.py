"""TRL's SFTTrainer over a streamed model against itself over the module, step by step."""

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


def arguments(directory: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        output_dir=str(directory), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no",
        logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, learning_rate=1e-3,
        weight_decay=0.1, adam_epsilon=1e-6, max_grad_norm=0.5, seed=3, max_length=16,
    )  # fmt: skip
    return trl.SFTConfig(**{**settings, **changes})


def adapted() -> torch.nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    return peft.get_peft_model(families.build(LLAMA), config)


@pytest.mark.parametrize("make", [lambda: families.build(LLAMA, dropout=True), adapted], ids=["full", "lora"])
def test_fine_tuning(make: Any, tokenizer: Any, pairs: Any, tmp_path: Path) -> None:
    module = make()
    theirs = trl.SFTTrainer(
        model=copy.deepcopy(module), args=arguments(tmp_path / "plain"), train_dataset=pairs, processing_class=tokenizer
    )
    ours = importlib.import_module("megatrain.integrations.trl").StreamedSFTTrainer(
        model=streamed(module), args=arguments(tmp_path / "streamed"), train_dataset=pairs, processing_class=tokenizer
    )
    train(theirs, ours)
    assert_same_run(theirs, ours)
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        for key in {"mean_token_accuracy", "entropy"} & set(other):
            assert mine[key] == pytest.approx(other[key], rel=1e-5)
