"""The model card of an exported version: Hub metadata, where it comes from, what it reached, how it is mounted."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from turngrpo.trainer.export.base_model import digest_command, is_on_hub

PAPER = {
    "title": "When to Memorize and When to Stop: Gated Recurrent Memory for Long-Context Reasoning",
    "id": "2602.10560",
    "citation": """@article{sheng2026grumem,
    title  = {When to Memorize and When to Stop: Gated Recurrent Memory for Long-Context Reasoning},
    author = {Leheng Sheng and Yongtao Zhang and Wenchang Ma and Yaorui Shi and Ting Huang and Xiang Wang and An Zhang
              and Ke Shen and Tat-Seng Chua},
    year   = 2026,
    eprint = {arXiv:2602.10560},
}""",
}

MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
CONFIG_FIELDS = (
    "workflow layout alpha turn_baseline loss_type scale_rewards beta kl epsilon learning_rate num_generations "
    "num_iterations temperature chunk_size max_prompt_length max_completion_length max_memory_tokens seed"
).split()
CARD = """\
---
{{ card_data }}
---

# {{ name }}

{{ what }}

- Method: TurnGRPO / GRU-Mem
- Paper: {{ paper }}, [arXiv:{{ arxiv }}](https://arxiv.org/abs/{{ arxiv }})
- Base model: {{ base }}
- Version: {{ version }}{{ update }}

## Corpus

{{ corpus }}

## Results on validation projects

{{ results }}

## Reading

{{ reading }}

## Training

{{ config }}

All of it, and the SHA-256 of every file, is in `manifest.json`.

## Use

{{ use }}
"""
GATED = """\
a gated memory agent: it reads a long document chunk by chunk, decides at every chunk whether to write it into memory
(update gate) and whether to stop reading (exit gate), and answers from memory alone."""
USE_ADAPTER = """\
With the full path of this folder in `ADAPTER`{base_path}, PEFT:

```python
import os

{load}
tokenizer = AutoTokenizer.from_pretrained(os.environ["ADAPTER"])
```

vLLM:

{vllm}

`transformers serve`, which takes a folder that holds base weights and adapter together:

```bash
mkdir mounted
ln -s {base_folder}/* mounted/
ln -sf "$ADAPTER"/* mounted/
transformers serve mounted
```
"""
LOAD = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained(os.environ["ADAPTER"])"""
LOAD_ON_BASE = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained(os.environ["BASE"])
model = PeftModel.from_pretrained(base, os.environ["ADAPTER"])"""
VLLM = """\
```bash
vllm serve {base}{revision} --enable-lora --max-lora-rank {rank} --lora-modules {name}="$ADAPTER"
```"""
NO_VLLM = "vLLM mounts no adapter with {why}: serve whole weights, from `scripts/export_adapter.py --merge`."
USE_MERGED = """\
The adapter is merged into these weights, for servers without LoRA. In this folder: `vllm serve .` or
`transformers serve .`
"""


def model_card(
    facts: Mapping[str, Any],
    before: Mapping[str, float | None] | None,
    after: Mapping[str, float | None] | None,
    adapter: Mapping[str, Any] | None,
) -> str:
    """Return the README of a version, with valid Hub metadata and every name escaped.

    `facts` has name, version, base_model, base_revision, update, corpus, config (all but the first three may be None);
    `adapter` is the adapter's config, None for merged weights.
    """
    base, revision = str(facts["base_model"]), facts["base_revision"]
    on_hub = is_on_hub(base)
    lora = adapter is not None and adapter.get("peft_type") == "LORA"
    kind = "Weights" if adapter is None else "A LoRA adapter" if lora else "An adapter"
    workflow = (facts.get("config") or {}).get("workflow", "GatedMemory")
    metadata = ModelCardData(
        library_name="transformers" if adapter is None else "peft",
        pipeline_tag="text-generation",
        base_model=base if on_hub else None,
        base_model_relation=("finetune" if adapter is None else "adapter") if on_hub else None,
        tags=[*(["lora"] if lora else []), "trl", "grpo", "turngrpo", f"arxiv:{PAPER['id']}"],
    )
    card = ModelCard.from_template(
        metadata,
        template_str=CARD,
        name=escape(facts["name"]),
        what=f"{kind} for {GATED if workflow == 'GatedMemory' else f'the workflow {escape(workflow)}.'}",
        paper=PAPER["title"],
        arxiv=PAPER["id"],
        base=_base(base, revision),
        version=facts["version"],
        update="" if facts.get("update") is None else f", after {facts['update']} updates",
        corpus=_corpus(facts.get("corpus")),
        results=_results(before or {}, after or {}),
        reading=_reading((facts.get("config") or {}).get("reading")),
        config=_config(facts.get("config")),
        use=USE_MERGED if adapter is None else _use(facts, on_hub, adapter),
    )
    return str(card)


def _base(name: str, revision: str | None) -> str:
    """Return how the base model is named, and what to do with a name that leads nowhere."""
    if is_on_hub(name):
        return escape(name) + (f", revision {escape(revision)}" if revision else "")
    check = digest_command(name)
    text = f"{escape(name)}. It is not on the Hub: ask whoever trained the adapter for it"
    return f"{text}; {check}" if check else text


def escape(text: Any) -> str:
    """Return text that Markdown shows as it is, on one line, also in the cell of a table."""
    return MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))


def _corpus(corpus: Mapping[str, Any] | None) -> str:
    if corpus is None:
        return "Not stated."
    kappa = corpus.get("kappa")
    agreement = "computed, no agreement to measure"
    if kappa is not None:
        items = corpus.get("kappa_items")
        agreement = f"kappa {kappa}" + (f" on {items} items" if items else "")
    lines = {
        "Name": escape(corpus.get("name")),
        "SHA-256": f"`{corpus.get('digest')}`",
        "Rows": corpus.get("rows"),
        "Projects": corpus.get("projects"),
        "Labels": f"{escape(corpus.get('label_source'))} ({agreement})",
        "License": corpus.get("license") and escape(corpus["license"]),
    }
    return "\n".join(f"- {name}: {value}" for name, value in lines.items() if value is not None)


def _results(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> str:
    names = [name for name in after if not name.startswith(("time/", "tokens/", "completions/", "interval/"))]
    rows = [(escape(name), _number(before.get(name)), _number(after[name])) for name in sorted(names)]
    return _table(("metric", "before", "after"), rows) if rows else "Not measured."


def _reading(reading: Mapping[str, Any] | None) -> str:
    """Return how the adapter reads: what a program that uses it has to do alike."""
    reading = dict(reading or {})
    instruction = reading.pop("instruction", None)
    rows = [(escape(name), escape(value)) for name, value in reading.items() if value is not None]
    parts = [_table(("option", "value"), rows)] if rows else []
    if isinstance(instruction, str):
        fence = "`" * (2 + max(map(len, re.findall("`+", instruction)), default=1))  # longer than any inside
        parts.append(f"Instruction of every chunk turn:\n\n{fence}text\n{instruction}\n{fence}")
    return "\n\n".join(parts) or "Not stated."


def _config(config: Mapping[str, Any] | None) -> str:
    config = config or {}
    values = {"workflow": config.get("workflow"), **config.get("trainer", {}), **config.get("script", {})}
    rows = [(name, escape(values[name])) for name in CONFIG_FIELDS if values.get(name) is not None]
    return _table(("option", "value"), [(escape(name), value) for name, value in rows]) if rows else "Not stated."


def _use(facts: Mapping[str, Any], on_hub: bool, adapter: Mapping[str, Any]) -> str:
    revision = facts["base_revision"]
    base = shlex.quote(str(facts["base_model"])) if on_hub else '"$BASE"'
    flag = f" --revision {shlex.quote(revision)}" if revision and on_hub else ""
    rank = max([adapter.get("r") or 0, *(adapter.get("rank_pattern") or {}).values()])
    why = [
        name for name in ("use_dora", "modules_to_save", "lora_bias", "trainable_token_indices") if adapter.get(name)
    ]
    if adapter.get("peft_type") != "LORA":
        why.append(f"peft_type {adapter.get('peft_type')}")
    vllm = VLLM.format(
        base=base,
        revision=flag,
        rank=next((allowed for allowed in VLLM_RANKS if allowed >= rank), rank),
        name=shlex.quote(str(facts["name"])),
    )
    return USE_ADAPTER.format(
        base_path="" if on_hub else " and that of the base model in `BASE`",
        load=LOAD if on_hub else LOAD_ON_BASE,
        vllm=NO_VLLM.format(why=", ".join(why)) if why else vllm,
        base_folder=f"$(hf download {base}{flag} --quiet)" if on_hub else base,
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
