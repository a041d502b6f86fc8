"""A block, its call with given tensors, and the proxy that stands in its place in the module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils import _pytree as pytree

from megatrain.errors import UnsupportedModelError
from megatrain.graph_limit import many_graphs
from megatrain.observed import HookRelays, Observation, call_hooks
from megatrain.written import Arguments, Written, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatrain.placement import Keep
    from megatrain.units import TiledParameter, Unit


@dataclass(frozen=True, eq=False)
class Block:
    """One entry of a stack. `skeleton` is the block itself with its parameters on the meta device: its
    attributes stay its own, its weights come with each call."""

    name: str
    skeleton: nn.Module
    unit: Unit
    parameters: tuple[tuple[str, TiledParameter], ...]
    """(name inside the block, parameter), shared ones of other units included."""
    relays: HookRelays = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "relays", HookRelays(self.skeleton))

    def modules(self) -> list[nn.Module]:
        """The block and all in it, each once. Asked at every call: torch's own walk makes names, which takes long."""
        found = [self.skeleton]
        seen = {self.skeleton}
        for module in found:
            for inner in module._modules.values():
                if inner is not None and inner not in seen:
                    seen.add(inner)
                    found.append(inner)
        return found

    def buffers(self) -> dict[str, torch.Tensor]:
        if not any(module._buffers for module in self.modules()):
            return {}
        return dict(self.skeleton.named_buffers())


class BlockResult(NamedTuple):
    """All that leaves a block in one call."""

    output: Any
    observed: tuple[Observation, ...] = ()
    written: tuple[Written, ...] = ()


def call_with(skeleton: nn.Module, tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The block's own forward with `tensors` in place of its parameters and buffers. This function, not
    the block, is what gets compiled: one graph for each structure."""
    return torch.func.functional_call(skeleton, dict(tensors), args, kwargs, tie_weights=False)


# What is compiled once for each way of keeping activations must differ as code: the compiler finds its
# graphs by that.
def _call_keeping_selected(skeleton: nn.Module, tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    return call_with(skeleton, tensors, args, kwargs)


def _call_keeping_inputs(skeleton: nn.Module, tensors: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    return call_with(skeleton, tensors, args, kwargs)


class BlockCaller:
    """Calls blocks, compiled or eager, and refuses what a recompute could not repeat.

    Compiled, `keep` decides what the graph saves for its backward, which recomputes the rest: the share of
    activation memory that the compiler's partitioner may use."""

    BUDGETS: ClassVar[dict[Keep, float]] = {"everything": 1.0, "selected": 0.5, "inputs": 0.0}

    def __init__(self, compiled: bool) -> None:
        self.compiled = compiled
        self._calls: dict[Keep, Callable[..., Any]] = {}
        if compiled:
            functions: dict[Keep, Callable[..., Any]] = {
                "everything": call_with,
                "selected": _call_keeping_selected,
                "inputs": _call_keeping_inputs,
            }
            # Masks of dropout must be those of eager torch, in the forward and in a recompute.
            options: dict[str, Any] = {"fallback_random": True}
            self._calls = {keep: torch.compile(call, options=options) for keep, call in functions.items()}
            self._limits = many_graphs()
            self._budgets = {
                keep: functorch_config.patch(activation_memory_budget=share) for keep, share in self.BUDGETS.items()
            }

    def _compiled(self, keep: Keep, *arguments: Any) -> Any:
        with self._limits, self._budgets[keep]:
            return self._calls[keep](*arguments)

    def __call__(
        self,
        block: Block,
        weights: Mapping[str, torch.Tensor],
        args: Any,
        kwargs: Any,
        *,
        keep: Keep = "everything",
        hooked: Sequence[nn.Module] = (),
    ) -> BlockResult:
        """Containers in the arguments must be this call's own. `hooked`: sub-modules whose hooks will be called
        with what is observed."""
        arguments = Arguments(args, kwargs)
        with block.relays.instead_of_hooks(hooked) as seen:
            output = self.in_place(block, weights, args, kwargs, keep=keep)
            observed = seen()
        return BlockResult(output, observed, arguments.written(block.name, args, kwargs))

    def in_place(
        self,
        block: Block,
        weights: Mapping[str, torch.Tensor],
        args: Any,
        kwargs: Any,
        *,
        keep: Keep = "everything",
    ) -> Any:
        """As a resident block would be called: hooks run in it, and it writes where it writes."""
        buffers = block.buffers()
        versions = {name: buffer._version for name, buffer in buffers.items()}
        device_type = next(iter(weights.values())).device.type if weights else "cpu"
        with torch.autocast(device_type, enabled=False):
            if self.compiled:
                output = self._compiled(keep, block.skeleton, {**weights, **buffers}, args, kwargs)
            else:
                output = call_with(block.skeleton, {**weights, **buffers}, args, kwargs)
        for name, buffer in buffers.items():
            if buffer._version != versions[name] and block.skeleton.training:
                raise UnsupportedModelError(
                    f"{block.name} writes its buffer {name} in forward, which a recompute would do twice"
                )
        return output


def refuse_opaque(block: Block, leaves: list[Any]) -> None:
    """A cache that a block updates would be updated again by its recompute; a gradient of what an object
    holds where pytree does not look would be lost."""
    for leaf in leaves:
        if leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str):
            continue
        if hasattr(leaf, "update") and hasattr(leaf, "get_seq_length"):
            raise UnsupportedModelError(
                f"{block.name} was given a {type(leaf).__name__} with gradients on; call the model with use_cache=False"
            )
        held = dict(leaf) if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in pytree.tree_leaves(held)):
            raise UnsupportedModelError(
                f"{block.name} was given a {type(leaf).__name__} that holds tensors with gradients; pass them as "
                "tensors, lists, tuples or dicts"
            )


