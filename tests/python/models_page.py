"""docs/models.md, from the tables of the tests and their outcomes: `pytest tests/python/test_family_zoo.py
--models-page docs/models.md` runs every family and writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import family_zoo
import torch
import transformers
from family_zoo import Row

from megatrain.experts import ways_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

NOTES = {
    "big_bird": "with full attention",
    "gpt2-scaled": "attention scaled by the layer's index",
    "t5": "encoder and decoder; the position bias of block 0 goes into the others",
    "bart": "encoder and decoder",
    "whisper": "encoder and decoder",
    "llava": "vision and language; images change the loss, the projector learns",
    "qwen2_5_vl": "vision and language; images change the loss, the projector learns",
    "qwen3_vl": "image features are added between blocks",
    "deepseek_v3": "buffers of router biases",
    "zamba2": "blocks share a module",
    "hrm_text": "blocks are called several times",
    "dory": "blocks are called several times",
    "zaya": "blocks hand on two tensors",
    "gemma3n": "blocks write keys and values into a mapping that later ones read",
    "gemma4": "blocks write keys and values into a mapping that later ones read",
    "dit": "diffusion transformer of the tests' own (`tests/python/dit.py`): joint and single blocks, long skips, a "
    "condition with a gradient",
}
"""What is special, by row."""


@dataclass(frozen=True)
class Refusal:
    what: str
    why: str
    test: str
    """Where it is tested: file and function."""


REFUSALS = [
    Refusal(
        "no `ModuleList` of at least two blocks",
        "there is nothing to stream",
        "test_cases_refused.py::test_nothing_to_stream_is_refused",
    ),
    Refusal(
        "recurrent modules of torch (`LSTM`, `GRU`)",
        "they hold their parameters past torch's registry as well",
        "test_cases_refused.py::test_recurrent_modules_are_refused_by_name",
    ),
    Refusal(
        "parameters that overlap in memory",
        "in tiles they would part",
        "test_robustness.py::test_parameters_in_shared_memory_are_refused",
    ),
    Refusal(
        "blocks that write a buffer in training (statistics of batch norms)",
        "a recompute would write it twice",
        "test_cases_refused.py::test_buffers_written_in_forward_are_refused_by_name",
    ),
    Refusal(
        "gradients of tensors that a block keeps as an attribute",
        "the graph behind them ends with the block's forward; what blocks return, what hooks see and what blocks write "
        "into dicts, lists and UserDicts is exact",
        "test_leaving.py::test_gradients_of_tensors_that_leave_as_attributes_are_refused",
    ),
    Refusal(
        "hooks inside of blocks that change what is computed",
        "they are called when the block has been computed",
        "test_leaving.py::test_hooks_that_change_the_computation_are_refused",
    ),
    Refusal(
        "blocks that write into other objects, or into one that they were given twice",
        "what is written could not be handed on",
        "test_leaving.py::test_containers_that_cannot_be_written_from_outside_are_refused",
    ),
    Refusal(
        "forwards that keep tensors in the module for their end",
        "micro-batches run side by side and would find each other's; exact with "
        '`Placement(order="micro-batch-major")`',
        "test_leaving.py::test_what_forwards_leave_in_the_module_is_refused_where_they_run_side_by_side",
    ),
    Refusal(
        "caches in training (`use_cache=True`, and XLM, which makes one in every forward)",
        "a recompute would add to them again",
        "test_cases_refused.py::test_caches_in_training_are_refused_by_name",
    ),
    Refusal(
        "blocks that draw from Python's or numpy's random generator, as BigBird's do with block-sparse attention",
        "a recompute would draw other numbers; torch's are repeated",
        "test_cases_refused.py::test_blocks_that_draw_from_other_generators_are_refused_by_name",
    ),
    Refusal(
        "fp32 weights under `torch.autocast`",
        "the casts would outlive the weights' place in device memory",
        "test_robustness.py::test_autocast_around_blocks_is_refused_in_fp32",
    ),
    Refusal(
        "`create_graph=True`",
        "gradients are taken block by block",
        "test_cases_refused.py::test_create_graph_is_refused",
    ),
]
"""Whatever the family: UnsupportedModelError says so, with the module's name."""

