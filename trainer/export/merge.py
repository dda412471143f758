"""Base and adapter in one, for servers without LoRA."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngrpo.trainer.export.base_model import is_on_hub
from turngrpo.trainer.export.model_card import model_card
from turngrpo.trainer.export.versions import CONFIG, FORMAT, MERGED_FORMAT, collecting, publish, read_version
from turngrpo.trainer.files import read_json
from turngrpo.trainer.forward.scoring import trained_tokens

# Largest difference of logits, of the largest of them, that the rounding of merged weights explains.
TOLERANCE, LOW_TOLERANCE = 1e-3, 0.1


def merge_version(version: str | os.PathLike[str]) -> Path:
    """Write base and adapter merged as whole weights beside a version, as `<version>-merged`, and return that folder.

    The base is loaded in the precision it is stored in. Raises ValueError for a version that is not as its manifest
    says or was merged before, and for an adapter whose merged weights are another model.
    """
    version = Path(version).resolve()
    manifest = read_version(version, FORMAT)
    final = version.with_name(f"{version.name}-merged")
    with collecting(version.parent) as partial:
        if final.exists():
            raise ValueError(
                f"{final} is there already, and a version is never written again: use it, or export a new one"
            )
        adapter = read_json(version / CONFIG)
        base = load_base(adapter["base_model_name_or_path"], adapter["revision"] or manifest["base_revision"])
        merged: Any = PeftModel.from_pretrained(base, str(version))
        tokens = [*range(1, 9), *trained_tokens(merged)]
        expected = _logits(merged, tokens)
        _part_ends(merged.get_base_model())
        whole = merged.merge_and_unload(safe_merge=True)
        if whole.get_input_embeddings().weight is not whole.get_output_embeddings().weight:
            whole.config.get_text_config().tie_word_embeddings = whole.config.tie_word_embeddings = False
        whole.save_pretrained(partial)
        del base, merged, whole
        _check_merged(load_base(str(partial), None), tokens, expected)
        AutoTokenizer.from_pretrained(version).save_pretrained(partial)
        card = model_card(manifest, manifest["metrics"]["before"], manifest["metrics"]["after"], adapter=None)
        return publish(partial, final, {**manifest, "format": MERGED_FORMAT}, card)


def _part_ends(causal: Any) -> None:
    """Give the head weights of its own where an adapter changes one of the two, embedding or head, that share them."""
    ends = causal.get_input_embeddings(), causal.get_output_embeddings()
    embedding, head = (_without_adapter(end) for end in ends)
    if head.weight is embedding.weight and (embedding, head) != ends:
        head.weight = nn.Parameter(head.weight.detach().clone())


def _without_adapter(module: Any) -> Any:
    """Return the layer of the base model inside of what PEFT has put around it."""
    kinds: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    while isinstance(module, kinds):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


@torch.no_grad()
def _logits(model: Any, tokens: list[int]) -> torch.Tensor:
    ids = [token % model.config.get_text_config().vocab_size for token in tokens]
    return model.eval()(input_ids=torch.tensor([ids]), use_cache=False).logits


def _check_merged(model: Any, tokens: list[int], expected: torch.Tensor) -> None:
    """Raise ValueError where merged weights, read from disk again, are another model than base and adapter were."""
    found = _logits(model, tokens)
    limit = TOLERANCE if expected.dtype in (torch.float32, torch.float64) else LOW_TOLERANCE
    gap, size = float((found - expected).abs().max()), float(expected.abs().max())
    if not gap <= limit * max(size, 1.0):
        raise ValueError(
            f"merged weights give other logits than base and adapter do (by up to {gap:.3g}, of {size:.3g}): this "
            "adapter cannot be merged into this base; serve the adapter itself"
        )


def load_base(name: str, revision: str | None, **options: Any) -> Any:
    """Load a causal model without any adapter, also one that lies in its folder; in its own precision by default.

    Raises ValueError where it cannot be loaded.
    """
    if not Path(name).is_dir() and not is_on_hub(name):
        raise ValueError(
            f"the base model is {name!r}, found no such folder: write where it is into the adapter's {CONFIG}, as "
            "base_model_name_or_path"
        )
    try:
        with without_adapter(name) as place:
            options = {"dtype": "auto", "revision": revision or "main"} | options
            model = AutoModelForCausalLM.from_pretrained(place, **options)
    except OSError as error:
        raise ValueError(f"the model {name} cannot be loaded: expected it here or on the Hub. {error}") from error
    model.name_or_path = model.config._name_or_path = name
    return model


@contextmanager
def without_adapter(name: str) -> Iterator[str]:
    """Yield a name to load a base model by: for a folder with base and adapter one that links to all but the latter.

    transformers would put the adapter into the model that it loads.
    """
    folder = Path(name)
    if not (folder / CONFIG).is_file():
        yield name
        return
    with TemporaryDirectory() as links:
        for file in folder.resolve().iterdir():
            if not file.name.startswith("adapter_"):
                Path(links, file.name).symlink_to(file)
        yield links
