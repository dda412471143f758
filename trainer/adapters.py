"""Export of a trained adapter: a numbered version folder with weights, tokenizer, model card and manifest."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from huggingface_hub import ModelCardData

FORMAT = "turngrpo-adapter/1"
TRAINED = "default"  # PEFT's name of the trained adapter; TRL's frozen copy of a warm start is "ref"
REPOSITORY_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
CARD = """\
---
{metadata}
---

# {name}

A LoRA adapter for a gated memory agent: it reads a long document chunk by chunk, decides at every chunk whether to
write it into memory (update gate) and whether to stop reading (exit gate), and answers from memory alone.

- Method: TurnGRPO / GRU-Mem
- Paper: When to Memorize and When to Stop: Gated Recurrent Memory for Long-Context Reasoning (Sheng, Zhang, Ma, Shi,
  Huang, Wang, Zhang, Shen, Chua), [arXiv:2602.10560](https://arxiv.org/abs/2602.10560)
- Base model: {base_model}{revision}
- Version: {version}

## Corpus

{corpus}

## Results on validation projects

{results}

## Use

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""


def export_adapter(
    model: Any,
    tokenizer: Any,
    folder: str | os.PathLike[str],
    corpus: Mapping[str, Any] | None = None,
    before: Mapping[str, float] | None = None,
    after: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the trained adapter as the next version `folder`/v0001, v0002, ... and return that folder.

    Everything is written beside it and renamed at the end, so that a version is whole or absent, and none is ever
    replaced. `corpus` has name, digest, label_source, kappa; `before` and `after` are metrics by name; `config` is
    kept in the manifest. Raises ValueError for a model without a trained PEFT adapter.
    """
    if not is_peft_model(model) or TRAINED not in model.peft_config:
        raise ValueError(f"{type(model).__name__} has no PEFT adapter named {TRAINED!r}: train with --use_peft")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".partial.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        model.save_pretrained(
            str(partial), selected_adapters=[TRAINED], safe_serialization=True, save_embedding_layers=False
        )
        tokenizer.save_pretrained(str(partial))
        return _publish(partial, folder, model.peft_config[TRAINED], corpus, before, after, config)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(
    partial: Path,
    folder: Path,
    adapter: Any,
    corpus: Mapping[str, Any] | None,
    before: Mapping[str, float] | None,
    after: Mapping[str, float] | None,
    config: Mapping[str, Any] | None,
) -> Path:
    """Add card and manifest to the partial folder and rename it to the first free version."""
    while True:
        version = next_version(folder)
        facts = {
            "name": folder.name,
            "version": version,
            "base_model": adapter.base_model_name_or_path,
            "base_revision": adapter.revision,
        }
        card = model_card(facts, corpus, before or {}, after or {})
        (partial / "README.md").write_text(card, encoding="utf-8")
        manifest = {
            "format": FORMAT,
            **facts,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "corpus": corpus,
            "config": config,
            "metrics": {"before": before, "after": after},
            "files": {
                path.relative_to(partial).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
                for path in sorted(partial.rglob("*"))
                if path.is_file() and path.name != "manifest.json"
            },
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False, default=str)
        (partial / "manifest.json").write_text(text + "\n", encoding="utf-8")
        try:
            os.rename(partial, folder / version)  # fails where another process made this version meanwhile
        except OSError:
            if not (folder / version).exists():
                raise
            continue
        return folder / version


def next_version(folder: Path) -> str:
    """Return the version after the highest that is there: v0001 in an empty folder."""
    found = [int(path.name[1:]) for path in folder.glob("v*") if re.fullmatch(r"v\d{4,}", path.name)]
    return f"v{max(found, default=0) + 1:04d}"


def model_card(
    facts: Mapping[str, Any],
    corpus: Mapping[str, Any] | None,
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> str:
    """Return the README of a version: Hub metadata, method, base model, corpus, and metrics before and after."""
    base = str(facts["base_model"])
    on_hub = REPOSITORY_NAME.fullmatch(base) and not Path(base).exists()
    metadata = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        base_model=base if on_hub else None,
        tags=["lora", "trl", "grpo", "turngrpo", "arxiv:2602.10560"],
    )
    corpus_lines = ["Not stated."]
    if corpus is not None:
        kappa = corpus.get("kappa")
        agreement = "computed, no agreement to measure" if kappa is None else f"kappa {kappa}"
        corpus_lines = [
            f"- Name: {corpus.get('name')}",
            f"- SHA-256: `{corpus.get('digest')}`",
            f"- Labels: {corpus.get('label_source')} ({agreement})",
        ]
    names = [name for name in after if not name.startswith(("time/", "tokens/", "completions/"))]
    lines = ["| metric | before | after |", "|---|---|---|"]
    lines += [f"| {n} | {_number(before.get(n))} | {_number(after[n])} |" for n in sorted(names)]
    return CARD.format(
        metadata=metadata.to_yaml(),
        name=facts["name"],
        base_model=f"`{base}`",
        revision=f", revision `{facts['base_revision']}`" if facts["base_revision"] else "",
        version=facts["version"],
        corpus="\n".join(corpus_lines),
        results="\n".join(lines) if names else "Not measured.",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