HEAD = """# Models

Each family below is trained at a small size with random weights in fp32, on a host backend that delays copies and
overwrites what is not in use, and compared with the same module in plain PyTorch: loss and every gradient of two
micro-batches of unequal length with left padding, and what five steps of AdamW with clipping make of the weights,
through `step()` and through plain `backward()`. "Exact" is a loss within 1e-6 and gradients within 3e-6 of each
tensor's largest element, which is the rounding of fp32, and movements of weights within 3e-3 of each tensor's largest:
of small gradients, whose steps AdamW makes as large as those of others, rounding is a larger share. A model that is not
here is held against a resident run of its first blocks before its first update, and refused where they differ.

This page is written by the tests: `pytest tests/python/test_family_zoo.py --models-page docs/models.md`.
"""


KINKED = (
    f"Weights of {', '.join(sorted(family_zoo.KINKED))} are held within 5e-2: some tokens come so near to the kink of "
    "its activation that plain PyTorch in fp32 and in fp64 is 2.9e-2 apart."
)


EXPERTS = """## Experts

Blocks of these families can go up without the experts that get no tokens ([design.md](design.md) says when they do),
and `skip_idle_experts=True` is for them. With three tokens, so that some of four experts are idle and not a number on
the device:"""


def experts(outcome: Callable[[str, Row], str]) -> str:
    """The section that says whose experts go up by the router's choice, and whose not and why: from the modules."""
    by_choice: dict[str, list[str]] = {}
    whole: dict[str, list[str]] = {}
    for row in (*family_zoo.EXACT, *family_zoo.MORE):
        if not row.exists or row.name.endswith("-router"):
            continue
        with torch.device("meta"):
            ways = ways_of(row.make())
        if "by choice" in ways:
            by_choice.setdefault(outcome("by_choice", row), []).append(row.name)
        elif ways:
            whole.setdefault(ways[0], []).append(row.name)
    lines = [EXPERTS, "", *(f"- {word}: {', '.join(names)}" for word, names in by_choice.items())]
    lines += ["", "Blocks of these go up whole:", ""]
    return "\n".join(lines + [f"- {', '.join(names)}: {why}" for why, names in whole.items()])


def page(outcome: Callable[[str, Row], str], versions: str, experts: str) -> str:
    """`outcome` of a test of a row; "exact" where it has passed."""
    lines = [HEAD, versions, "", "| family | `step()` | `backward()` | |", "|---|---|---|---|"]
    for row in family_zoo.EXACT:
        note = NOTES.get(row.name, "router logits and their auxiliary loss" if row.name.endswith("-router") else "")
        lines.append(f"| {row.name} | {outcome('step', row)} | {outcome('backward', row)} | {note} |")
    lines += ["", "PEFT's LoRA and DoRA on llama are exact too.", ""]
    found: dict[str, list[str]] = {}
    for row in family_zoo.MORE:
        found.setdefault(outcome("further", row), []).append(row.name)
    lines += ["The same, run when this page is written, for the causal models of these configurations:", ""]
    lines += [f"- {word}: {', '.join(names)}" for word, names in found.items()]
    lines += ["", KINKED]
    lines += ["", experts, "", "## Refused by name", ""]
    lines += ["| what | why |", "|---|---|"]
    lines += [f"| {refusal.what} | {refusal.why} |" for refusal in REFUSALS]
    return "\n".join(lines) + "\n"


def versions_now() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}."


class PageWriter:
    """A plugin of pytest: notes the families' outcomes and writes the page at the end."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._outcomes: dict[tuple[str, str, str], str] = {}

    def pytest_runtest_logreport(self, report: object) -> None:
        function, _, parameters = report.nodeid.rpartition("::")[2].partition("[")  # type: ignore[attr-defined]
        name, _, way = parameters.removesuffix("]").rpartition("-")
        key = (function, name, way)
        if self._outcomes.get(key, "passed") == "passed":  # the call's, unless set-up or tear-down is worse
            self._outcomes[key] = report.outcome  # type: ignore[attr-defined]

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(page(self._of, versions_now(), experts(self._of)), encoding="utf-8")

    def _of(self, test: str, row: Row) -> str:
        if test == "by_choice":
            keys = [("test_experts_by_choice", "", row.name)]
        elif test == "further":
            keys = [("test_further_families", "", row.name)]
        else:
            keys = [("test_exact", row.name, test)]
        found = {self._outcomes.get(key, "not run") for key in keys}
        return "exact" if found == {"passed"} else ", ".join(sorted(found - {"passed"}))
