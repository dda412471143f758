"""The commands of README.md, read out of its text and run in its order: a tiny model under the name that it gives."""

import functools
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import train
from hub_server import hub_for_client
from jobs import quickstart, training
from openai_server import serving
from safetensors.torch import load_file
from transformers import AutoTokenizer

from turngrpo.data_prep import load_corpus
from turngrpo.trainer.export.versions import read_version

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
WORDS = "Closing is on May 3. Ann Lee signs. "

# Commands that are run, by a part that only they have, with the options added to be quick.
SMALL = "--chunk_size 300 --disable_tqdm true --max_steps"
RUN = {
    "scripts/train.py$": "",  # smaller by `quickstart_sizes`
    "prepare_corpus.py code": "--rows_per_project 2 --min_chars 1000 --max_chars 2000",
    "prepare_corpus.py needle": "",
    "prepare_corpus.py world": "--rows_per_project 2 --chunk_size 40",
    "prepare_corpus.py memagent": "",
    "sft.py --corpus": f"{SMALL} 1",
    "lora.yaml": f"{SMALL} 2 --num_generations 4 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 "
    "--max_completion_length 8 --save_steps 1 --eval_steps 1 --validation_rows 1 --weight_decay 0.5 "
    "--learning_rate 0.01",
    "evaluate.py --model warm": "--rows 2",
    "report.py --run out": "",
    "export_adapter.py --checkpoint out --name": "",
    "export_adapter.py --checkpoint out/adapters": "",
    "vllm serve": "",  # the tests' own server, with the model and the adapter that the command names
    "read_document.py": "",
    "evaluate.py --base_url": "--rows 2",
}
NOT_RUN = {
    "pytest": "these tests themselves",
    "uv sync": "asks the package registry",
    "qwen2.5_3b.yaml": "a model of 3 billion parameters; tests/test_readme.py parses it",
}


def commands():
    """Every command of README, its lines joined: those of indented blocks, and those that stand in a sentence."""
    found = []
    for block in re.sub(r"```.*?```", "", README, flags=re.DOTALL).replace("\\\n", " ").split("\n\n"):
        lines = block.splitlines()
        if all(line.startswith("    ") for line in lines):
            found += [line for line in lines if not line.lstrip().startswith("{")]
        else:
            found += re.findall(r"`((?:uv|accelerate|python|vllm|pip|bash)\s[^\s`]+\s[^`]+)`", block)
    return [" ".join(line.split()) for line in found]


def command(part):
    (found,) = [line for line in commands() if re.search(part, line)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with every file that README's commands name and do not make."""
    folder = tmp_path_factory.mktemp("readme")
    for name in ("scripts", "accelerate_configs"):
        (folder / name).symlink_to(ROOT / name)
    for package in ("data_prep", "rewards", "trainer"):
        shutil.copytree(ROOT / package, folder / "path" / "to" / "packages" / package)
    for project in ("guide", "manual"):
        (folder / "path" / "to" / "documentation" / project).mkdir(parents=True)
        parts = [f"The {project} says in its part {number} what is signed and when. " * 4 for number in range(40)]
        (folder / "path" / "to" / "documentation" / project / "text.md").write_text("\n\n".join(parts))
    records, facts = [], []
    for title, signer in (("Acts", "Ann Lee"), ("Bills", "Bo Kim"), ("Deeds", "Cy Ray")):
        asked, says = f"Who signs the {title}?", f"{signer} signs."
        context = f"Document 1:\n{title}\n{says}\n\nDocument 2:\nDates\nClosing is on May 3."
        judged, more = {"ground_truth": [signer], "style": "rule"}, {"question": asked, "num_docs": 2}
        prompt = [{"role": "user", "content": asked}]
        records.append({"prompt": prompt, "context": context, "reward_model": judged, "extra_info": more})
        documents = [[title, [says]], ["Dates", ["Closing is on May 3."]]]
        facts.append({"question": asked, "context": documents, "supporting_facts": [[title, 0]]})
    pq.write_table(pa.Table.from_pylist(records), folder / "hotpotqa.parquet")
    (folder / "facts.json").write_text(json.dumps(facts))
    (folder / "contract.md").write_text(WORDS * 9)
    code = [path.read_text() for path in sorted((ROOT / "rewards").glob("*.py"))]
    tokenizer = quickstart.train_tokenizer([WORDS, *code])
    sizes = {"hidden_size": 48, "max_position_embeddings": 16384}
    quickstart.tiny_model(tokenizer, 0, **sizes).save_pretrained(folder / "MODEL")
    tokenizer.save_pretrained(folder / "MODEL")
    return folder


def test_every_command_is_run_or_has_a_reason():
    known = [[part for part in (*RUN, *NOT_RUN) if re.search(part, line)] for line in commands()]
    assert [line for line, parts in zip(commands(), known, strict=True) if len(parts) != 1] == []
    order = [parts[0] for parts in known]
    assert [part for part in order if part in RUN] == list(RUN)  # each once, in README's order
    assert set(order) == {*RUN, *NOT_RUN}


def run(part, *more, without=()):
    """Run a command of README by its script, in this process."""
    words = shlex.split(f"{command(part)} {RUN[part]}")
    at = next(index for index, word in enumerate(words) if word.startswith("scripts/"))
    given = [word for word in words[at + 1 :] if word not in without]
    assert importlib.import_module(Path(words[at]).stem).main([*given, *more]) == 0


@contextmanager
def served():
    """The server that README starts with vLLM: its model, and its adapter under its name."""
    words = shlex.split(command("vllm serve"))
    name, _, path = words[words.index("--lora-modules") + 1].partition("=")
    with serving(words[2], max_model_len=4096, max_lora_rank=int(words[words.index("--max-lora-rank") + 1])) as server:
        server.load({"lora_name": name, "lora_path": path})
        yield server


@pytest.fixture
def quickstart_sizes(tmp_path, monkeypatch):
    """The main job on a corpus of 12 rows, with one update."""
    text = train.QUICKSTART.read_text()
    sizes = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4, "validation_rows": 1}
    sizes["max_completion_length"] = 8
    for name, value in sizes.items():
        text, found = re.subn(rf"^{name}: \d+$", f"{name}: {value}", text, flags=re.MULTILINE)
        assert found == 1
    (tmp_path / "quickstart.yaml").write_text(text)
    monkeypatch.setattr(train, "QUICKSTART", tmp_path / "quickstart.yaml")
    small = functools.partial(quickstart.StartOptions, 2, 6, 2, 8, reading_updates=2, spoiling_updates=2)
    monkeypatch.setattr(training, "StartOptions", small)


