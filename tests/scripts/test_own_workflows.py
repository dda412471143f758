"""--workflow by dotted path: a class or an instance of the user's, in training, evaluation and reading."""

import json
import sys

import evaluate
import pytest
import train
from jobs import quickstart
from lib.lookup import make_workflow
from lib.options import ReadingOptions, reading_defaults, resolve
from lib.running import SetupError

from turngrpo.data_prep import build_needle_corpus, write_corpus
from turngrpo.trainer.warm_start import row_examples

MODULE = """
from turngrpo.trainer import GatedMemory


class Brief(GatedMemory):
    def __init__(self, layout="chunk_first", words=3):
        super().__init__(layout, True, True, "Read.")
        self.words = words


class Silent:
    def __init__(self, must):
        self.must = must


made = Brief("memory_first")
number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a user's module in the current directory."""
    name = f"own_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    yield name
    sys.modules.pop(name, None)


def test_a_class_gets_the_options_that_it_takes_and_an_instance_is_itself(module):
    made = make_workflow(f"{module}.Brief", layout="memory_first", instruction=None)
    assert (made.layout, made.words, made.instruction) == ("memory_first", 3, "Read.")
    assert make_workflow(f"{module}.made") is sys.modules[module].made


@pytest.mark.parametrize(("name", "options", "message"), [
    ("Brief", {"layout": "chunk_first", "instruction": "x"}, "^--instruction: the constructor of .*Brief takes no"),
    ("made", {"layout": "chunk_first"}, "^--layout: an instance, .*made takes no such option"),
    ("Silent", {}, "cannot be made .*'must'.*arguments have defaults"),
    ("number", {}, r"a int without bind\(tokenizer, config\), start\(row\), prompt\(state\), advance"),
    ("Gone", {}, "cannot be imported .*has no attribute 'Gone'.*start from the folder of its module"),
])  # fmt: skip
def test_what_is_wrong_with_a_workflow_of_ones_own(module, name, options, message):
    with pytest.raises(ValueError, match=message):
        make_workflow(f"{module}.{name}", **options)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Folder with a tiny model and a corpus of two projects."""
    folder = tmp_path_factory.mktemp("start")
    manifest, rows = build_needle_corpus("multi_key", 2, 4, 2, 8, shared_keys=True)
    text = [f"{row['question']}\n{chunk['text']}" for row in rows for chunk in row["chunks"]]
    tokenizer = quickstart.train_tokenizer(text)
    quickstart.tiny_model(tokenizer, 0, hidden_size=48).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_corpus(folder / "corpus.jsonl", manifest, rows)
    return folder


def test_train_and_evaluate_with_it_and_its_name_is_kept(start, module, tmp_path, capsys):
    out, corpus = tmp_path / "out", ["--corpus", str(start / "corpus.jsonl")]
    model = ["--model_name_or_path", str(start / "model"), "--use_peft", "--lora_r", "2"]
    sizes = "--max_prompt_length 120 --max_completion_length 4 --max_memory_tokens 8 --per_device_train_batch_size 2"
    more = "--num_generations 2 --max_steps 1 --save_steps 1 --bf16 false --gradient_checkpointing false --use_cpu"
    given = [*corpus, *model, *sizes.split(), *more.split(), "--output_dir", str(out), "--validation_rows", "1"]
    own = ["--workflow", f"{module}.Brief", "--reward_funcs", "answer_reward"]
    assert train.main([*given, *own]) == 0
    version = out / "adapters" / "out" / "v0001"
    config = json.loads((version / "manifest.json").read_text())["config"]
    assert (config["workflow"], config["script"]["workflow"]) == ("Brief", f"{module}.Brief")
    facts = json.loads((out / "checkpoint-1" / "turngrpo_run.json").read_text())["config"]
    assert facts["script"]["workflow"] == f"{module}.Brief"
    # An evaluation takes it from the manifest, where it can be imported; another code is another identity.
    options = ReadingOptions()
    resolve(options, reading_defaults(), str(version))
    assert options.workflow == f"{module}.Brief"
    sys.modules.pop(module)
    source = tmp_path / f"{module}.py"
    source.write_text(source.read_text().replace("self.words = words", "self.words = words + 1"))
    again = [*given, *own, "--max_steps", "2", "--resume_from_checkpoint", "true"]
    with pytest.raises(Exception, match="workflow"):
        train.main(again)
    source.unlink()
    sys.modules.pop(module, None)
    where = ["--model", str(start / "model"), "--adapter", str(version), *corpus, "--output", str(tmp_path / "e.json")]
    with pytest.raises(SetupError, match=f"--workflow is '{module}.Brief', which cannot be imported.*PYTHONPATH"):
        evaluate.main([*where, "--allow_overlap"])


def test_a_workflow_without_memory_has_no_gold_turns():
    class State:
        question = "?"

    class Asking:
        chat = None

        def start(self, row):
            return State()

    row = {"id": "r", "question": "?", "answers": ["a"], "chunks": [{"text": "a", "evidence": True}]}
    with pytest.raises(ValueError, match=r"Asking carries no memory: .*\(sft.py --targets\)"):
        row_examples(row, Asking())
