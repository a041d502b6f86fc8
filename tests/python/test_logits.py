"""Lazy logits in the heads of real models and by themselves, against the same models with plain heads."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutput

from megatrain import logits as lazy
from megatrain.errors import StaleGraphError
from megatrain.logits import (
    HostMirrored,
    LazyLogits,
    LogitsSettings,
    WarnOnFullLogits,
    host_twin,
    lazy_head,
    mirror_labels,
    strip_mirror,
)

VOCABULARY = 61
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64}


def assert_near(actual: Tensor, expected: Tensor, relative: float, floor: float = 0.0) -> None:
    """Every element within `relative` of the largest one, or within `floor`."""
    assert actual.shape == expected.shape
    assert bool(expected.isfinite().all())
    actual, expected = actual.detach().double(), expected.detach().double()
    bound = relative * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=max(bound, floor))


# whole models


def decoder(name: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**DECODER, **changes})
    return getattr(transformers, f"{name}ForCausalLM")(config)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: decoder("Llama"),
    "llama tied": lambda: decoder("Llama", tie_word_embeddings=True),
    "qwen2": lambda: decoder("Qwen2"),
    "mistral": lambda: decoder("Mistral", sliding_window=4),
    "gemma2 soft cap": lambda: decoder("Gemma2", head_dim=8, final_logit_softcapping=2.0),
    "cohere scale": lambda: decoder("Cohere", logit_scale=0.0625, pad_token_id=0),
    "granite divisor": lambda: decoder("Granite", logits_scaling=8.0),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "gptj biased": lambda: transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_inner=48
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
    "bart added bias": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
        )
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(11)
    model = MODELS[name]().to(dtype).eval()  # without dropout
    head = model.get_output_embeddings()  # type: ignore[operator]
    # Logits of some size, else a soft cap does nothing.
    with torch.no_grad():
        head.weight.mul_(8.0)
        if head.bias is not None:
            head.bias.normal_()
    return model


def batch_of(device: str = "cpu", *, mirrored: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCABULARY, (3, 11), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1, 8:] = -100
    on_device = labels.to(device)
    return {
        "input_ids": tokens.to(device),
        "attention_mask": mask.to(device),
        "labels": mirror_labels(on_device, labels) if mirrored else on_device,
    }


def loss_and_gradients(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def compare(
    model: nn.Module, batch: dict[str, Any], loss_tolerance: float, tolerance: float, **options: Any
) -> None:
    plain = {k: strip_mirror(v) if isinstance(v, Tensor) else v for k, v in batch.items()}
    expected_loss, expected = loss_and_gradients(model, plain)
    full: list[str] = []
    with lazy_head(model.get_output_embeddings(), full.append, **options):  # type: ignore[operator]
        loss, gradients = loss_and_gradients(model, batch)
    assert full == []
    assert_near(loss, expected_loss, loss_tolerance)
    assert gradients.keys() == expected.keys()
    # Biases of attention keys have a gradient of exactly zero, up to rounding: softmax does not see them.
    floor = 1e-4 * tolerance * max(float(g.abs().max()) for g in expected.values())
    for name, gradient in gradients.items():
        assert_near(gradient, expected[name], tolerance, floor)


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


# the logits by themselves


class Pair:
    """Lazy logits (2, 6, V) and plain ones of the same leaves."""

    def __init__(self, *, bias: bool = True, on_full: Callable[[str], None] | None = None) -> None:
        generator = torch.Generator().manual_seed(5)
        self.hidden = torch.randn(2, 6, 8, generator=generator, requires_grad=True)
        self.weight = torch.randn(VOCABULARY, 8, generator=generator, requires_grad=True)
        self.bias = torch.randn(VOCABULARY, generator=generator, requires_grad=True) if bias else None
        self.full: list[str] = []
        self.settings = LogitsSettings(on_full or self.full.append, chunk_rows=5)
        self.lazy = LazyLogits(self.hidden, self.weight, self.bias, self.settings)
        self.plain = F.linear(self.hidden, self.weight, self.bias)
        self.leaves = [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def gradients(self, result: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(result, self.leaves, retain_graph=True))


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


# labels known on the host


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
    @pytest.mark.parametrize("name", ["llama tied", "gemma2 soft cap", "t5", "gpt2"])
    def test_model_equals_itself_with_a_plain_head(self, name: str) -> None:
        compare(
            build(name).to("cuda"), batch_of("cuda", mirrored=True), 1e-5, 1e-4, chunk_rows=7, compile=True
        )

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
