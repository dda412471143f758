"""Base and adapter in one, for servers without LoRA."""

import os
from pathlib import Path
from typing import Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngrpo.trainer.export.model_card import model_card
from turngrpo.trainer.export.versions import FORMAT, MERGED_FORMAT, collecting, publish, read_version


def merge_version(version: str | os.PathLike[str]) -> Path:
    """Write base and adapter merged as whole weights beside a version, as `<version>-merged`, and return that folder.

    The base is loaded in the precision it is stored in. Raises ValueError for a version that is not as its manifest
    says or was merged before.
    """
    version = Path(version).resolve()
    manifest = read_version(version, FORMAT)
    final = version.with_name(f"{version.name}-merged")
    with collecting(version.parent) as partial:
        if final.exists():
            raise ValueError(
                f"{final} is there already, and a version is never written again: use it, or export a new one"
            )
        base = _load_base(manifest["base_model"], manifest["base_revision"])
        merged: Any = PeftModel.from_pretrained(base, str(version))
        _untie_adapted(merged.get_base_model())
        merged.merge_and_unload(safe_merge=True).save_pretrained(partial)
        AutoTokenizer.from_pretrained(version).save_pretrained(partial)
        card = model_card(manifest, manifest["metrics"]["before"], manifest["metrics"]["after"], adapter=None)
        return publish(partial, final, {**manifest, "format": MERGED_FORMAT}, card)


def _untie_adapted(causal: Any) -> None:
    """Give the head weights of its own where an adapter changes the embedding that it shares them with."""
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if isinstance(embedding, BaseTunerLayer) and head.weight is embedding.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        causal.config.get_text_config().tie_word_embeddings = causal.config.tie_word_embeddings = False


def _load_base(name: str, revision: str | None) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(name, revision=revision or "main", dtype="auto")
    except OSError as error:
        raise ValueError(f"the base model {name} cannot be loaded: merge where it can. {error}") from error
