"""Lazy logits by themselves, against plain ones of the same leaves."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lazy_heads import VOCABULARY, Pair, assert_near
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutput

from megatrain.errors import StaleGraphError
from megatrain.logits import LazyLogits, WarnOnFullLogits, lazy_head, mirror_labels


def assert_same_gradients(pair: Pair, actual: Tensor, expected: Tensor) -> None:
    for mine, theirs in zip(pair.gradients(actual), pair.gradients(expected), strict=True):
        assert_near(mine, theirs, 3e-6)


LAZY_USES: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(-1, VOCABULARY),
    "view to a list": lambda x: x.view([12, VOCABULARY]),
    "view to -1 last": lambda x: x.view(12, -1),
    "view to more dimensions": lambda x: x.view(2, 3, 2, VOCABULARY),
    "view by size": lambda x: x.view(-1, x.size(-1)),
    "reshape": lambda x: x.reshape(3, 4, VOCABULARY),
    "reshape by size object": lambda x: x.reshape(x.shape),
    "torch.reshape": lambda x: torch.reshape(x, (-1, VOCABULARY)),
    "flatten": lambda x: x.flatten(0, 1),
    "flatten negative": lambda x: x.flatten(end_dim=-2),
    "torch.flatten": lambda x: torch.flatten(x, 0, 1),
    "contiguous": lambda x: x[:, 1:].contiguous(),
    "clone": lambda x: x.clone(),
    "shift": lambda x: x[..., :-1, :],
    "shift and view": lambda x: x[..., :-1, :].contiguous().view(-1, VOCABULARY),
    "slice": lambda x: x[:, 1:4, :],
    "slice without the last": lambda x: x[:, ::2],
    "slice of all of the last": lambda x: x[:, 1, 0:VOCABULARY],
    "row": lambda x: x[1],
    "last position": lambda x: x[:, -1],
    "dots": lambda x: x[...],
    "dots last": lambda x: x[0, ...],
    "new dimension": lambda x: x[:, None],
    "mask": lambda x: x[torch.arange(12).view(2, 6) % 3 == 0],
    "mask of rows": lambda x: x[torch.tensor([False, True])],
    "indices": lambda x: x[:, torch.tensor([4, 0, 4])],
    "pairs of indices": lambda x: x[torch.tensor([0, 1]), torch.tensor([5, 2])],
    "iteration": lambda x: next(iter(x)),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "to dtype": lambda x: x.to(torch.float64),
    "to device and dtype": lambda x: x.to(device="cpu", dtype=torch.float64, copy=True),
    "to device": lambda x: x.to("cpu"),
    "to another tensor": lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    "product": lambda x: x * 0.3,
    "product from the left": lambda x: 3 * x,
    "product with numpy's scalar": lambda x: np.float64(0.3) * x,
    "in place product": lambda x: imul(x, 0.3),
    "quotient": lambda x: x / 7,
    "torch.div": lambda x: torch.div(x, 7.0),
    "torch.mul": lambda x: torch.mul(x, 7.0),
    "tanh": lambda x: x.tanh(),
    "torch.tanh": lambda x: torch.tanh(x),
    "nn.Tanh": lambda x: nn.Tanh()(x),
    "soft cap": lambda x: torch.tanh(x.float() / 2.0) * 2.0,
    "F.tanh": lambda x: 2.0 * nn.functional.tanh(x / 2.0),
    "added bias": lambda x: x + torch.linspace(0, 1, VOCABULARY),
    "added row": lambda x: x + torch.linspace(-1, 1, VOCABULARY)[None],
}


def imul(x: Any, factor: float) -> Any:
    x *= factor
    return x


@pytest.mark.parametrize("name", LAZY_USES)
@pytest.mark.parametrize("bias", [True, False])
def test_stays_lazy(name: str, bias: bool) -> None:
    pair = Pair(bias=bias)
    use = LAZY_USES[name]
    actual, expected = use(pair.lazy), use(pair.plain.clone())
    assert isinstance(actual, LazyLogits)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual.dim(), actual.ndim, actual.numel()) == (expected.dim(), expected.ndim, expected.numel())
    assert actual.device == expected.device
    assert actual.requires_grad
    assert len(actual) == len(expected)

    targets = torch.arange(expected.numel() // VOCABULARY) % VOCABULARY
    targets[::4] = -100
    mine = F.cross_entropy(actual.reshape(-1, VOCABULARY), targets)
    theirs = F.cross_entropy(expected.reshape(-1, VOCABULARY), targets)
    assert pair.full == []
    if theirs.isfinite():
        assert_near(mine, theirs, 1e-6)
        assert_same_gradients(pair, mine, theirs)
    assert_near(actual.detach(), expected, 1e-6)
    assert pair.full == ["detach"]


def setitem(x: Any) -> Any:
    x[..., 3] = -1.0
    return x[:]


def out_of_place(x: Any) -> Any:
    return x.masked_fill(torch.arange(VOCABULARY) == 4, -5.0)


FULL_USES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "torch.sum": lambda x: torch.sum(x),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "gather": lambda x: x.gather(-1, torch.zeros(2, 6, 1, dtype=torch.int64)),
    "index the last": lambda x: x[..., 3],
    "slice the last": lambda x: x[..., :40],
    "list index": lambda x: x[[0, 1]],
    "new last dimension": lambda x: x[..., None],
    "transpose": lambda x: x.transpose(1, 2),
    "mT": lambda x: x.mT,
    "view across the last": lambda x: x.view(-1),
    "flatten all": lambda x: x.flatten(),
    "flatten the last": lambda x: x.flatten(1),
    "product with a tensor": lambda x: x * torch.full((1,), 2.0),
    "tensor's product": lambda x: torch.full((1,), 2.0) * x,
    "sum of two": lambda x: x + x,
    "difference": lambda x: 1.0 - x,
    "negation": lambda x: -x,
    "power": lambda x: x**2,
    "reciprocal": lambda x: 1.0 / x,
    "matmul": lambda x: x @ torch.ones(VOCABULARY, 2),
    "added matrix": lambda x: x + torch.ones(6, VOCABULARY),
    "cat": lambda x: torch.cat([x, x]),
    "masked_fill": out_of_place,
    "in place": lambda x: x.clone().mul_(2.0),
    "item assignment": lambda x: setitem(x.clone()),
    "rounding division": lambda x: x.div(0.5, rounding_mode="floor") + x,
    "class weights": lambda x: F.cross_entropy(
        x.view(-1, VOCABULARY), torch.arange(12), weight=torch.arange(VOCABULARY) + 1.0
    ),
    "label smoothing": lambda x: F.cross_entropy(
        x.view(-1, VOCABULARY), torch.arange(12), label_smoothing=0.1
    ),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, VOCABULARY), torch.full((12, VOCABULARY), 0.1)),
    "classes in the middle": lambda x: F.cross_entropy(x.transpose(1, 2), torch.arange(12).view(2, 6)),
    "nll_loss": lambda x: F.nll_loss(x.view(-1, VOCABULARY), torch.arange(12)),
    "kl_div": lambda x: F.kl_div(x, torch.full((2, 6, VOCABULARY), 0.1), reduction="sum"),
    "softmax after a soft cap": lambda x: (torch.tanh(x / 3.0) * 3.0).softmax(-1),
}


@pytest.mark.parametrize("name", FULL_USES)
def test_unusual_use_gives_full_logits_and_one_warning(name: str) -> None:
    pair = Pair(on_full=WarnOnFullLogits())
    use = FULL_USES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = use(pair.lazy)
        use(pair.lazy)
        pair.lazy.exp()
    assert len([w for w in caught if "full logits" in str(w.message)]) == 1
    expected = use(pair.plain.clone())
    assert isinstance(actual, Tensor)
    assert_near(actual, expected, 1e-6)
    pick = torch.linspace(1, 2, expected.numel()).view(expected.shape)
    assert_same_gradients(pair, (actual * pick).sum(), (expected * pick).sum())


def test_the_warning_names_the_operation() -> None:
    pair = Pair(on_full=WarnOnFullLogits())
    with pytest.warns(UserWarning, match=r"^log_softmax asked for the full logits"):
        F.log_softmax(pair.lazy, -1)


def test_values_can_be_read() -> None:
    pair = Pair()
    plain = pair.plain.detach()
    assert repr(pair.lazy.detach()) == repr(plain)
    assert f"{pair.lazy.detach()}" == f"{plain}"
    assert np.array_equal(pair.lazy.detach().cpu().numpy(), plain.numpy())
    assert pair.lazy.tolist() == plain.tolist()
    assert "grad_fn" in repr(pair.lazy)
    assert bool((pair.lazy == pair.plain).all())
    assert bool((pair.lazy > 0).equal(pair.plain > 0))
    assert pair.lazy[0, 0, 0].item() == pair.plain[0, 0, 0].item()
    with torch.no_grad():
        quiet = LazyLogits(pair.hidden, pair.weight, pair.bias, pair.settings)
    assert np.array_equal(np.asarray(quiet), plain.numpy())
    assert torch.equal(pickle.loads(pickle.dumps(quiet)), plain)


def test_made_once() -> None:
    pair = Pair()
    pair.lazy.exp()
    pair.lazy.sum()
    torch.softmax(pair.lazy, -1)
    assert pair.full == ["exp"]


def test_probes_compute_nothing() -> None:
    pair = Pair()
    assert hasattr(pair.lazy, "argmax") and callable(pair.lazy.argmax)
    for name in ("keys", "_is_view", "__cuda_array_interface__", "nonsense"):
        assert not hasattr(pair.lazy, name)
    assert CausalLMOutput(logits=pair.lazy)[0] is pair.lazy
    assert pair.lazy.is_floating_point() and not pair.lazy.is_cuda
    assert hash(pair.lazy) == hash(pair.lazy)
    assert pair.full == []


def test_edits_in_place_are_seen_by_the_loss() -> None:
    pair = Pair()
    targets = torch.arange(12)
    with torch.no_grad():
        pair.lazy[..., 5] = 30.0
        pair.plain[..., 5] = 30.0
    loss = F.cross_entropy(pair.lazy.view(-1, VOCABULARY), targets)
    assert_near(loss, F.cross_entropy(pair.plain.view(-1, VOCABULARY), targets), 1e-6)
    assert_near((pair.lazy * 2.0).tanh(), (pair.plain * 2.0).tanh(), 1e-6)


def test_edits_through_a_view_are_refused() -> None:
    pair = Pair()
    view = pair.lazy.view(-1, VOCABULARY)
    with torch.no_grad():
        view[:, 5] = 30.0
    with pytest.raises(RuntimeError, match="through a view"):
        F.cross_entropy(pair.lazy.view(-1, VOCABULARY), torch.arange(12))
    # A copy is no view.
    pair = Pair()
    with torch.no_grad():
        pair.lazy.clone()[..., 5] = 30.0
    F.cross_entropy(pair.lazy.view(-1, VOCABULARY), torch.arange(12))


def test_logits_of_updated_weights_are_refused() -> None:
    pair = Pair()
    read_before = pair.lazy.clone()
    read_before.sum()
    with torch.no_grad():
        pair.weight.add_(1.0)
    assert_near(read_before.detach(), pair.plain, 1e-6)
    for use in (lambda: pair.lazy.sum(), lambda: pair.lazy * 2.0, lambda: pair.lazy.view(-1, VOCABULARY)):
        with pytest.raises(StaleGraphError):
            use()
    with pytest.raises(StaleGraphError):
        F.cross_entropy(pair.lazy[0], torch.arange(6))


def test_weights_changed_behind_torch_are_refused() -> None:
    version = 0
    head = nn.Linear(8, VOCABULARY)
    with lazy_head(head, lambda name: None, weights_version=lambda: version):
        logits = head(torch.zeros(3, 8))
    F.cross_entropy(logits, torch.arange(3))
    version = 1
    with pytest.raises(StaleGraphError):
        F.cross_entropy(logits, torch.arange(3))


def test_grad_mode_is_that_of_the_forward_and_of_each_operation() -> None:
    pair = Pair()
    targets = torch.arange(12)
    with torch.no_grad():
        detached = LazyLogits(pair.hidden, pair.weight, pair.bias, pair.settings)
        halved = pair.lazy / 2.0
        argmax = pair.lazy.argmax(-1)
    assert not detached.requires_grad and not halved.requires_grad
    assert not F.cross_entropy(detached.view(-1, VOCABULARY), targets).requires_grad
    assert not detached.sum().requires_grad
    # Full logits that were first made for a metric under no_grad still train.
    assert argmax.shape == (2, 6)
    assert_same_gradients(pair, pair.lazy.square().sum(), pair.plain.square().sum())


def test_loss_module_and_reductions() -> None:
    pair = Pair()
    targets = torch.arange(12)
    targets[3] = -100
    for options in ({}, {"reduction": "sum"}, {"ignore_index": 4}, {"reduction": "sum", "ignore_index": 4}):
        kept = targets if "ignore_index" not in options else targets.clamp(min=0)
        loss = nn.CrossEntropyLoss(**options)(pair.lazy.view(-1, VOCABULARY), kept)  # type: ignore[arg-type]
        expected = nn.CrossEntropyLoss(**options)(pair.plain.view(-1, VOCABULARY), kept)  # type: ignore[arg-type]
        assert_near(loss, expected, 1e-6)
        assert_same_gradients(pair, loss, expected)
    assert pair.full == []


def test_losses_of_single_tokens() -> None:
    """As policies are trained: each token's loss with a factor of its own, some zero, some of either sign."""
    pair = Pair()
    targets = torch.arange(12)
    targets[3] = -100
    factors = torch.linspace(-1, 2, 12).clamp(max=1.5)
    loss, expected = (
        F.cross_entropy((logits / 0.7).view(-1, VOCABULARY), targets, reduction="none")
        for logits in (pair.lazy, pair.plain)
    )
    assert_near(loss, expected, 1e-6)
    assert loss[3] == 0
    assert_same_gradients(pair, (loss * factors).sum(), (expected * factors).sum())
    assert pair.full == []


def test_all_ignored() -> None:
    pair = Pair()
    targets = torch.full((12,), -100)
    loss = F.cross_entropy(pair.lazy.view(-1, VOCABULARY), targets, reduction="sum")
    assert loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in pair.gradients(loss))
    assert bool(F.cross_entropy(pair.lazy.view(-1, VOCABULARY), targets).isnan())


def test_masked_language_model_loss() -> None:
    pair = Pair()
    labels = torch.arange(12).view(2, 6)
    labels[0, :4] = -100
    loss = ForMaskedLMLoss(pair.lazy, mirror_labels(labels, labels), VOCABULARY)
    expected = ForMaskedLMLoss(pair.plain, labels, VOCABULARY)
    assert_near(loss, expected, 1e-6)
    assert_same_gradients(pair, loss, expected)
    assert pair.full == []
