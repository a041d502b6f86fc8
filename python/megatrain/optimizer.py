"""The optimizer face: a torch.optim.Optimizer whose state lives in the tiles."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from megatrain._native import ParameterUpdate, Section
from megatrain.rng import rounding_seed
from megatrain.rules import Optimizer, check_hyperparameters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from megatrain.parameters import TileParameter
    from megatrain.tiles import Tiles
    from megatrain.units import TiledParameter


class StreamedOptimizer(torch.optim.Optimizer):
    """`model.optimizer`. Groups may be edited and scheduled as those of torch.optim.AdamW; what they say
    when an update is queued counts. State: `step`, `exp_avg` and, of AdamW, `exp_avg_sq`, which are views of
    the tiles (8-bit moments appear in `state_dict()` only, as fp32 copies); `state_dict()` loads into
    torch.optim.AdamW with the same groups and the other way round. What it holds is what the tiles hold, so a
    state that is saved and loaded resumes to the bit; a foreign one is rounded to the nearest that they can hold.
    With `skip_idle_experts`, `step` of a tensor of experts has a count for each of them, which torch's own lacks."""

    def __init__(
        self,
        config: Optimizer,
        tiles: Tiles,
        faces: Mapping[str, TileParameter],
        apply: Callable[[], None],
        drain: Callable[[], None],
        forget_gradients: Callable[[], None],
        mark_moments_edited: Callable[[int], None],
        seed: int,
        undecayed: Collection[str],
        experts: Mapping[TiledParameter, range],
    ) -> None:
        """experts: tensors of which only the experts that got tokens are updated, and their numbers in the unit."""
        self._tiles = tiles
        self._experts = dict(experts)
        self._apply = apply
        self._drain = drain
        self._forget_gradients = forget_gradients
        self._mark_moments_edited = mark_moments_edited
        self._tiled: dict[int, TiledParameter] = {id(faces[p.name]): p for p in tiles.plan.parameters}
        self._face: dict[TiledParameter, TileParameter] = {p: faces[p.name] for p in tiles.plan.parameters}
        self._seeds = {p: rounding_seed(seed, p.name) for p in tiles.plan.parameters}
        self._moments = {name: Section.__members__[name] for name in config.moments}
        super().__init__(self._groups(config, undecayed), config.defaults)

    def _groups(self, config: Optimizer, undecayed: Collection[str]) -> list[dict[str, Any]]:
        trainable = [face for parameter, face in self._face.items() if parameter.trainable]
        if config.params is None:
            if config.decay_biases_and_norms:
                return [{"params": trainable, "decays": True}]
            kept = [face for face in trainable if self._tiled[id(face)].name in undecayed]
            decayed = [face for face in trainable if self._tiled[id(face)].name not in undecayed]
            split: list[dict[str, Any]] = [
                {"params": decayed, "decays": True},
                {"params": kept, "decays": False, "weight_decay": 0.0},
            ]
            return [group for group in split if group["params"]] or split[:1]
        by_original = {id(parameter.original): face for parameter, face in self._face.items()}
        names = self._tiles.plan.names
        groups = []
        for group in config.params:
            members: dict[int, TileParameter] = {}
            for entry in group["params"]:
                if isinstance(entry, str):
                    if entry not in names:
                        raise ValueError(f'a parameter group names "{entry}", which the module does not have')
                    face = self._face[names[entry]]
                elif id(entry) in by_original:
                    face = by_original[id(entry)]
                elif id(entry) in self._tiled:
                    face = entry
                else:
                    raise ValueError("a parameter group holds a tensor that is not a parameter of the module")
                if self._tiled[id(face)].trainable:
                    members[id(face)] = face
            groups.append({**group, "params": list(members.values())})
        listed = {id(face) for group in groups for face in group["params"]}
        missing = [self._tiled[id(face)].name for face in trainable if id(face) not in listed]
        if missing:
            raise ValueError(
                f"{len(missing)} trainable parameters are in no group, the first {missing[0]}; "
                "freeze them with requires_grad_(False) or list them"
            )
        return groups

    # updates

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip by the model's `max_grad_norm` and queue the update of every parameter that has a
        gradient. Returns before the updates have ended; whatever reads weights waits for them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._apply()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what was accumulated; gradients of streamed parameters are always dropped whole."""
        self._forget_gradients()

    def check_groups(self) -> None:
        """Before anything is updated: ValueError for a hyperparameter out of range."""
        for group in self.param_groups:
            check_hyperparameters(group)

    def groups_by_face(self) -> dict[int, dict[str, Any]]:
        """Each face's group now, by the face's id."""
        return {id(face): group for group in self.param_groups for face in group["params"]}

    def updates(
        self,
        parameters: Sequence[TiledParameter],
        groups: Mapping[int, dict[str, Any]],
        used_experts: Sequence[bool] | None = None,
    ) -> list[ParameterUpdate]:
        """The next update of these parameters of a unit, captured by value; advances their step counts. `groups` is
        `groups_by_face()`; `used_experts`, those of the unit that got tokens, where idle ones are left out."""
        found = []
        for parameter in parameters:
            face = self._face[parameter]
            group = groups[id(face)]
            state = self.state[face]
            if not state:
                state.update(self._new_state(parameter, 0.0))
            for begin, end, step in self._advance(parameter, state["step"], used_experts):
                found.append(
                    ParameterUpdate(
                        parameter.index,
                        lr=float(group["lr"]),
                        beta1=float(group["betas"][0]),
                        beta2=float(group["betas"][1]),
                        eps=float(group.get("eps", 0.0)),
                        weight_decay=float(group["weight_decay"]),
                        step=step,
                        seed=self._seeds[parameter],
                        begin=begin,
                        end=end,
                    )
                )
        return found

    def _advance(
        self, parameter: TiledParameter, steps: torch.Tensor, used_experts: Sequence[bool] | None
    ) -> Iterator[tuple[int, int, int]]:
        """(first element, the one after the last, step) of what is updated; neighbours of equal steps together."""
        if parameter not in self._experts:
            steps += 1
            yield 0, parameter.numel, int(steps)
            return
        parts = self._experts[parameter]
        size = parameter.numel // len(parts)
        used = [True] * len(parts) if used_experts is None else [used_experts[part] for part in parts]
        steps += torch.tensor(used, dtype=steps.dtype)
        counts = [int(count) for count in steps.tolist()]
        for (hit, step), run in itertools.groupby(range(len(parts)), key=lambda expert: (used[expert], counts[expert])):
            if hit:
                experts = list(run)
                yield experts[0] * size, (experts[-1] + 1) * size, step

    def _new_state(self, parameter: TiledParameter, steps: float | Sequence[float]) -> dict[str, torch.Tensor]:
        """steps: of the parameter, or of each of its experts."""
        count = torch.tensor(steps, dtype=torch.float32)
        if parameter in self._experts:
            count = count.expand(len(self._experts[parameter])).clone()
        elif count.numel() > 1:
            count = count[0].clone()  # all the same: checked before
        state = {"step": count}
        if not self._coded(parameter):
            state |= {name: self._tiles.view(parameter, section) for name, section in self._moments.items()}
        return state

    def _coded(self, parameter: TiledParameter) -> bool:
        return self._tiles.store.layout(parameter.tile).format.moments == "int8"

    # state

    def state_dict(self) -> dict[str, Any]:
        """torch's layout; the moments are views of the tiles, as torch's are of its own tensors, or fp32
        copies of 8-bit ones."""
        self._drain()
        state = super().state_dict()
        faces = [face for group in self.param_groups for face in group["params"]]
        for index, face in enumerate(faces):
            parameter = self._tiled[id(face)]
            if index in state["state"] and self._coded(parameter):
                values = {name: self._tiles.moments(parameter, section) for name, section in self._moments.items()}
                state["state"][index] = state["state"][index] | values
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over groups and moments; nothing is changed if the groups or a shape do not fit."""
        self._drain()
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(f"the state has {len(saved)} parameter groups, the optimizer {len(self.param_groups)}")
        targets: list[tuple[TileParameter, Mapping[str, Any] | None]] = []
        for number, (theirs, ours) in enumerate(zip(saved, self.param_groups, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise ValueError(
                    f"group {number} of the state has {len(theirs['params'])} parameters, "
                    f"that of the optimizer {len(ours['params'])}"
                )
            check_hyperparameters({**self.defaults, **theirs})
            targets += zip(ours["params"], (state_dict["state"].get(key) for key in theirs["params"]), strict=True)
        for face, entry in targets:
            if entry is None:
                continue
            problem = self._steps_misfit(self._tiled[id(face)], _steps(entry["step"]))
            if problem is not None:
                raise ValueError(f"in the state, {problem}")
            for name in self._moments:
                if name not in entry:
                    own = self._tiled[id(face)].name
                    raise ValueError(f"the state of {own} has no {name}; it is of another optimizer")
                if entry[name].shape != face.shape:
                    raise ValueError(
                        f"{name} of {self._tiled[id(face)].name} has shape {tuple(entry[name].shape)}, "
                        f"the parameter {tuple(face.shape)}"
                    )
            if "exp_avg_sq" in self._moments and face.numel() and not float(entry["exp_avg_sq"].min()) >= 0:
                own, least = self._tiled[id(face)].name, float(entry["exp_avg_sq"].min())
                raise ValueError(f"exp_avg_sq of {own} goes down to {least}; it must be at least 0")
        # Views first: a state that came from this optimizer must be read before it is overwritten.
        fresh = [None if e is None else (_steps(e["step"]), *(e[name] for name in self._moments)) for _, e in targets]
        for (face, _), values in zip(targets, fresh, strict=True):
            parameter = self._tiled[id(face)]
            if values is None:
                for section in self._moments.values():
                    self._tiles.view(parameter, section).zero_()
                self.state.pop(face, None)
                continue
            steps, *moments = values
            for section, moment in zip(self._moments.values(), moments, strict=True):
                self._tiles.write_moments(parameter, section, moment)
            self.state[face] = self._new_state(parameter, steps)
        for tile in {self._tiled[id(face)].tile for face, _ in targets}:
            self._mark_moments_edited(tile)
        for theirs, ours in zip(saved, self.param_groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key != "params"})

    # checkpoints, whose moments are the tiles' bytes

    def progress(self) -> dict[str, Any]:
        """Groups by the parameters' names, and how many updates each parameter has had: plain values."""
        groups = []
        for group in self.param_groups:
            values = {k: _plain(v) for k, v in group.items() if k != "params"}
            groups.append({**values, "params": [self._tiled[id(face)].name for face in group["params"]]})
        steps = {self._tiled[id(face)].name: _steps(state["step"]) for face, state in self.state.items() if state}
        return {"groups": groups, "steps": steps}

    def misfit(self, progress: Mapping[str, Any]) -> str | None:
        """The first way in which saved groups are not this optimizer's."""
        saved, own = progress["groups"], self.progress()["groups"]
        if len(saved) != len(own):
            return f"it has {len(saved)} parameter groups, the optimizer {len(own)}"
        for number, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
            if theirs["params"] != ours["params"]:
                pairs = itertools.zip_longest(theirs["params"], ours["params"])
                first, second = next(pair for pair in pairs if pair[0] != pair[1])
                return f"parameter group {number} has {first} where the optimizer's has {second}"
        by_name = {parameter.name: parameter for parameter in self._face}
        problems = (self._steps_misfit(by_name[name], steps) for name, steps in progress["steps"].items())
        return next((problem for problem in problems if problem is not None), None)

    def _steps_misfit(self, parameter: TiledParameter, steps: int | list[int]) -> str | None:
        """Why saved step counts cannot be this parameter's."""
        if not isinstance(steps, list) or (parameter not in self._experts and len(set(steps)) == 1):
            return None
        if parameter not in self._experts:
            return f"the experts of {parameter.name} have step counts of their own; use skip_idle_experts=True"
        count = len(self._experts[parameter])
        if len(steps) != count:
            return f"{parameter.name} has step counts of {len(steps)} experts, the model {count}"
        return None

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """What `progress()` gave; the tiles hold the moments already."""
        for theirs, ours in zip(progress["groups"], self.param_groups, strict=True):
            for key, value in theirs.items():
                if key != "params":
                    ours[key] = tuple(value) if isinstance(value, list) else value
        for parameter, face in self._face.items():
            self.state.pop(face, None)
            if parameter.name in progress["steps"]:
                self.state[face] = self._new_state(parameter, progress["steps"][parameter.name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while the optimizer is made: tiles are laid out for the parameters known then."""
        faces: Iterable[Any] = param_group["params"]
        if any(id(face) not in self._tiled for face in faces):
            raise ValueError("parameter groups hold the parameters of the streamed model; others cannot be added")
        super().add_param_group(param_group)


def _steps(step: Any) -> int | list[int]:
    """A parameter's, or those of its experts."""
    return [int(count) for count in step.tolist()] if isinstance(step, torch.Tensor) and step.dim() else int(step)


def _plain(value: Any) -> Any:
    """A learning rate may be a tensor."""
    return value.item() if isinstance(value, torch.Tensor) else value