def test_the_main_job(folder, monkeypatch, quickstart_sizes):
    monkeypatch.chdir(folder)
    run("scripts/train.py$")
    output = folder / "outputs" / "quickstart"
    summary = json.loads((output / "summary.json").read_text())
    assert (output / "curves.png").is_file() and Path(summary["adapter"], "adapter_config.json").is_file()


def trained(output):
    """What a run leaves that a resume must give again: the weights, and what was logged of every update."""
    logs = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in log.items() if "time" not in key and "second" not in key} for log in logs]
    weights = load_file(output / "adapters" / "out" / "v0001" / "adapter_model.safetensors")
    return kept, {name: tensor.tolist() for name, tensor in weights.items()}


def test_from_a_corpus_to_an_answer(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    tokenizer = AutoTokenizer.from_pretrained("MODEL")
    for kind, name in {"code": "code", "needle": "needle", "world": "world", "memagent": "m"}.items():
        run(f"prepare_corpus.py {kind}")
        assert load_corpus(f"{name}.jsonl", tokenizer=tokenizer, chunk_size=300)["train"].num_rows > 0

    run("sft.py --corpus")
    assert Path("warm/model.safetensors").is_file() and Path("warm/tokenizer_config.json").is_file()

    # "with --dry_run first: it checks ... and writes nothing", by the launcher itself
    words = shlex.split(f"{command('lora.yaml')} {RUN['lora.yaml']}")
    assert words[:3] == ["uv", "run", "accelerate"] and words[3] == "launch"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *words[4:]]
    done = subprocess.run(launcher, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nothing was trained or written" in done.stdout and not Path("out").exists()

    # "The same without --dry_run trains and leaves ..."
    (dry,) = re.findall(r"The same without `(--\w+)`\s+trains", README)
    run("lora.yaml", without=(dry,))
    left = {path.name for path in Path("out").iterdir()}
    assert {"summary.json", "metrics.jsonl", "curves.png", "checkpoint-1", "checkpoint-2", "rollouts"} <= left
    first, version = trained(Path("out")), read_version("out/adapters/out/v0001")
    base = json.loads(Path("out/adapters/out/v0001/adapter_config.json").read_text())["base_model_name_or_path"]
    exported = json.loads(Path("out/summary.json").read_text())["exported"]
    assert exported == {"version": "v0001", "update": version["update"], "is_best": True}
    assert Path(base) == Path("warm").resolve()
    saved = [load_file(f"out/checkpoint-{update}/adapter_model.safetensors") for update in (1, 2)]
    assert any(not torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())

    # "After a Ctrl-C or a kill the same command with ... goes on, bit for bit."
    for name in ("checkpoint-2", "adapters"):
        shutil.rmtree(f"out/{name}")
    Path("out/summary.json").unlink()
    (goes_on,) = re.findall(r"the same command\s+with\s+`(--resume_from_checkpoint true)` goes on", README)
    run("lora.yaml", *goes_on.split(), without=(dry,))
    assert trained(Path("out")) == first and Path("out/summary.json").is_file()

    run("evaluate.py --model warm")
    report = json.loads(Path("evaluation.json").read_text())
    assert list(report["policies"]) == ["base", "adapter"] and report["adapter_minus_base"]
    Path("evaluation.json").unlink()

    run("report.py --run out")
    assert "<h1" in Path("out/report.html").read_text(encoding="utf-8")

    run("export_adapter.py --checkpoint out --name")
    assert read_version("out/adapters/contracts/latest")["update"] == 2
    with hub_for_client(monkeypatch, folder) as hub:
        run("export_adapter.py --checkpoint out/adapters")
        assert "adapter_model.safetensors" in hub.files("owner/contracts", "v0001")[1]
    assert Path("out/adapters/contracts/v0001-merged/model.safetensors").is_file()

    with served() as server:
        capsys.readouterr()
        run("read_document.py", "--base_url", server.url)
        shown = capsys.readouterr().out
        assert "chunk 1/1" in shown and "answer: " in shown
        run("evaluate.py --base_url", "--base_url", server.url)
    assert list(json.loads(Path("evaluation.json").read_text())["policies"]) == ["base", "adapter"]
