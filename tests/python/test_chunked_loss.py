"""The chunked output embedding and cross-entropy against plain torch on the full logits, elementwise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from largest_tensor import LargestTensor
from torch import Tensor
from torch.nn import functional as F

from megatrain import head_gradients, head_rows
from megatrain.chunked_loss import chunked_cross_entropy
from megatrain.head_rows import default_chunk_rows
from megatrain.logit_transforms import Cast, Divide, Scale, Tanh, Transform

SOFT_CAP = (Divide(3.0), Tanh(), Scale(3.0))
TOLERANCES = {torch.float32: (1e-6, 3e-6), torch.bfloat16: (1e-2, 3e-2), torch.float64: (1e-13, 1e-13)}
TRANSFORMS: dict[str, tuple[Transform, ...]] = {
    "none": (),
    "soft cap": SOFT_CAP,
    "scale": (Scale(0.25),),
    "soft cap, cast": (*SOFT_CAP, Cast(torch.float32)),
    "cast, soft cap": (Cast(torch.float32), *SOFT_CAP),
    "cast down and up": (Scale(1.5), Cast(torch.bfloat16), Tanh(), Cast(torch.float32), Scale(2.0)),
}


def assert_near(actual: Tensor | None, expected: Tensor | None, relative: float) -> None:
    """Every element within `relative` of the largest one."""
    assert actual is not None and expected is not None
    assert actual.shape == expected.shape
    assert bool(expected.isfinite().all())
    actual, expected = actual.detach().double(), expected.detach().double()
    bound = relative * float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)


class Case:
    """Inputs, as leaves that require gradients, and the loss that plain torch takes of them."""

    def __init__(
        self,
        rows: int = 37,
        width: int = 16,
        vocabulary: int = 29,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        ignored: object = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def leaf(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

        self.hidden, self.weight = leaf(rows, width), leaf(vocabulary, width)
        self.bias = leaf(vocabulary) if bias else None
        self.targets = torch.randint(vocabulary, (rows,), generator=generator)
        if ignored is not None:
            self.targets[ignored] = -100  # type: ignore[index]
        self.kept_rows = (self.targets != -100).nonzero().squeeze(1)
        self.targets = self.targets.to(device)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.hidden, self.weight, self.bias) if x is not None]

    def plain(self, transforms: tuple[Transform, ...] = (), reduction: str = "mean") -> Tensor:
        logits = F.linear(self.hidden, self.weight, self.bias)
        for transform in transforms:
            logits = written_out(transform, logits)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), self.targets, reduction=reduction)

    def chunked(self, **options: object) -> Tensor:
        return chunked_cross_entropy(self.hidden, self.weight, self.bias, self.targets, **options)  # type: ignore[arg-type]

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, self.leaves))


def written_out(transform: Transform, x: Tensor) -> Tensor:
    match transform:
        case Scale(factor):
            return x * factor
        case Divide(divisor):
            return x / divisor
        case Tanh():
            return torch.tanh(x)
        case Cast(dtype):
            return x.to(dtype)


def check(
    case: Case, transforms: tuple[Transform, ...] = (), reduction: str = "mean", **options: object
) -> None:
    casts = [t.dtype for t in transforms if isinstance(t, Cast)]
    loss_tolerance, tolerance = max(TOLERANCES[dtype] for dtype in [case.hidden.dtype, *casts])
    expected = case.plain(transforms, reduction)
    actual = case.chunked(transforms=transforms, reduction=reduction, **options)
    assert actual.dtype == torch.promote_types(case.hidden.dtype, torch.float32)
    assert actual.ndim == 0
    assert_near(actual, expected, loss_tolerance)
    # A factor that is not 1 and has no short binary form, as in loss / num_items.
    for mine, theirs, leaf in zip(
        case.gradients(actual * 0.7), case.gradients(expected * 0.7), case.leaves, strict=True
    ):
        assert mine.dtype == leaf.dtype
        assert_near(mine, theirs, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_rows", [1, 36, 37, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_plain_torch(dtype: torch.dtype, chunk_rows: int | None, reduction: str) -> None:
    case = Case(dtype=dtype, bias=True, ignored=[0, 5, 36])
    check(case, reduction=reduction, chunk_rows=chunk_rows, kept_rows=case.kept_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("bias", [False, True])
def test_transforms(dtype: torch.dtype, name: str, bias: bool) -> None:
    check(Case(dtype=dtype, bias=bias, ignored=[3]), TRANSFORMS[name], chunk_rows=10)


@pytest.mark.parametrize(
    "ignored",
    [(slice(0, 9),), (slice(28, 37),), (slice(0, 37, 2),), slice(0, 36)],
    ids=["left", "right", "every other", "all but one"],
)
@pytest.mark.parametrize("on_host", [True, False])
def test_ignored_rows_get_no_gradient(ignored: object, on_host: bool) -> None:
    case = Case(ignored=ignored)
    kept_rows = case.kept_rows if on_host else None
    check(case, chunk_rows=8, kept_rows=kept_rows)
    d_hidden = case.gradients(case.chunked(chunk_rows=8, kept_rows=kept_rows))[0]
    assert torch.equal(d_hidden[case.targets == -100], torch.zeros_like(d_hidden[case.targets == -100]))
    assert bool((d_hidden[case.targets != -100] != 0).any(1).all())


def test_kept_rows_are_believed() -> None:
    # The caller's list decides, so that nothing has to look at the targets.
    case = Case()
    kept = torch.tensor([2, 3, 30])
    other = Case()
    other.targets = torch.full_like(case.targets, -100)
    other.targets[kept] = case.targets[kept]
    assert_near(case.chunked(kept_rows=kept), other.plain(), 1e-6)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("rows", [0, 5])
def test_no_targets(on_host: bool, rows: int) -> None:
    case = Case(rows, bias=True, ignored=slice(None))
    kept_rows = case.kept_rows if on_host else None
    loss = case.chunked(reduction="sum", kept_rows=kept_rows)
    assert loss.item() == 0.0
    for gradient, leaf in zip(case.gradients(loss), case.leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))
    mean = case.chunked(reduction="mean", kept_rows=kept_rows)
    assert bool(mean.isnan())


def test_another_ignore_index() -> None:
    case = Case()
    case.targets[4:9] = 7
    loss = case.chunked(ignore_index=7)
    expected = F.cross_entropy(F.linear(case.hidden, case.weight), case.targets, ignore_index=7)
    assert_near(loss, expected, 1e-6)
    for mine, theirs in zip(case.gradients(loss), case.gradients(expected), strict=True):
        assert_near(mine, theirs, 3e-6)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    width=st.integers(1, 9),
    vocabulary=st.integers(1, 40),
    chunk_rows=st.integers(1, 80),
    transforms=st.sampled_from(list(TRANSFORMS.values())[:5]),
    reduction=st.sampled_from(["mean", "sum"]),
    data=st.data(),
)
def test_sizes(
    rows: int,
    width: int,
    vocabulary: int,
    chunk_rows: int,
    transforms: tuple[Transform, ...],
    reduction: str,
    data: st.DataObject,
) -> None:
    ignored = data.draw(st.lists(st.integers(0, rows - 1), max_size=rows - 1, unique=True))
    case = Case(rows, width, vocabulary, dtype=torch.float64, ignored=ignored, seed=rows)
    if transforms and any(isinstance(t, Cast) for t in transforms):
        transforms = tuple(Cast(torch.float64) if isinstance(t, Cast) else t for t in transforms)
    expected = case.plain(transforms, reduction)
    actual = case.chunked(transforms=transforms, reduction=reduction, chunk_rows=chunk_rows)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(case.gradients(actual), case.gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_tied_weight() -> None:
    case = Case()
    tokens = torch.arange(37) % 29

    def loss(head: object) -> Tensor:
        hidden = torch.tanh(F.embedding(tokens, case.weight) @ torch.eye(16) + case.hidden)
        return head(hidden)  # type: ignore[operator, no-any-return]

    actual = loss(lambda h: chunked_cross_entropy(h, case.weight, None, case.targets, chunk_rows=9))
    expected = loss(lambda h: F.cross_entropy(F.linear(h, case.weight), case.targets))
    assert_near(actual, expected, 1e-6)
    for mine, theirs in zip(case.gradients(actual), case.gradients(expected), strict=True):
        assert_near(mine, theirs, 3e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_inputs_cost_nothing(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(bias=True)
    getattr(case, frozen).requires_grad_(False)
    made: list[str] = []
    for part in ("_HiddenGradient", "_WeightGradient"):
        original = getattr(head_gradients, part)

        def record(*args: object, part: str = part, original: type = original) -> object:
            made.append(part)
            return original(*args)

        monkeypatch.setattr(head_gradients, part, record)
    actual, expected = case.chunked(chunk_rows=10), case.plain()
    trained = [leaf for leaf in case.leaves if leaf.requires_grad]
    for mine, theirs in zip(
        torch.autograd.grad(actual, trained), torch.autograd.grad(expected, trained), strict=True
    ):
        assert_near(mine, theirs, 3e-6)
    assert made == [p for p in ("_HiddenGradient", "_WeightGradient") if frozen not in p.lower()]


def test_no_grad_takes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    expected = case.plain()
    monkeypatch.setattr(head_gradients, "_WeightGradient", None)
    monkeypatch.setattr(head_gradients, "_HiddenGradient", None)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = case.chunked(chunk_rows=10)
        assert not loss.requires_grad
        assert_near(loss, expected, 1e-6)


def test_backward_twice_gives_the_same() -> None:
    case = Case()
    loss = case.chunked(chunk_rows=10)
    first = torch.autograd.grad(loss, case.leaves, retain_graph=True)
    second = torch.autograd.grad(3 * loss, case.leaves)
    for once, thrice in zip(first, second, strict=True):
        assert_near(thrice, 3 * once, 1e-6)


def test_create_graph_is_refused() -> None:
    case = Case()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(case.chunked(), case.leaves, create_graph=True)


def test_never_holds_all_logits() -> None:
    case = Case(rows=1024, width=4, vocabulary=64)
    with LargestTensor() as largest:
        case.gradients(case.chunked(chunk_rows=64))
    assert largest.elements == max(64 * 64, 1024 * 4)


def test_chunks_are_even() -> None:
    assert head_rows.even_chunk(0, 2048) <= 2048
    assert head_rows.even_chunk(2100, 2048) == 1088
    assert head_rows.even_chunk(16368, 2048) == 2048
    assert head_rows.even_chunk(5, 1) == 1


def test_default_chunk_rows() -> None:
    assert default_chunk_rows(152064, torch.device("cuda")) == 2048
    assert default_chunk_rows(152064, torch.device("cpu")) == 128
    assert default_chunk_rows(1 << 40, torch.device("cpu")) == 1


def test_autocast_outside_changes_nothing() -> None:
    case = Case()
    expected = case.gradients(case.chunked(chunk_rows=10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = case.gradients(case.chunked(chunk_rows=10))
    for mine, theirs in zip(actual, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_strided_inputs() -> None:
    case = Case()
    wide = torch.randn(37, 32)
    hidden = wide[:, ::2].requires_grad_()
    weight = case.weight.detach().t().contiguous().t().requires_grad_()
    actual = torch.autograd.grad(
        chunked_cross_entropy(hidden, weight, None, case.targets, chunk_rows=10), (hidden, weight)
    )
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), case.targets), (hidden, weight))
    for mine, theirs in zip(actual, expected, strict=True):
        assert_near(mine, theirs, 3e-6)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reduction": "none"}, "reduction"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"hidden": torch.zeros(37, 15)}, r"\(N, D\)"),
        ({"hidden": torch.zeros(37, 16, dtype=torch.bfloat16)}, "bfloat16"),
        ({"targets": torch.zeros(36, dtype=torch.int64)}, "targets"),
        ({"targets": torch.zeros(37)}, "float32"),
        ({"bias": torch.zeros(28)}, "bias"),
        ({"kept_rows": torch.zeros(3)}, "kept_rows"),
        ({"kept_rows": torch.tensor([3, 37])}, r"\[0, 37\)"),
        ({"kept_rows": torch.tensor([3, 2])}, "ascend"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], message: str) -> None:
    case = Case()
    call = {"hidden": case.hidden, "weight": case.weight, "bias": None, "targets": case.targets, **change}
    with pytest.raises(ValueError, match=message):
        chunked_cross_entropy(**call)  # type: ignore[arg-type]


def test_target_outside_the_vocabulary_raises() -> None:
    case = Case()
    case.targets[3] = 29
    with pytest.raises((RuntimeError, IndexError)):
        case.chunked()


def test_graphs_of_the_elementwise_pass() -> None:
    """The compiled pass: one graph for training and one for evaluation, whatever the number of rows."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    run = torch.compile(head_rows.loss_and_gradient, dynamic=False, fullgraph=True, backend=backend)
    for want_gradient in (True, False):
        for rows in (5, 29, 2, 8, 64):
            logits, targets = torch.randn(rows, 29), torch.randint(29, (rows,))
            scale = torch.tensor(1.0 / rows)
            torch._dynamo.mark_dynamic(logits, 0)
            torch._dynamo.mark_dynamic(targets, 0)
            losses, gradient = run(logits, targets, scale, SOFT_CAP, want_gradient)
            expected = head_rows.loss_and_gradient(logits, targets, scale, SOFT_CAP, want_gradient)
            assert_near(losses, expected[0], 1e-6)
            if want_gradient:
                assert_near(gradient, expected[1], 1e-6)
            else:
                assert gradient is None
    assert len(graphs) == 2
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("compile", [False, True])
    @pytest.mark.parametrize("name", ["none", "soft cap", "soft cap, cast"])
    def test_equals_plain_torch(self, dtype: torch.dtype, compile: bool, name: str) -> None:
        case = Case(300, 64, 1000, dtype=dtype, bias=True, ignored=[0, 7, 299], device="cuda")
        check(case, TRANSFORMS[name], chunk_rows=64, kept_rows=case.kept_rows, compile=compile)

    def test_compiled_graphs_serve_any_rows(self) -> None:
        torch._dynamo.reset()
        head_rows.compiled_loss_and_gradient.cache_clear()
        with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
            for rows in (2, 3, 64, 65, 129, 500):
                case = Case(rows, 64, 1000, dtype=torch.bfloat16, device="cuda")
                check(case, SOFT_CAP, chunk_rows=64, compile=True)
                with torch.no_grad():
                    assert_near(case.chunked(compile=True), case.plain(), 1e-2)

    def test_weight_gradient_is_summed_in_fp32(self) -> None:
        assert head_gradients.fp32_output_products(torch.device("cuda", 0), torch.bfloat16)
        # Chunks of one row: rounded to bf16 in between, 4,096 equal summands would stick at 256 of them.
        rows = 4096
        hidden = torch.ones(rows, 16, dtype=torch.bfloat16, device="cuda")
        weight = torch.zeros(2, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
        loss = chunked_cross_entropy(hidden, weight, None, targets, reduction="sum", chunk_rows=1)
        (gradient,) = torch.autograd.grad(loss, weight)
        expected = torch.tensor([[-2048.0], [2048.0]], device="cuda").expand(2, 16)
        assert torch.equal(gradient.float(), expected)

    def test_waits_for_nothing(self) -> None:
        case = Case(300, 64, 1000, dtype=torch.bfloat16, ignored=[0, 7], device="cuda")
        case.gradients(case.chunked(kept_rows=case.kept_rows, chunk_rows=64))  # the one trial of the products
        torch.cuda.set_sync_debug_mode("error")
        try:
            case.gradients(case.chunked(kept_rows=case.kept_rows, chunk_rows=64))
        finally:
            torch.cuda.set_sync_debug_mode("default")
