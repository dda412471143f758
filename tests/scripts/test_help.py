"""--help of every command: a page by topic; what is missing is named; nothing heavy is imported before that."""

import pytest
from arguments import commands
from arguments.help_page import INHERITED, TOPICS, examples, own_options
from lab.config import LabConfig
from lib.options import Parser, parse_options
from loaded import run
from run_lab import LabArguments
from trl import SFTConfig

from turngrpo.trainer import TurnGRPOConfig
from turngrpo.trainer.inherited_options import HONOURED_WITH_VLLM, REFUSED

KINDS = {
    "train": [commands.TrainArguments, TurnGRPOConfig, commands.ModelOptions],
    "sft": [commands.SftArguments, SFTConfig, commands.ModelOptions],
    "evaluate": [commands.EvaluateArguments],
    "read_document": [commands.ReadArguments],
    "inspect_group": [commands.InspectArguments, commands.UpdateArguments, commands.ModelOptions],
    "export_adapter": [commands.ExportArguments],
    "report": [commands.ReportArguments],
    "run_lab": [LabArguments, LabConfig],
}

TRAINING = {"trl", "transformers", "torch", "accelerate", "peft"}
MAY_IMPORT = {"train": TRAINING, "sft": TRAINING} | {
    name: {"trl"} for name in ("evaluate", "read_document", "inspect_group", "export_adapter", "report", "run_lab")
}


@pytest.mark.parametrize(
    "script", ["train", "evaluate", "read_document", "inspect_group", "export_adapter", "report", "run_lab"]
)
def test_help_imports_nothing_heavy_and_is_a_page(script):
    shown, _, status, heavy = run(script, "--help")
    assert status == "0" and heavy <= MAY_IMPORT[script], heavy
    lines = shown.splitlines()
    assert len(lines) <= 140 and max(map(len, lines)) <= 100
    assert lines[0].startswith(f"usage: {script}.py")
    assert shown.count("scripts/") >= 2  # two examples


def page(name, argument, doc="Does it.", hidden=(), capsys=None):
    with pytest.raises(SystemExit):
        parse_options(KINDS[name], [argument], doc, hidden)
    return capsys.readouterr().out


def test_ours_come_first_by_topic_and_the_refused_are_in_neither(capsys):
    hidden = set(REFUSED) - set(HONOURED_WITH_VLLM)
    short = page("train", "--help", hidden=hidden, capsys=capsys)
    whole = page("train", "--help_all", hidden=hidden, capsys=capsys)
    topics = [line[:-1] for line in short.splitlines() if line.endswith(":") and line[:-1] in TOPICS]
    assert topics == list(TOPICS)
    assert "* --corpus " in short and "* --model_name_or_path " in short and "* --workflow" not in short
    assert "options inherited from TRL and transformers: --help_all" in short
    for name in (
        "alpha",
        "learning_rate",
        "num_generations",
        "output_dir",
        "use_peft",
        "lora_r",
        "beta",
        "save_steps",
    ):
        assert f" --{name} " in short, name
    assert " --adam_beta1 " in whole and " --adam_beta1 " not in short
    for name in ("top_k", "delta", "use_liger_kernel"):
        assert f" --{name} " not in whole, name
    assert " --vllm_server_base_url " in whole  # taken with rollout_engine="vllm"
    # The first sentence of ours is whole; an inherited one is a line, and all of its text stands in --help_all alone.
    flat, cut = " ".join(short.split()), "Aggregates token-level losses by normalizing"
    assert "get the current adapter before each rollout [transformers]" in flat
    assert cut not in flat and cut in " ".join(whole.split())


def test_a_default_of_zero_is_shown(capsys):
    assert "KL coefficient [0.0]" in page("train", "--help", capsys=capsys)


@pytest.mark.parametrize("name", KINDS)
def test_every_option_of_ours_has_a_topic(name):
    of_topics = {one for names in TOPICS.values() for one in names.split()}
    assert own_options(KINDS[name]) - of_topics == set()
    parser = Parser(KINDS[name], "", ())
    known = {action.dest for action in parser._actions}
    assert own_options(KINDS[name]) <= known


def test_every_name_of_the_table_is_an_option_once():
    names = [one for listed in TOPICS.values() for one in listed.split()]
    known = {action.dest for kinds in KINDS.values() for action in Parser(kinds, "", ())._actions}
    assert len(names) == len(set(names))
    assert set(names) | set(INHERITED) <= known
    assert set(INHERITED) <= set(names)


def test_examples_are_commands_with_their_continuations():
    doc = "Does it.\n\n    python a.py --x 1 \\\n        --y 2\n\nand\n\n    b.py\n    c.py\n"
    joined = doc.replace("\\\n", "")  # as Python reads a docstring
    assert examples(joined) == ["    python a.py --x 1 --y 2", "    b.py"]
    long = examples(f"    python a.py {'--option value ' * 8}")
    assert len(long) == 2 and long[0].endswith(" \\") and long[1].startswith(" " * 8)


MODEL = "--model_name_or_path is missing: expected a model's folder or its name on the Hub"


@pytest.mark.parametrize(("name", "given", "messages"), [
    ("train", [], ["--corpus is missing: expected a corpus file", MODEL]),
    ("train", ["--corpus", "c"], [MODEL]),
    ("train", ["--model_name_or_path", "m"], ["--corpus is missing: expected a corpus file; "]),
    ("train", ["--workflow", "single_turn", "--model_name_or_path", "m"], ["--dataset_name is missing: expected"]),
    ("train", ["--workflow", "my.Own", "--model_name_or_path", "m"], ["--corpus is missing: .* or --dataset_name"]),
    ("sft", ["--model_name_or_path", "m"], ["--corpus is missing: expected a corpus file.*, or --targets"]),
    ("sft", ["--targets", "t"], [MODEL]),
    ("evaluate", ["--model", "m"], ["--corpus is missing", "--output is missing: expected a JSON file to write"]),
    ("read_document", [], ["--model is missing", "--document is missing: expected a file", "--question is missing"]),
    ("read_document", ["--model", "m", "--document", "d", "--question", " "], ["--question is missing"]),
    ("inspect_group", [], [MODEL]),
    ("inspect_group", ["--workflow", "gated", "--model_name_or_path", "m"], ["--corpus is missing"]),
    ("report", [], ["--run is missing: expected an output folder of train.py"]),
    ("export_adapter", [], ["--checkpoint is missing: expected a checkpoint-N"]),
])  # fmt: skip
def test_every_option_that_is_missing_is_named(name, given, messages):
    with pytest.raises(ValueError, match="(?s)" + "\n".join(f"{text}[^\n]*" for text in messages)) as raised:
        parse_options(KINDS[name], given)
    assert str(raised.value).count("is missing") == len(messages)


def test_nothing_is_missing_in_a_quickstart():
    options, _, _ = parse_options(KINDS["train"], ["--quickstart"])
    assert options.needs() == {}
