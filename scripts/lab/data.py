"""The first stages: the model to start from, and the problems, each use of them in a file of its own."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jobs.quickstart import tiny_model, train_tokenizer
from lib.loading import load_model
from lib.output import write_json
from lib.tokenizing import load_tokenizer
from trl import ModelConfig

from turngrpo.data_prep import stock_arithmetic
from turngrpo.data_prep.stock_arithmetic import ID50, OOD100

from .config import SOURCE_EOS, SOURCE_MODEL, SOURCE_PARAMETERS, TINY_MODEL, LabConfig


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], columns: list[str]) -> None:
    """Write the columns of rows as JSON Lines."""
    lines = [json.dumps({name: row[name] for name in columns}, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make_data(folder: Path, config: LabConfig) -> None:
    """Write the problems; test prompts and test labels lie apart, and only the scoring is given the labels."""
    data = stock_arithmetic.build(config.seed)
    train = list(data["train"])
    warm_start = [row for row in train if row["use"] == "warm_start"]
    further = [row for row in train if row["use"] == "continued"]
    half = config.test_rows // 2
    by_stratum = [[row for row in data["test"] if row["problem"]["stratum"] == stratum] for stratum in (ID50, OOD100)]
    test = [row for rows in by_stratum for row in rows[:half]]
    validation = list(data["validation"])[: config.validation_rows]
    imitated = ["id", "prompt", "completion"]
    write_rows(folder / "warm_start.jsonl", warm_start, imitated)
    write_rows(folder / "sft.jsonl", further[: config.sft_rows], imitated)
    write_rows(folder / "rl.jsonl", further, ["id", "prompt", "problem"])
    write_rows(folder / "validation.jsonl", validation, imitated)
    asked = [row | {"stratum": row["problem"]["stratum"]} for row in test]
    write_rows(folder / "test_prompts.jsonl", asked, ["id", "prompt", "stratum"])
    write_rows(folder / "test_labels.jsonl", test, ["id", "problem"])


def make_model(folder: Path, config: LabConfig) -> None:
    """Save the model that everything starts from, with what is known of it; the source's model must be what it was."""
    if config.model == TINY_MODEL:
        rows = list(stock_arithmetic.build(config.seed)["train"])
        tokenizer: Any = train_tokenizer(
            [f"{r['prompt'][0]['content']}\n{r['completion'][0]['content']}" for r in rows]
        )
        model: Any = tiny_model(tokenizer, config.seed, hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    else:
        revision = config.revision or "main"
        tokenizer = load_tokenizer(config.model, revision)
        model = load_model(ModelConfig(model_name_or_path=config.model, model_revision=revision, dtype="float32"))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    facts = {
        "model": config.model,
        "revision": config.revision,
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tied": tied,
        "eos": tokenizer.eos_token_id,
    }
    if config.model == SOURCE_MODEL:
        expected = {"parameters": SOURCE_PARAMETERS, "tied": True, "eos": SOURCE_EOS}
        wrong = [f"{name} {facts[name]}, expected {value}" for name, value in expected.items() if facts[name] != value]
        if wrong:
            raise ValueError(f"{SOURCE_MODEL} is not the source experiment's model: {'; '.join(wrong)}")
    model.save_pretrained(folder / "weights")
    tokenizer.save_pretrained(folder / "weights")
    write_json(folder / "model.json", facts)
