"""A folder that holds an adapter, in the place of a model: what to go on with, or to read with."""

from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel
from trl import ModelConfig, get_peft_config

from turngrpo.trainer.checks import ADAPTER_CONFIG
from turngrpo.trainer.export.base_model import is_on_hub

# Options of the command line and what an adapter's config calls them.
LORA_OPTIONS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


@dataclass(frozen=True)
class Adapter:
    """An adapter on disk: its folder and config, its base model by name, and where the weights of that are."""

    folder: str
    config: PeftConfig
    base: str
    weights: str  # the folder itself where it holds both

    @classmethod
    def find(cls, name: str | None) -> "Adapter | None":
        """Return the adapter that a folder holds, alone or beside its base model, None for any other name.

        Raises ValueError where its config names no base model, or one that is not here.
        """
        if name is None or not Path(name, ADAPTER_CONFIG).is_file():
            return None
        config = PeftConfig.from_pretrained(name)
        config.inference_mode = False
        both = Path(name, "config.json").is_file()
        base = str(config.base_model_name_or_path or (name if both else ""))
        if not base:
            raise ValueError(f"{Path(name, ADAPTER_CONFIG)} names no base model: write its name there")
        if not both and not Path(base).is_dir() and not is_on_hub(base):
            raise ValueError(
                f"the adapter {name} was trained on {base!r}, found no such folder: put its base there, or write "
                f"where it is into {Path(name, ADAPTER_CONFIG)}, as base_model_name_or_path"
            )
        return cls(name, config, base, name if both else base)


def weights_of(name: Any) -> Any:
    """Return the name of the model to load for `name`: of an adapter where the weights of its base are."""
    adapter = Adapter.find(name)
    return name if adapter is None else adapter.weights


def adapter_config(options: ModelConfig, all_linear: Any = None) -> PeftConfig | None:
    """Return the config of the adapter that is trained: a new one, or that of the folder to go on with; else None.

    `all_linear` returns the modules that "all-linear" stands for. Raises ValueError for an adapter without --use_peft,
    and for options that it contradicts.
    """
    adapter = Adapter.find(options.model_name_or_path)
    if adapter is None:
        return new_adapter_config(options)
    if not options.use_peft:
        raise ValueError(
            f"{adapter.folder} holds an adapter of {adapter.base!r}: add --use_peft to go on with it, or name merged "
            "weights (scripts/export_adapter.py --merge)"
        )
    faults = []
    for name, theirs in LORA_OPTIONS.items():
        given, own = getattr(options, name), getattr(adapter.config, theirs, None)
        if given == "all-linear" and all_linear is not None:
            given = all_linear()
        if given not in (None, False) and _plain(given) != _plain(own):
            faults.append(f"--{name} is {_plain(given)}, the adapter's {theirs} is {_plain(own)}")
    if faults:
        raise ValueError(f"{adapter.folder} goes on as it is: leave out what it contradicts: {'; '.join(faults)}")
    return deepcopy(adapter.config)


def new_adapter_config(options: ModelConfig) -> PeftConfig | None:
    """Return the config of a new adapter, with trl's defaults; None without --use_peft, and to go on with one."""
    if Adapter.find(options.model_name_or_path) is not None:
        return None
    for one in fields(ModelConfig):
        if one.name in LORA_OPTIONS and getattr(options, one.name) is None:
            setattr(options, one.name, one.default)
    return get_peft_config(options)


def put_on(base: Any, folder: str, adapter_name: str, base_name: str, trainable: bool = False) -> Any:
    """Return a base model with the adapter of a folder; ValueError, which names both, where it does not fit."""
    try:
        return PeftModel.from_pretrained(base, folder, is_trainable=trainable)
    except RuntimeError as error:  # torch's, with a line for every matrix
        first = "".join(str(error).split("\n")[1:2]).strip()
        origin = PeftConfig.from_pretrained(folder).base_model_name_or_path
        raise ValueError(
            f"{adapter_name} was trained on {origin!r} and does not fit {base_name}: give its own base ({first})"
        ) from error


def _plain(value: Any) -> Any:
    """Return a value as it compares: names in any order and of any type are a sorted list."""
    if isinstance(value, str):
        return [value]
    return sorted(value) if isinstance(value, list | tuple | set) else value
