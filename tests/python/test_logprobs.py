"""Log-probabilities by chunks equal those of the full logits, forward and backward."""

from __future__ import annotations

from itertools import product
from typing import Any

import families
import pytest
import torch
from case_models import adversarial, stream
from families import FAMILIES, text_batch
from family_zoo import EXACT
from largest_tensor import LargestTensor
from resident import Resident, assert_close
from test_chunked_loss import TRANSFORMS, Case, assert_near, written_out
from torch.nn import functional as F

import megatrain
from megatrain import head_rows
from megatrain.chunked_logprobs import chunked_logprobs

TOLERANCES = {torch.float32: (1e-6, 3e-6), torch.bfloat16: (1e-2, 3e-2)}


def plain(case: Case, name: str) -> torch.Tensor:
    logits = F.linear(case.hidden, case.weight, case.bias)
    for transform in TRANSFORMS[name]:
        logits = written_out(transform, logits)
    return -F.cross_entropy(logits.float(), case.targets, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 10, None])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_equals_plain_torch(dtype: torch.dtype, chunk_rows: int | None, name: str) -> None:
    case = Case(dtype=dtype, bias=True, ignored=[0, 5, 36])
    narrow = max(TOLERANCES[d] for d in (dtype, torch.bfloat16 if "down" in name else dtype))
    found = chunked_logprobs(
        case.hidden, case.weight, case.bias, case.targets, transforms=TRANSFORMS[name], chunk_rows=chunk_rows
    )
    expected = plain(case, name)
    assert_near(found, expected, narrow[0])
    assert found.dtype == torch.float32 and bool((found[[0, 5, 36]] == 0).all())
    factors = torch.linspace(-1.0, 2.0, 37)
    theirs_all = case.gradients((expected * factors).sum())
    for retain in (True, False):  # gradients are made anew by each backward
        mine_all = torch.autograd.grad((found * factors).sum(), case.leaves, retain_graph=retain)
        for mine, theirs, leaf in zip(mine_all, theirs_all, case.leaves, strict=True):
            assert mine.dtype == leaf.dtype
            assert_near(mine, theirs, narrow[1])


@pytest.mark.parametrize("rows", [0, 37])
def test_no_targets(rows: int) -> None:
    case = Case(rows=rows, ignored=slice(None))
    found = chunked_logprobs(case.hidden, case.weight, case.bias, case.targets)
    assert torch.equal(found, torch.zeros(rows))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in case.gradients(found.sum()))


def test_create_graph_is_refused() -> None:
    case = Case()
    found = chunked_logprobs(case.hidden, case.weight, case.bias, case.targets)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(found.sum(), case.leaves, create_graph=True)


def test_never_holds_all_logits() -> None:
    case = Case(rows=1024, width=4, vocabulary=64)
    with LargestTensor() as largest:
        case.gradients(chunked_logprobs(case.hidden, case.weight, case.bias, case.targets, chunk_rows=64).sum())
    assert largest.elements == max(64 * 64, 1024 * 4)


def test_graphs_of_the_elementwise_pass_with_a_factor_for_each_row() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    run = torch.compile(head_rows.loss_and_gradient, dynamic=False, fullgraph=True, backend=backend)
    for rows in (5, 29, 2, 8, 64):
        logits, targets, factors = torch.randn(rows, 29), torch.randint(29, (rows,)), torch.randn(rows, 1)
        for tensor in (logits, targets, factors):
            torch._dynamo.mark_dynamic(tensor, 0)
        losses, gradient = run(logits, targets, factors, TRANSFORMS["soft cap"], True)
        expected = head_rows.loss_and_gradient(logits, targets, factors, TRANSFORMS["soft cap"], True)
        assert_near(losses, expected[0], 1e-6)
        assert_near(gradient, expected[1], 1e-6)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_more_graphs_than_torch_allows_of_one_function() -> None:
    """Of several models in one process, say."""
    torch._dynamo.reset()
    run = head_rows.compiled_loss_and_gradient("eager")
    targets, scale = torch.randint(29, (4,)), torch.ones(4, 1)
    for name, dtype, wanted in product(TRANSFORMS, (torch.float32, torch.bfloat16), (True, False)):
        logits = torch.randn(4, 29).to(dtype)
        losses, _ = run(logits, targets, scale, TRANSFORMS[name], wanted)
        assert_near(losses, head_rows.loss_and_gradient(logits, targets, scale, TRANSFORMS[name], wanted)[0], 1e-6)
    assert 4 * len(TRANSFORMS) > torch._dynamo.config.recompile_limit
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["none", "soft cap", "soft cap, cast"])
def test_compiled_on_the_gpu(dtype: torch.dtype, name: str) -> None:
    case = Case(300, 64, 1000, dtype=dtype, bias=True, ignored=[0, 7, 299], device="cuda")
    found = chunked_logprobs(
        case.hidden, case.weight, case.bias, case.targets, transforms=TRANSFORMS[name], chunk_rows=64, compile=True
    )
    expected = plain(case, name)
    assert_near(found, expected, TOLERANCES[dtype][0])
    factors = torch.linspace(-1.0, 2.0, 300, device="cuda")
    pairs = zip(case.gradients((found * factors).sum()), case.gradients((expected * factors).sum()), strict=True)
    for mine, theirs in pairs:
        assert_near(mine, theirs, TOLERANCES[dtype][1])


