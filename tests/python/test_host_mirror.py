"""Labels that the host knows too, through the operations that losses apply to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_heads import VOCABULARY, Pair, assert_near
from torch import Tensor
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss

from megatrain import logits as lazy
from megatrain.logits import HostMirrored, LazyLogits, host_twin, mirror_labels, strip_mirror


def labels_of(rows: int = 3, columns: int = 7) -> Tensor:
    labels = torch.arange(rows * columns).view(rows, columns)
    labels[0, :3] = -100
    labels[-1, -2:] = -100
    return labels


def assert_mirrored(actual: Any, expected: Tensor) -> None:
    assert isinstance(actual, HostMirrored)
    twin = host_twin(actual)
    assert twin is not None and type(twin) is Tensor
    assert torch.equal(twin, expected) and twin.dtype == expected.dtype
    assert torch.equal(strip_mirror(actual), expected)
    assert type(strip_mirror(actual)) is Tensor


MIRRORED_USES: dict[str, Callable[[Tensor], Tensor]] = {
    "pad": lambda x: F.pad(x, (0, 1), value=-100),
    "slice": lambda x: x[..., 1:],
    "shift": lambda x: F.pad(x, (0, 1), value=-100)[..., 1:].contiguous().view(-1).to("cpu"),
    "reshape": lambda x: x.reshape(-1),
    "transpose": lambda x: x.t(),
    "property": lambda x: x.T,
    "to device": lambda x: x.to(torch.device("cpu"), non_blocking=True),
    "to dtype": lambda x: x.to(torch.int32),
    "cpu": lambda x: x.cpu(),
    "long": lambda x: x.int().long(),
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "compare": lambda x: x == -100,
    "where": lambda x: torch.where(x == -100, 0, x),
    "masked_fill": lambda x: x.masked_fill(x > 9, -100),
    "cat": lambda x: torch.cat([x, x[:1]]),
    "cat with a host tensor": lambda x: torch.cat([x, torch.ones(1, 7, dtype=torch.int64)]),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind()[2],
    "new": lambda x: x.new_full((2, 2), 5, device="cpu"),
    "arithmetic": lambda x: 1 + x * 2,
    "roll": lambda x: x.roll(-1, 1),
    "mask index": lambda x: x[x != -100],
}


@pytest.mark.parametrize("name", MIRRORED_USES)
def test_operations_are_mirrored(name: str) -> None:
    use = MIRRORED_USES[name]
    assert_mirrored(use(mirror_labels(labels_of(), labels_of())), use(labels_of()))


def plus_one(x: Tensor) -> None:
    x += 1


def of_a_view(x: Tensor) -> None:
    x[:, 2:].contiguous()  # a copy
    x[1:].view(-1)[3:5] = -100


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda x: x.__setitem__(x == 9, -100),
    "slice": lambda x: x.__setitem__((slice(None), 0), -100),
    "augmented": plus_one,
    "masked_fill_": lambda x: x.masked_fill_(x == 4, -100),
    "through a view": of_a_view,
    "copy_": lambda x: x.copy_(x.flip(0)),
    "copy_ from a host tensor": lambda x: x[0].copy_(torch.arange(7)),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_edits_reach_the_twin_and_not_the_batch(name: str) -> None:
    on_device, on_host, plain = labels_of(), labels_of(), labels_of()
    mirrored = mirror_labels(on_device, on_host)
    IN_PLACE[name](mirrored)
    IN_PLACE[name](plain)
    assert not torch.equal(plain, labels_of())
    assert_mirrored(mirrored, plain)
    assert torch.equal(on_device, plain)  # the device tensor is shared
    assert torch.equal(on_host, labels_of())


def test_one_tensor_may_be_both() -> None:
    labels = labels_of()
    mirrored = mirror_labels(labels, labels)
    mirrored += 1
    assert_mirrored(mirrored, labels_of() + 1)


def test_where_the_twin_cannot_follow() -> None:
    mirrored = mirror_labels(labels_of(), labels_of())
    assert type(mirrored.float()) is Tensor
    assert type(F.embedding(mirrored.clamp(min=0), torch.zeros(21, 2))) is Tensor
    assert type(torch.randint_like(mirrored, 5)) is Tensor
    assert type(torch.ones(3, 7) * mirrored) is Tensor
    assert mirrored.shape == (3, 7) and mirrored.stride() == (7, 1)


def test_edits_the_twin_did_not_follow_end_it() -> None:
    for edit in (
        lambda device, mirrored: device.fill_(3),
        lambda device, mirrored: mirrored.random_(5),
        lambda device, mirrored: mirrored[1:].random_(5),
        lambda device, mirrored: torch.ones(3, 7, dtype=torch.int64, out=strip_mirror(mirrored)),
    ):
        device = labels_of()
        mirrored = mirror_labels(device, labels_of())
        view = mirrored.view(-1)
        assert host_twin(view) is not None
        edit(device, mirrored)  # type: ignore[no-untyped-call]
        assert host_twin(mirrored) is None and host_twin(view) is None
        assert torch.equal(strip_mirror(mirrored), device)


def test_a_plain_tensor_is_edited_once() -> None:
    plain = torch.zeros(3, 7, dtype=torch.int64)
    plain.add_(mirror_labels(labels_of(), labels_of()))
    assert torch.equal(plain, labels_of()) and type(plain) is Tensor


def test_values_come_from_the_host() -> None:
    device = labels_of()
    mirrored = mirror_labels(device, labels_of())
    device.data.fill_(7)  # not seen by torch, so that the twin's answer can be told from the device's
    assert mirrored[0].tolist() == labels_of()[0].tolist()
    assert int((mirrored[1:] == 9).sum()) == 1
    assert mirrored[1, 1].item() == labels_of()[1, 1].item()


def test_mirrors_that_do_not_fit_are_refused() -> None:
    for device, host, message in (
        (labels_of(), labels_of(3, 6), "differ"),
        (labels_of(), labels_of().int(), "differ"),
        (torch.zeros(3), torch.zeros(3), "integers"),
    ):
        with pytest.raises(ValueError, match=message):
            mirror_labels(device, host)


def test_strides_of_the_device_are_the_twins() -> None:
    mirrored = mirror_labels(labels_of(), labels_of().t().contiguous().t())
    mirrored.view(-1)[4] = 17
    expected = labels_of()
    expected[0, 4] = 17
    assert_mirrored(mirrored, expected)


def test_kept_rows_come_from_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    labels = torch.arange(12).view(2, 6)
    labels[0, :3] = -100
    labels[1, 5] = -100
    seen: list[Tensor | None] = []
    original = lazy.chunked_cross_entropy

    def record(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs["kept_rows"])
        return original(*args, **kwargs)

    monkeypatch.setattr(lazy, "chunked_cross_entropy", record)
    mirrored = mirror_labels(labels.clone(), labels)
    mirrored[mirrored == 8] = -100
    labels[labels == 8] = -100
    loss = ForCausalLMLoss(pair.lazy, mirrored, VOCABULARY)
    expected = ForCausalLMLoss(pair.plain, labels, VOCABULARY)
    assert_near(loss, expected, 1e-6)
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    assert len(seen) == 1 and seen[0] is not None
    assert torch.equal(seen[0], (shifted != -100).nonzero().squeeze(1))
    # Without a twin the loss looks for itself.
    ForCausalLMLoss(pair.lazy, labels, VOCABULARY)
    assert seen[1] is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    def test_labels_and_loss_wait_for_nothing(self) -> None:
        pair = Pair()
        hidden = pair.hidden.detach().cuda().requires_grad_()
        weight = pair.weight.detach().cuda().requires_grad_()
        labels = torch.arange(12).view(2, 6).pin_memory()
        on_device = labels.to("cuda", non_blocking=True)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mirrored = mirror_labels(on_device, labels)
            mirrored[mirrored == 3] = -100
            assert int((mirrored != -100).sum()) == 11
            loss = ForCausalLMLoss(LazyLogits(hidden, weight, None, pair.settings), mirrored, VOCABULARY)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        plain = labels.masked_fill(labels == 3, -100)
        logits = F.linear(pair.hidden, pair.weight)
        assert_near(loss.cpu(), ForCausalLMLoss(logits, plain, VOCABULARY), 1e-5)

    def test_a_mask_known_on_the_device_only_ends_the_twin(self) -> None:
        labels = labels_of()
        mirrored = mirror_labels(labels.cuda(), labels)
        mask = torch.zeros(3, 7, dtype=torch.bool, device="cuda")
        assert type(mirrored.masked_fill(mask, -100)) is Tensor
        assert host_twin(mirrored) is not None
        mirrored[1:].masked_fill_(mask[1:], -100)
        assert host_twin(mirrored) is None

    def test_moves_do_not_alias_the_twin(self) -> None:
        labels = labels_of()
        mirrored = mirror_labels(labels.cuda(), labels)
        moved = mirrored.cpu()
        moved += 1
        assert_mirrored(mirrored.cpu(), labels)