class BlockProxy(nn.Module):
    """Stands where the block stood: calls go to the router, everything else to the block. Its device
    and dtype are those of the computation. It passes for an instance of the block's class, and shows the block's
    children, by which hooks are placed (hidden states, router logits). It has the block's own hooks: outside of
    the block they see tensors with gradients, and see them once; those of sub-modules are called here, too."""

    HOOKS = (
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    )

    def __init__(self, block: Block, router: Any, device: torch.device, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # super() would need the name __class__
        # In __dict__, not registered: the module must not list parameters that live elsewhere.
        self.__dict__["_block"] = block
        self.__dict__["_router"] = router
        self.__dict__["device"] = device
        self.__dict__["dtype"] = dtype
        self.__dict__["training"] = block.skeleton.training
        for hooks in self.HOOKS:
            self.__dict__[hooks] = block.skeleton.__dict__[hooks]
            block.skeleton.__dict__[hooks] = OrderedDict()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.__dict__["_block"].skeleton)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.dtype == torch.float32 and torch.is_autocast_enabled(self.device.type):
            raise UnsupportedModelError(f"{self._block.name} has fp32 weights and is called under torch.autocast")
        result: BlockResult = self._router(self._block, args, kwargs)
        write(self._block.name, result.written, (args, kwargs))
        call_hooks(self._block.name, self._block.skeleton, result.observed)
        return result.output

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self._block.skeleton.named_children()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> BlockProxy:
        return self  # weights and buffers are where they belong

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        if self.__dict__["_router"].blocks_shown:
            return self.__dict__["_block"].skeleton.named_modules(memo, prefix, remove_duplicate)
        return nn.Module.named_modules(self, memo, prefix, remove_duplicate)

    def train(self, mode: bool = True) -> BlockProxy:
        self.__dict__["training"] = mode
        self._block.skeleton.train(mode)
        return self

    def follow_mode(self) -> None:
        """After the block's own mode was set."""
        self.__dict__["training"] = self._block.skeleton.training

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"].skeleton, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "gradient_checkpointing":  # blocks are recomputed by the schedule
            setattr(self.__dict__["_block"].skeleton, name, value)

    def __repr__(self) -> str:
        return f"Streamed({self.__dict__['_block'].skeleton!r})"
