"""Lazy logits in the heads of real models, against the same models with plain heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lazy_heads import MODELS, VOCABULARY, assert_near, batch_of, build, compare
from torch import Tensor, nn
from torch.nn import functional as F

from megatrain.logits import LazyLogits, lazy_head, mirror_labels


@pytest.mark.parametrize("name", MODELS)
def test_model_equals_itself_with_a_plain_head(name: str) -> None:
    compare(build(name), batch_of(mirrored=True), 1e-6, 3e-6, chunk_rows=7)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_labels_without_a_twin(name: str) -> None:
    compare(build(name), batch_of(), 1e-6, 3e-6)


@pytest.mark.parametrize("name", ["llama", "gemma2 soft cap", "t5"])
def test_model_in_bf16(name: str) -> None:
    compare(build(name, torch.bfloat16), batch_of(mirrored=True), 1e-2, 3e-2, chunk_rows=7)


@pytest.mark.parametrize("items", [17, torch.tensor(17)])
def test_num_items_in_batch(items: Any) -> None:
    compare(build("llama"), {**batch_of(mirrored=True), "num_items_in_batch": items}, 1e-6, 3e-6)


def test_shift_labels() -> None:
    batch = batch_of()
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[..., 1:].contiguous()
    batch["shift_labels"] = mirror_labels(shifted, shifted)
    compare(build("qwen2"), batch, 1e-6, 3e-6)


def test_frozen_head() -> None:
    model = build("llama")
    model.lm_head.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    compare(model, batch_of(), 1e-6, 3e-6)


def test_evaluation() -> None:
    model = build("gemma2 soft cap")
    with torch.no_grad():
        expected = model(**batch_of())
        with lazy_head(model.lm_head, lambda name: None):  # type: ignore[arg-type]
            actual = model(**batch_of())
    assert not actual.loss.requires_grad
    assert_near(actual.loss, expected.loss, 1e-6)
    assert_near(actual.logits.softmax(-1), expected.logits.softmax(-1), 1e-6)


def test_output_of_a_model_carries_lazy_logits() -> None:
    model = build("llama")
    with lazy_head(model.lm_head, lambda name: None):  # type: ignore[arg-type]
        labelled, unlabelled = model(**batch_of()), model(batch_of()["input_ids"])
        as_tuple = model(**batch_of(), return_dict=False)
    assert isinstance(labelled[1], LazyLogits) and isinstance(labelled.logits, LazyLogits)
    assert labelled.to_tuple()[1] is labelled.logits
    assert isinstance(unlabelled[0], LazyLogits)
    assert isinstance(as_tuple[1], LazyLogits)
    expected = model(**batch_of())
    assert torch.equal(labelled.logits.argmax(-1), expected.logits.argmax(-1))
    assert_near(unlabelled[0].detach(), model(batch_of()["input_ids"]).logits, 1e-6)


def test_generation_with_a_lazy_head() -> None:
    model = build("llama")
    prompt = batch_of()["input_ids"][:, :4]
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **settings)  # type: ignore[operator]
    with lazy_head(model.lm_head, lambda name: None):  # type: ignore[arg-type]
        assert torch.equal(model.generate(prompt, **settings), expected)  # type: ignore[operator]


def test_the_head_is_itself_again_afterwards() -> None:
    head = nn.Linear(8, VOCABULARY)
    with pytest.raises(KeyError), lazy_head(head, lambda name: None):
        assert isinstance(head(torch.zeros(2, 8)), LazyLogits)
        raise KeyError
    assert type(head(torch.zeros(2, 8))) is Tensor
    assert "forward" not in vars(head)


def test_weights_are_read_as_attributes_at_each_call() -> None:
    head = nn.Linear(8, VOCABULARY, bias=False)
    other = torch.randn(VOCABULARY, 8)
    hidden, targets = torch.randn(5, 8), torch.arange(5)
    with lazy_head(head, lambda name: None):
        del head._parameters["weight"]
        head.__dict__["weight"] = other
        assert_near(
            F.cross_entropy(head(hidden), targets), F.cross_entropy(hidden @ other.t(), targets), 1e-6
        )


def test_a_head_with_its_own_forward_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    head = nn.Linear(8, 9)
    for module in (Doubled(8, 9), nn.LayerNorm(8)):
        with pytest.raises(TypeError, match="forward of its own"), lazy_head(module, lambda name: None):
            pass
    with lazy_head(head, lambda name: None), pytest.raises(TypeError), lazy_head(head, lambda name: None):
        pass


def test_the_head_checks_its_input() -> None:
    with lazy_head(head := nn.Linear(8, 9), lambda name: None):
        with pytest.raises(RuntimeError, match=r"\(\.\.\., 8\)"):
            head(torch.zeros(2, 7))
        with pytest.raises(RuntimeError, match="bfloat16"):
            head(torch.zeros(2, 8, dtype=torch.bfloat16))


def test_autocast_casts_as_a_linear_layer_does() -> None:
    head, hidden, targets = nn.Linear(8, VOCABULARY), torch.randn(5, 8), torch.arange(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(head(hidden).float(), targets)
        with lazy_head(head, lambda name: None):
            logits = head(hidden)
            assert logits.dtype == torch.bfloat16
            loss = F.cross_entropy(logits.float(), targets)
    assert_near(loss, expected, 1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(loss, list(head.parameters())),
        torch.autograd.grad(expected, list(head.parameters())),
        strict=True,
    ):
        assert mine.dtype == torch.float32
        assert_near(mine, theirs, 3e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["llama tied", "gemma2 soft cap", "t5", "gpt2"])
def test_model_equals_itself_on_a_gpu(name: str) -> None:
    compare(
        build(name).to("cuda"), batch_of("cuda", mirrored=True), 1e-5, 1e-4, chunk_rows=7, compile=True
    )
