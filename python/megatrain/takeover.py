"""The module taken apart: its weights moved into tiles, its blocks replaced by proxies.

What stays in the module are its own code, its buffers (on the compute device) and, outside the stacks,
parameters whose memory is on the device and filled when they are touched."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatrain.blocks import Block, BlockProxy
from megatrain.device_weights import FetchedOnAccess
from megatrain.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from megatrain.device_weights import DeviceWeights
    from megatrain.stacks import Stack
    from megatrain.units import TiledParameter, UnitPlan


class Router:
    """Decides who runs a block's call: the forward that is parked in this thread, or the default."""

    def __init__(self) -> None:
        self.default: Callable[[Block, tuple[Any, ...], dict[str, Any]], Any] | None = None
        self.override: Mapping[TiledParameter, torch.Tensor] | None = None
        """Weights to use outside the stacks in place of the tiles' (the self-check)."""
        self.blocks_shown = False
        """Whoever walks the module finds what is inside the blocks, too."""
        self._local = threading.local()

    def __call__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = getattr(self._local, "handler", None) or self.default
        assert handler is not None
        return handler(block, args, kwargs)

    @property
    def handled_here(self) -> bool:
        """This thread's calls have a handler of their own."""
        return getattr(self._local, "handler", None) is not None

    def handle_here(self, handler: Callable[[Block, tuple[Any, ...], dict[str, Any]], Any] | None) -> None:
        """Calls in this thread go to `handler` from now on, or (None) to the default again."""
        self._local.handler = handler


def check_registry(module: nn.Module) -> None:
    """Refuse modules that hold parameters where torch's registry does not show them."""
    for name, owner in module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in ("_parameters", "_modules"):
                continue
            held = value if isinstance(value, list | tuple) else [value]
            if any(isinstance(entry, nn.Parameter) for entry in held):
                raise UnsupportedModelError(
                    f"{name or 'the module'} ({type(owner).__name__}) keeps parameters in its attribute "
                    f"{attribute}, past torch's registry; such modules cannot be streamed"
                )


def check_overlaps(module: nn.Module) -> None:
    """Refuse parameters that are views of one another's memory: in tiles they would part."""
    by_storage: dict[int, list[tuple[int, int, str]]] = {}
    for name, parameter in module.named_parameters():
        if parameter.device.type != "meta" and parameter.numel() > 0:
            size = parameter.element_size()
            begin = int(parameter.storage_offset()) * size
            extent = sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            spans = by_storage.setdefault(parameter.untyped_storage().data_ptr(), [])
            spans.append((begin, begin + extent * size, name))
    for spans in by_storage.values():
        spans.sort()
        for (_, end, first), (begin, _, second) in pairwise(spans):
            if begin < end:
                raise UnsupportedModelError(f"{first} and {second} share memory without being the same parameter")


def take_blocks(
    stacks: Sequence[Stack], plan: UnitPlan, router: Router, device: torch.device, dtype: torch.dtype
) -> list[Block]:
    """Put proxies into the stacks' containers and the blocks' parameters on the meta device."""
    blocks = []
    for stack in stacks:
        proxies: dict[nn.Module, BlockProxy] = {}
        for key, skeleton in list(stack.container._modules.items()):
            assert skeleton is not None
            if skeleton in proxies:  # the same block once more
                stack.container._modules[key] = proxies[skeleton]
                continue
            name = f"{stack.name}.{key}"
            parameters = tuple(
                (inner, plan.names[f"{name}.{inner}"])
                for inner, _ in skeleton.named_parameters(remove_duplicate=False)
            )
            block = Block(name, skeleton, plan.block_units[name], parameters)
            blocks.append(block)
            proxies[skeleton] = BlockProxy(block, router, device, dtype)
            stack.container._modules[key] = proxies[skeleton]
    stay_fp32 = {id(parameter.original) for parameter in plan.parameters if parameter.stays_fp32}
    for block in blocks:
        for owner in block.skeleton.modules():
            for inner, parameter in owner._parameters.items():
                if parameter is not None and parameter.device.type != "meta":
                    own = torch.float32 if id(parameter) in stay_fp32 else dtype
                    owner._parameters[inner] = nn.Parameter(
                        torch.empty(parameter.shape, dtype=own, device="meta"), parameter.requires_grad
                    )
            if hasattr(owner, "gradient_checkpointing"):
                # Blocks are recomputed by the schedule.
                owner.gradient_checkpointing = False  # type: ignore[assignment]
    return blocks


