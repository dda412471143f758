"""The README's workflow runs, its commands exist, and its tables list every option and metric."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

from tiny import word_tokenizer
from trl import GRPOConfig

from turngrpo.data_prep import load_corpus
from turngrpo.trainer.inherited_options import REFUSED
from turngrpo.trainer.measuring.metrics import COST_NAMES
from turngrpo.trainer.reading.rollout import Completion, collect

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title):
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_workflow_of_the_readme_runs(tmp_path, monkeypatch):
    block = next(code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class AnswerTwice" in code)
    assert len(block.splitlines()) <= 45
    (tmp_path / "readme_workflow.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("readme_workflow")
    tokenizer = word_tokenizer("Answer in \\boxed{}. Your first answer was: Check it and again. \\boxed{2}")
    replies = {0: "\\boxed{ 2 } <|im_end|>", 1: "\\boxed{ 1 } <|im_end|>"}

    class Scripted:
        def generate(self, requests):
            ids = [tokenizer(replies[request.key.turn])["input_ids"] for request in requests]
            self.prompts = [tokenizer.decode(request.prompt_ids) for request in requests]
            return [Completion(i, [0.0] * len(i), "eos") for i in ids]

    engine, workflow = Scripted(), module.AnswerTwice()
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None))
    (trajectory,) = collect(workflow, engine, tokenizer, [{"question": "code of red"}], [0], [0], 0, 0)
    assert len(trajectory.turns) == 2 and trajectory.parsed
    assert trajectory.answer == "1"  # the second answer, not the first one's 2
    assert "was:\\boxed{2}Check" in engine.prompts[0]  # the second prompt shows the first answer


def test_the_corpus_of_the_readme_loads(tmp_path):
    lines = [line.strip() for line in section("Your own corpus").splitlines() if line.startswith("    {")]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    corpus = load_corpus(tmp_path / "corpus.jsonl", tokenizer=word_tokenizer(), chunk_size=100)
    rows = [row for split in corpus.values() for row in split]
    evidence = {row["id"]: [chunk["text"] for chunk in row["chunks"] if chunk["evidence"]] for row in rows}
    assert evidence == {"c-17": ["..."], "c-18": ["... Closing is on May 3. ..."]}


def test_every_option_of_trl_stands_in_the_table():
    table = section("Inherited options under a workflow")
    own = [name for name in GRPOConfig.__annotations__ if not name.startswith("vllm_")]
    missing = [name for name in [*own, *REFUSED] if f"`{name}`" not in table and not name.startswith("vllm_")]
    assert missing == []
    assert "every `vllm_*`" in table


def test_every_metric_stands_in_the_table():
    table = section("Metrics")
    names = [
        *COST_NAMES,
        *(f"update_accuracy/{side}" for side in ("evidence", "evidence_free", "balanced")),
        *(f"exit/{kind}" for kind in ("exact", "early", "late")),
        *"format/parsed answer/accuracy turns/mean response_tokens/mean memory_tokens/mean memory/cut reward".split(),
        *"frac_reward_zero_std kl ratio/mean ratio/max clip/active clip/outside".split(),
        *"behavior_gap/mean behavior_gap/max".split(),
    ]
    assert [name for name in names if f"`{name}`" not in table] == []


def test_every_path_and_test_that_the_readme_names_exists():
    names = re.findall(r"`(\w+\.py)::(test_\w+)`", README) + re.findall(r"(?:scripts|trainer)/[\w./]+", README)
    assert len(names) > 15
    for name in names:
        if isinstance(name, tuple):
            assert f"def {name[1]}(" in (ROOT / "tests" / name[0]).read_text(encoding="utf-8"), name
        else:
            assert (ROOT / name.rstrip(".")).exists(), name
