"""One stay of a block's weights on the device, whose experts arrive when the router has chosen them. The memory of the
others is never read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatrain.experts import leaves_idle_alone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.autograd.graph import GradientEdge

    from megatrain.experts import BlockExperts, Gate
    from megatrain.units import TiledParameter


class ExpertsChoice(NamedTuple):
    """Of one call of a block."""

    parts: frozenset[int] | None
    """Those whose weights were asked for; None for all."""
    used: torch.Tensor | None
    """By part, bool, on the device: it got tokens. None where nobody asks."""


class ExpertsUse:
    """One stay of a block's weights on the device. bring: makes parts arrive, by their numbers; None where all are
    there. counts_on: the device, where it is asked for which experts get tokens."""

    def __init__(
        self,
        experts: BlockExperts,
        bring: Callable[[Sequence[int]], None] | None,
        counts_on: torch.device | None = None,
    ) -> None:
        self._experts = experts
        self._bring = bring
        self._counts_on = counts_on
        self._parts: set[int] = set()
        self._used: torch.Tensor | None = None
        self._rows_given = 0
        self._rows_routed = 0
        self.rows = 0
        """Tokens of all calls so far."""
        self.back = False
        self.for_backward: set[int] = set()
        """Parts that the backward will need."""

    @contextmanager
    def open(self) -> Iterator[None]:
        """Calls of the block come inside of the `with`."""
        try:
            yield
        finally:
            self._listen(False)

    def _listen(self, on: bool) -> None:
        """The experts modules say what was chosen. Where nobody asks they do not, and a compiled block stays in one
        piece."""
        for gate in self._experts.gates:
            gate.listen(self if on else None)

    def _bring_all(self) -> None:
        if self._bring is not None:
            self._bring(range(self._experts.count))
            self._bring = None

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """A call of the block, with these tensors among its arguments."""
        self._parts, self._used, self._rows_routed = set(), None, 0
        wide = next((tensor for tensor in given if tensor.is_floating_point() and tensor.dim() > 1), None)
        self._rows_given = 0 if wide is None else wide.numel() // max(wide.shape[-1], 1)
        replaced = self._experts.replaced()
        if replaced or self._experts.whole_for(self._rows_given):
            self._bring_all()
        if self._counts_on is not None:
            self._used = torch.zeros(self._experts.count, dtype=torch.bool, device=self._counts_on)
            for gate in replaced:
                self._used[gate.first_part : gate.first_part + gate.form.count] = True
        self._listen(self._bring is not None or self._counts_on is not None)

    def choose(self, gate: Gate, index: torch.Tensor) -> None:
        """The router's choice is known: bring it. index: (tokens, top k), numbers of experts; one that no expert
        has is none's."""
        count = gate.form.count
        gate.top_k = index.shape[-1] if index.dim() > 1 else 1
        self._rows_routed = max(self._rows_routed, index.numel() // max(gate.top_k, 1))
        with torch.no_grad():
            used = torch.zeros(count + 1, dtype=torch.bool, device=index.device)
            used[index.detach().reshape(-1).clamp(-1, count)] = True
        if self._used is not None:
            self._used[gate.first_part : gate.first_part + count].logical_or_(used[:count])
        if self._bring is None:
            return
        if leaves_idle_alone(gate.module):
            chosen = [gate.first_part + expert for expert, hit in enumerate(used[:count].tolist()) if hit]
        else:  # it was given another implementation meanwhile
            chosen = list(gate.parts)
        self._parts.update(chosen)
        self._bring(chosen)

    def end(self, *, differentiable: bool) -> ExpertsChoice:
        """Of the call. differentiable: there will be a backward."""
        self.rows += self._rows_routed or self._rows_given
        parts = None if self._bring is None else frozenset(self._parts)
        if differentiable:
            self.for_backward.update(range(self._experts.count) if parts is None else parts)
        return ExpertsChoice(parts, self._used)

    def again(self, choice: ExpertsChoice) -> None:
        """The backward of a call begins: what its forward read is there."""
        self.back = True
        if choice.parts is None or self._experts.replaced():
            self._bring_all()
        elif self._bring is not None:
            self._bring(sorted(choice.parts))
        # A recompute on a GPU may choose otherwise where two experts are as good.
        self._listen(self._bring is not None)


class EnteredWeights(NamedTuple):
    """A block's weights as its forward gets them, and where the gradients of trainable ones are asked for."""

    by_name: dict[str, torch.Tensor]
    edges: list[tuple[TiledParameter, GradientEdge]]


class BlockWeights(dict[str, torch.Tensor]):
    """A block's weights by their names in it, and what is known of its experts'. stay: their memory holds them, and
    nothing else, until they are updated."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], experts: ExpertsUse | None, *, stay: bool) -> None:
        super().__init__(tensors)
        self.experts = experts
        self.stay = stay
        self.entered: EnteredWeights | None = None
        """For the forwards of this stay."""


def experts_in(weights: Mapping[str, torch.Tensor]) -> ExpertsUse | None:
    return weights.experts if isinstance(weights, BlockWeights) else None