# of a model


def resident_logprobs(module: torch.nn.Module, batch: dict[str, Any], temperature: float = 1.0) -> torch.Tensor:
    """By the full logits, at the labels' positions."""
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    shift = 1
    if module.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = module.prepare_decoder_input_ids_from_labels(labels)
        shift = 0
    logits = module(**inputs, use_cache=False).logits[:, : labels.shape[1] - shift].float() / temperature
    kept = labels[:, shift:] != -100
    found = logits.log_softmax(-1).gather(-1, labels[:, shift:].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return F.pad(found * kept, (shift, 0))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name in ("llama", "qwen2", "gpt2", "t5")], ids=lambda f: f.name
)
def test_of_a_model(family: Any, temperature: float) -> None:
    module = families.build(family)
    resident, model = Resident(module, max_grad_norm=None), stream(module)
    batch = family.batch(3)
    expected = resident_logprobs(resident.module, batch, temperature)
    with torch.no_grad():
        assert_close(model.logprobs(batch, temperature=temperature), expected, 2e-6, "without gradients")
    found = model.logprobs(batch, temperature=temperature)
    assert found.shape == batch["labels"].shape and found.dtype == torch.float32
    assert_close(found, expected, 2e-6, "with gradients")
    factors = torch.linspace(-1.0, 2.0, found.numel()).view(found.shape)
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    theirs = dict(resident.module.named_parameters())
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, theirs[name].grad, 5e-6, f"gradient of {name}", floor=1e-9)
    model.close()


def test_soft_caps_and_lazy_logits_need_no_full_logits(recwarn: pytest.WarningsRecorder) -> None:
    gemma = next(row for row in EXACT if row.name == "gemma2")
    module, (batch, *_) = gemma.build(), gemma.batches()
    resident, model = Resident(module, max_grad_norm=None), stream(module)
    assert module.config.final_logit_softcapping
    found = model.logprobs(batch)
    assert_close(found, resident_logprobs(resident.module, batch), 2e-6, "soft-capped")
    assert not [w for w in recwarn if "full logits" in str(w.message)]
    model.close()


def test_mistakes_are_named() -> None:
    model = stream(families.build(FAMILIES[0]), device=adversarial())
    batch = text_batch(1)
    for wrong, message in (
        ({"input_ids": batch["input_ids"]}, 'integer "labels"'),
        (dict(batch, labels=batch["labels"][0]), 'integer "labels"'),
        (dict(batch, labels=torch.cat([batch["labels"]] * 2, 1)), r"labels are \(2, 18\), but the logits have 9"),
    ):
        with pytest.raises(ValueError, match=message):
            model.logprobs(wrong)
    with pytest.raises(ValueError, match=r"temperature is 0\.0"):
        model.logprobs(batch, temperature=0.0)


def test_backward_after_an_update_is_refused() -> None:
    model = stream(families.build(FAMILIES[0]))
    kept = model.logprobs(text_batch(1)).sum()
    model.step(text_batch(2))
    with pytest.raises((RuntimeError, megatrain.StaleGraphError)):
        kept.backward()
