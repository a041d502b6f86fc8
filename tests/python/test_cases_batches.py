"""Inputs that broke systems of this kind: micro-batches, their weights, masks and packed documents."""

from __future__ import annotations

import families
import pytest
import torch
from case_models import LLAMA, assert_same_parameters, reference, stream
from families import text_batch
from resident import assert_close

from megatrain.surroundings import PINNED_BYTES, worth_pinning

# 10, 12, 33: weights of micro-batches


def test_four_micro_batches_equal_one_batch() -> None:
    whole = text_batch(1, rows=8, length=12, left_padding=0)
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in range(0, 8, 2)]
    one, four = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    first, second = one.step(whole), four.step(parts)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-6)
    for (name, a), (_, b) in zip(one.named_parameters(), four.named_parameters(), strict=True):
        assert_close(b.grad, a.grad, 3e-6, name)


def test_micro_batches_weigh_by_their_targets() -> None:
    few, many = text_batch(1, rows=1, length=60, left_padding=0), text_batch(2, rows=9, length=60, left_padding=0)
    few["labels"][:, :-3] = -100
    few["labels"][:, -3:] = few["input_ids"][:, -3:]
    both = {k: torch.cat([few[k], many[k]]) for k in few}
    apart, together = stream(families.build(LLAMA)), stream(families.build(LLAMA))
    first, second = apart.step([few, many]), together.step(both)
    assert first.targets == second.targets > 400
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    for (name, a), (_, b) in zip(apart.named_parameters(), together.named_parameters(), strict=True):
        assert_close(a.grad, b.grad, 3e-6, name)


def test_no_targets_updates_nothing() -> None:
    model = stream(families.build(LLAMA))
    before = {name: values.clone() for name, values in model.state_dict().items()}
    batch = text_batch(1)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    report = model.step([batch, batch])
    assert report.loss == 0.0 and report.skipped
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]), name
    assert model.evaluate(batch).loss == 0.0
    mixed = model.step([batch, text_batch(2)])
    alone = stream(families.build(LLAMA)).step([text_batch(2)])
    assert mixed.loss == pytest.approx(alone.loss, rel=1e-6)


def test_no_targets_in_a_plain_backward() -> None:
    """As plain PyTorch has it: no loss, gradients of zero, and weights that decay."""
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    batch = text_batch(1)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for owner in (resident.module, model):
        loss = owner(**batch).loss
        assert not torch.isfinite(loss)
        loss.backward()
    resident.optimizer.step()
    model.optimizer.step()
    assert model.last_grad_norm == 0.0
    assert_same_parameters(model, resident, 1e-7)


# 44: masks


def test_two_packed_documents_in_one_row() -> None:
    module = families.build(LLAMA)
    resident, model = reference(module), stream(module)
    batch = text_batch(1, rows=1, length=12, left_padding=0)
    del batch["attention_mask"]
    batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)])[None]
    loss, _, gradients = resident.step([batch])
    plain = {k: v for k, v in batch.items() if k != "position_ids"}
    assert model.evaluate(plain).loss != pytest.approx(loss, rel=1e-4)
    assert model.step(batch).loss == pytest.approx(loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[name], 3e-6, name)


@pytest.mark.parametrize(
    ("value", "pinned"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(3, 2).t(), True),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
        (torch.arange(3).expand(2, 3), False),
        (torch.zeros(2, 3)[:, :2], False),
        (torch.zeros(2, 2).to_sparse(), False),
        (torch.zeros(PINNED_BYTES // 4 + 1), False),
        (torch.zeros(2, device="meta"), False),
    ],
)
def test_inputs_are_pinned_where_that_can_be_done(value: torch.Tensor, pinned: bool) -> None:
    assert worth_pinning(value) is pinned
