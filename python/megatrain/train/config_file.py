"""From a YAML file and --set overrides to checked settings; every mistake is one line."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .config import TrainSettings
from .errors import UserError, one_line, suggest


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-3 as a string and keeps the last of two equal keys; both surprise."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a string", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_settings(path: str, overrides: Sequence[str] = ()) -> TrainSettings:
    """Read the YAML file, apply `key.sub=value` overrides, check the result."""
    return check(read_values(path, overrides), path)


def read_values(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The same, unchecked."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}") from None
    values = _parse(text, path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: should hold `key: value` lines")
    for override in overrides:
        _apply(values, override)
    return values


def check(values: dict[str, Any], source: str) -> TrainSettings:
    try:
        return TrainSettings.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{source}: " + "; ".join(_describe(e) for e in error.errors())) from None


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{source}{where}: {one_line(error.problem or error.context)}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source}: {one_line(error)}") from None


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise UserError(f"--set {override}: should read key=value or key.sub=value")
    value = _parse(text, f"--set {override}")
    for depth, name in enumerate(names[:-1]):
        inner = values.get(name)
        if name == "data" and isinstance(inner, str | list) and depth == 0:
            inner = {"path": inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise UserError(f"--set {override}: '{'.'.join(names[: depth + 1])}' is {inner!r}, which has no keys")
        values[name] = inner
        values = inner
    if names == ["data"] and isinstance(value, str | list) and isinstance(values.get("data"), dict):
        values, names = values["data"], ["path"]  # what else the file says of its data stays
    values[names[-1]] = value


def _describe(error: Any) -> str:
    """pydantic's error in the words of the file. Union tags in the location are not keys."""
    location = [str(part) for part in error["loc"]]
    if location[:1] == ["model"]:
        location = [part for i, part in enumerate(location) if i != 1]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"unknown key '{key}'{suggest(location[-1], _known_keys(location[:-1]))}"
    if error["type"] == "missing":
        return f"the key '{key}' is missing"
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ").removeprefix("Value ")
    return f"{key} {message}, got {error['input']!r}" if key else message


def _known_keys(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = TrainSettings
    for name in location:
        inner = model.model_fields[name].annotation
        sections = [x for x in (inner, *get_args(inner)) if isinstance(x, type) and issubclass(x, BaseModel)]
        if len(sections) != 1:
            return []
        model = sections[0]
    return list(model.model_fields)
