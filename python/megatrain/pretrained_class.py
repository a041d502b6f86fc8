"""The class and the configuration of a Hugging Face directory. Code that lies in it runs only when asked for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def model_class_and_config(directory: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """ValueError for an architecture that transformers does not have, unless the directory has code for it and
    `trust_remote_code` is set."""
    import transformers

    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    reference = _class_reference(values)
    if reference is not None and trust_remote_code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
        return get_class_from_dynamic_module(reference, str(directory)), config
    if reference is not None and values.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(refusal(directory, reference))
    # Never None: transformers would ask on the terminal.
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    architecture = (getattr(config, "architectures", None) or [None])[0]
    model_class: Any = getattr(transformers, architecture, None) if architecture else None
    if model_class is None:
        model_class = transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_class is None:
        raise ValueError(
            f'{directory}/config.json names the architecture "{architecture}", which transformers '
            f"{transformers.__version__} does not have"
        )
    return model_class, config


def refusal(directory: Path, reference: str) -> str:
    return (
        f"{directory} brings code of its own ({reference.split('--')[-1].split('.')[0]}.py), which is not run unless "
        "asked for: trust_remote_code=True, after a look at it"
    )


def _class_reference(config: dict[str, Any]) -> str | None:
    """Of `auto_map`: the causal language model, else the first model."""
    references = config.get("auto_map") or {}
    models = {key: value for key, value in references.items() if key.startswith("AutoModel")}
    return models.get("AutoModelForCausalLM") or next(iter(models.values()), None)


def code_of(directory: Path, config: Any) -> dict[str, str]:
    """The directory's own Python files, where its configuration refers to them."""
    if not getattr(config, "auto_map", None):
        return {}
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(directory.glob("*.py"))}
