"""What a checkpoint says about a model besides the tiles' bytes, and whether it fits another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatrain.checkpoint import persistent_buffers
from megatrain.checkpoints import random_states
from megatrain.checkpoints.tile_file import sections
from megatrain.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from megatrain.model import StreamedModel


def describe(model: StreamedModel) -> dict[str, Any]:
    """What must be equal for the bytes to mean the same: plain values."""
    settings, plan = model.settings, model._parts.units
    return {
        "dtype": str(settings.dtype).removeprefix("torch."),
        "master": settings.master,
        "moments": settings.moments,
        "rule": settings.optimizer.rule,
        "seed": settings.seed,
        "tiles": [
            {
                "unit": unit.name,
                "sections": {name: view.nbytes for name, view in sections(model._parts.tiles.store, unit.tile).items()},
                "parameters": [
                    {
                        "name": parameter.name,
                        "shape": list(parameter.shape),
                        "trainable": parameter.trainable,
                        "offset": unit.layout.element_offset(parameter.index),
                        "stays_fp32": parameter.stays_fp32,
                    }
                    for parameter in unit.parameters
                ],
            }
            for unit in plan.units
        ],
        "ties": {name: parameter.name for name, parameter in plan.names.items() if name != parameter.name},
        "buffers": {
            name: {"shape": list(buffer.shape), "dtype": str(buffer.dtype).removeprefix("torch.")}
            for name, buffer in _buffers(model)
        },
    }


def capture(model: StreamedModel, extra: Any) -> dict[str, Any]:
    return {
        "model": describe(model),
        "steps": model.steps,
        "skipped_steps": model.skipped_steps,
        "optimizer": model.optimizer.progress(),
        "random": random_states.capture(model.device),
        "export": _contents(model),
        "extra": extra,
    }


def _contents(model: StreamedModel) -> dict[str, Any]:
    """For an export without the module. A run whose model cannot be exported can still be saved."""
    from megatrain.export.contents import contents_of

    try:
        return contents_of(model).to_plain()
    except ValueError as error:
        return {"refused": str(error)}


def require_fit(state: Mapping[str, Any], model: StreamedModel, path: object) -> None:
    """CheckpointError with the first difference, before anything is changed."""
    saved, own = state["model"], describe(model)
    problem = next(_differences(saved, own), None) or model.optimizer.misfit(state["optimizer"])
    if problem is not None:
        raise CheckpointError(f"{path} is not of this model: {problem}")


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for key in ("dtype", "master", "moments", "rule", "seed"):
        theirs = saved.get(key, "adamw")  # of the time before there were other rules
        if theirs != own[key]:
            yield f"{key} is {theirs} in the checkpoint and {own[key]} in the model"
    saved_parameters, own_parameters = _parameters(saved), _parameters(own)
    yield from _other_names("parameter", saved_parameters, own_parameters)
    for name, (place, entry) in saved_parameters.items():
        own_place, own_entry = own_parameters[name]
        for key in ("shape", "trainable", "stays_fp32"):
            theirs = entry.get(key, False)  # of the time when none stayed fp32
            if theirs != own_entry[key]:
                yield f"{key} of {name} is {theirs} in the checkpoint and {own_entry[key]} in the model"
        if (place, entry["offset"]) != (own_place, own_entry["offset"]):
            yield f"{name} lies elsewhere: in {place} of the checkpoint and in {own_place} of the model"
    if saved["ties"] != own["ties"]:
        names = [n for n in {**saved["ties"], **own["ties"]} if saved["ties"].get(n) != own["ties"].get(n)]
        yield f"{names[0]} is tied to {saved['ties'].get(names[0])} in the checkpoint, not in the model"
    yield from _other_names("buffer", saved["buffers"], own["buffers"])
    for name, entry in saved["buffers"].items():
        if entry != own["buffers"][name]:
            yield f"buffer {name} is {entry} in the checkpoint and {own['buffers'][name]} in the model"
    if _layout(saved) != _layout(own):
        yield "its tiles are laid out otherwise"


def _layout(description: Mapping[str, Any]) -> list[Any]:
    return [(tile["unit"], tile["sections"], [p["name"] for p in tile["parameters"]]) for tile in description["tiles"]]


def _parameters(description: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    return {p["name"]: (tile["unit"], p) for tile in description["tiles"] for p in tile["parameters"]}


def _other_names(noun: str, saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    for name in own:
        if name not in saved:
            yield f"the checkpoint lacks {noun} {name}"
    for name in saved:
        if name not in own:
            yield f"the model lacks {noun} {name}"


def _buffers(model: StreamedModel) -> Iterator[tuple[str, torch.Tensor]]:
    for name, owner, inner in persistent_buffers(model.module, model._parts.blocks):
        buffer = owner._buffers[inner]
        assert buffer is not None
        yield name, buffer


def buffers(model: StreamedModel) -> dict[str, torch.Tensor]:
    """Copies on the host."""
    return {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in _buffers(model)}


def set_buffers(model: StreamedModel, values: Mapping[str, torch.Tensor]) -> None:
    for name, owner, inner in persistent_buffers(model.module, model._parts.blocks):
        owner._buffers[inner] = values[name].to(model.device, copy=True)
