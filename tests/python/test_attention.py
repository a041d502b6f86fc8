"""Which kernels attention may run on: cuDNN's first, but not where rows may be masked wholly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import families
import pytest
import torch
from families import FAMILIES, text_batch

import megatrain
from megatrain.attention import masks_tokens


@pytest.mark.parametrize(
    ("batch", "masked"),
    [
        (dict(input_ids=torch.zeros(1, 3, dtype=torch.long)), False),
        (dict(attention_mask=torch.ones(2, 3, dtype=torch.long)), False),
        (dict(attention_mask=None), False),
        (dict(attention_mask=torch.tensor([[0, 1, 1]])), True),
        (dict(attention_mask=torch.tensor([[True, False]])), True),
        (dict(attention_mask=torch.zeros(1, 1, 3, 3)), True),
        (dict(decoder_attention_mask=torch.tensor([[1, 0]]), attention_mask=torch.tensor([[1, 1]])), True),
        (dict(attention_mask=torch.ones(1, 3, device="meta")), True),
    ],
)
def test_masks_tokens(batch: dict[str, Any], masked: bool) -> None:
    assert masks_tokens(batch) is masked


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("way", ["step", "evaluate", "backward", "by position"])
def test_the_choice_is_left_to_torch_where_tokens_are_masked(
    way: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def choice(device: torch.device, *, masked: bool = False) -> AbstractContextManager[None]:
        asked.append(masked)
        return nullcontext()

    for place in ("surroundings", "autograd"):
        monkeypatch.setattr(f"megatrain.{place}.preferred_attention", choice)
    module = families.build(FAMILIES[0])
    model = megatrain.StreamedModel(module, device="cpu", compile=False, self_check=False)
    padded = text_batch(1, length=12, left_padding=padding)
    masked = padding > 0
    if way == "step":
        model.step([text_batch(2, left_padding=0), padded])
        assert asked == [masked]
    elif way == "evaluate":
        model.evaluate([padded])
        assert asked == [masked]
    elif way == "by position":
        with torch.no_grad():
            model(padded["input_ids"], padded["attention_mask"])
        assert asked == [True]
    else:
        loss = model(**padded).loss
        with torch.no_grad():
            model(**text_batch(2, left_padding=0))
        loss.backward()
        # A forward, another one, and the recompute of each block of the first.
        assert asked == [masked, False] + [masked] * 4
    model.close()


@pytest.mark.parametrize("padding", [0, 5])
def test_the_self_check_recomputes_with_the_kernels_of_its_forward(
    padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def choice(device: torch.device, *, masked: bool = False) -> AbstractContextManager[None]:
        asked.append(masked)
        return nullcontext()

    monkeypatch.setattr("megatrain.autograd.preferred_attention", choice)
    model = megatrain.StreamedModel(families.build(FAMILIES[0]), device="cpu", compile=False)
    model.step(text_batch(1, length=12, left_padding=padding))
    model.close()
    assert asked and set(asked) == {padding > 0}