def take_outside(module: nn.Module, plan: UnitPlan, weights: DeviceWeights, router: Router) -> None:
    """Outside the stacks: parameters become device leaves that are fetched when touched."""
    for module_name, owner in module.named_modules(remove_duplicate=False):
        if isinstance(owner, BlockProxy) or not owner._parameters or isinstance(owner._parameters, FetchedOnAccess):
            continue
        prefix = f"{module_name}." if module_name else ""
        tiled = {
            inner: plan.names[prefix + inner] for inner, value in owner._parameters.items() if value is not None
        }

        def fetch(inner: str, tiled: dict[str, TiledParameter] = tiled) -> Any:
            parameter = tiled[inner]
            if router.override is not None:
                return router.override[parameter]
            return weights.outside[parameter.tile].leaf(parameter)

        entries: dict[str, Any] = {}
        for inner, value in owner._parameters.items():
            if value is None:
                entries[inner] = None
                continue
            outside = weights.outside[tiled[inner].tile]
            entries[inner] = next(leaf for parameter, leaf in outside.leaves() if parameter is tiled[inner])
        owner._parameters = FetchedOnAccess(entries, fetch)


def let_go_of_outside(module: nn.Module) -> None:
    """Before the device leaves outside the stacks are made anew: the module holds no memory of the old ones."""
    nothing = nn.Parameter(torch.empty(0), requires_grad=False)
    for owner in module.modules():
        if isinstance(owner._parameters, FetchedOnAccess):
            for inner, entry in owner._parameters.items():
                if entry is not None:
                    owner._parameters[inner] = nothing


def renew_outside(module: nn.Module, plan: UnitPlan, weights: DeviceWeights) -> None:
    """The device leaves outside the stacks were made anew."""
    for module_name, owner in module.named_modules(remove_duplicate=False):
        if not isinstance(owner._parameters, FetchedOnAccess):
            continue
        prefix = f"{module_name}." if module_name else ""
        for inner in owner._parameters:
            tiled = plan.names.get(prefix + inner)
            if tiled is not None:
                leaves = weights.outside[tiled.tile].leaves()
                owner._parameters[inner] = next(leaf for parameter, leaf in leaves if parameter is tiled)


def move_buffers(module: nn.Module, blocks: Sequence[Block], device: torch.device) -> None:
    """All buffers to the compute device; those on the meta device wait for their values."""
    for root in (module, *(block.skeleton for block in blocks)):
        for owner in root.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    owner._buffers[name] = buffer.to(device)


def refuse_state_dict(module: nn.Module) -> None:
    """The module no longer holds its weights; its own state_dict would lack the blocks' without a word."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("the module's weights live in tiles: use state_dict() of the StreamedModel")

    module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


@contextmanager
def evaluation_mode(module: nn.Module, blocks: Sequence[Block]) -> Iterator[None]:
    """eval(), and each sub-module's own mode again afterwards."""
    owners = [owner for owner in module.modules() if not isinstance(owner, BlockProxy)]
    for block in blocks:
        owners.extend(block.skeleton.modules())
    modes = [(owner, owner.training) for owner in owners]
    module.eval()
    try:
        yield
    finally:
        for owner, training in modes:
            owner.training = training
        for owner in module.modules():
            if isinstance(owner, BlockProxy):
                owner.follow_mode()
