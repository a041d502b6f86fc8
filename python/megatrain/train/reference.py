"""The configuration reference, made from the schema: `python -m megatrain.train.reference > docs/configuration.md`."""

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from .config import ShapeSettings, TrainSettings

_HEAD = """# Configuration

Every key of the YAML file of `megatrain train`. Any of them can be set on the command line, too:
`--set optimizer.lr=2e-5`. A key that is not here is refused, with the nearest one that is.

This page is made from the schema: `python -m megatrain.train.reference > docs/configuration.md`.
"""
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NAMES = {int: "whole number", float: "number", str: "string", bool: "true or false", type(None): "null"}


def reference() -> str:
    """Markdown: the keys of the top level, then a table for each section."""
    sections = [(name, field, _model(field)) for name, field in TrainSettings.model_fields.items()]
    lines = [_HEAD, "## Top level", "", *_table(TrainSettings)]
    for name, field, model in sections:
        if model is not None:
            lines += ["", f"## {name}", "", str(field.description), "", *_table(model)]
    lines += ["", "## model", "", str(TrainSettings.model_fields["model"].description), ""]
    lines += [" ".join(str(ShapeSettings.__doc__).split()), "", *_table(ShapeSettings)]
    return "\n".join(lines) + "\n"


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        section = _model(field)
        optional = " or null" if type(None) in get_args(field.annotation) else ""
        value = f"[section](#{name}){optional}" if section is not None else _value(field)
        default = "" if section is not None and not optional else _default(field)
        yield f"| `{name}` | {value} | {default} | {_cell(field.description or '')} |"


def _model(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key is, which may be null."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] or [field.annotation]
    if len(kinds) == 1 and isinstance(kinds[0], type) and issubclass(kinds[0], BaseModel):
        return kinds[0]
    return None


def _value(field: FieldInfo) -> str:
    text = _type(field.annotation)
    limits = [
        f"{sign} {getattr(entry, name):g}"
        for entry in field.metadata
        for name, sign in _LIMITS.items()
        if getattr(entry, name, None) is not None
    ]
    return _cell(", ".join([text, *limits]))


def _type(kind: Any) -> str:
    """A type in words."""
    arguments = get_args(kind)
    if kind in _NAMES:
        return _NAMES[kind]
    if kind is ShapeSettings:
        return "[section](#model)"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if get_origin(kind) is list:
        return f"{_type(arguments[0])}, or a list"
    if get_origin(kind) is tuple:
        return f"[{', '.join(_type(argument) for argument in arguments)}]"
    if get_origin(kind) is dict:
        return "mapping of names"
    if hasattr(kind, "__metadata__"):
        return _type(arguments[0])
    return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
