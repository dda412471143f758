"""Options that were left out: what an adapter's manifest or checkpoint says, in a stated order, and what was taken."""

import json
from types import SimpleNamespace

import pytest
from jobs.reading import Watched
from lib.lookup import make_workflow
from lib.options import (
    ReadingOptions,
    check_held_out,
    evaluation_config,
    reading_defaults,
    resolve,
    template_options,
)

from turngrpo.data_prep.corpus import project_digest
from turngrpo.trainer import GatedMemory, MemAgent
from turngrpo.trainer.export.exporter import Exporter

READ = {
    "workflow": "gated", "layout": "memory_first", "instruction": "look", "strict_format": False, "exit_gate": True,
    "chunk_size": 77, "max_prompt_length": 300, "max_completion_length": 40, "max_memory_tokens": 30,
    "chat_template_kwargs": {"enable_thinking": False}, "reward_weights": [0.7, 0.3], "turn_reward_weights": None,
}  # fmt: skip


def adapter(folder, name="manifest.json", **reading):
    """A folder with what the training says of itself."""
    folder.mkdir(exist_ok=True)
    trainer = {"eval_temperature": 0.0, "chunk_size": 5000, "max_memory_tokens": 1024}
    config = {"workflow": "GatedMemory", "trainer": trainer, "script": {"layout": None}, "reading": READ | reading}
    (folder / name).write_text(json.dumps({"config": config}))
    return str(folder)


@pytest.mark.parametrize("name", ["manifest.json", "turngrpo_run.json"])
def test_the_command_line_then_the_adapter_then_the_defaults(name, tmp_path):
    options = ReadingOptions(max_memory_tokens=12)
    taken = resolve(options, reading_defaults(), adapter(tmp_path / "v0001", name))
    assert options.max_memory_tokens == 12 and taken["max_memory_tokens"] == (12, "command line")
    # The resolved value of the reading, not the null of the script nor the default of the trainer's config.
    assert options.layout == "memory_first" and taken["layout"][1].endswith(name)
    assert options.chunk_size == 77 and options.strict_format is False and options.eval_temperature == 0.0
    assert options.chat_template_kwargs == {"enable_thinking": False}
    assert taken["eval_top_p"] == (0.7, "default")


def test_options_of_a_workflow_are_of_that_workflow(tmp_path):
    options = ReadingOptions(workflow="memagent")
    resolve(options, reading_defaults(), adapter(tmp_path / "v"))
    assert options.instruction is None and options.layout is None  # not the gated ones
    assert options.chunk_size == 77
    made = make_workflow("memagent", layout=options.layout, instruction=options.instruction)
    assert made.layout == "memory_first" and made.instruction == MemAgent().instruction
    ungated = ReadingOptions()
    resolve(ungated, reading_defaults(), adapter(tmp_path / "u", workflow="memagent", instruction="remember"))
    assert (ungated.workflow, ungated.instruction) == ("memagent", "remember")  # an adapter of another workflow


def test_a_folder_that_says_nothing_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="holds no manifest.json and no turngrpo_run.json: .* are the defaults"):
        resolve(ReadingOptions(), reading_defaults(), str(tmp_path))


def test_a_version_says_how_its_workflow_reads_in_values_that_are_never_null():
    args = SimpleNamespace(to_dict=lambda: {}, **{name: 1 for name in READ})
    facts = Exporter(args, None, None, GatedMemory()).facts(3)["config"]["reading"]
    assert facts["workflow"] == "gated" and facts["layout"] == "chunk_first" and facts["exit_gate"] is True
    assert facts["instruction"] == GatedMemory().instruction and facts["strict_format"] is True
    facts = Exporter(args, None, None, MemAgent()).facts(3)["config"]["reading"]
    assert facts["workflow"] == "memagent" and facts["layout"] == "memory_first"


def test_projects_that_were_trained_on_are_not_evaluated_on(tmp_path):
    digests = [project_digest(project) for project in ("acme", "zeta")]
    folder = adapter(tmp_path / "v", train_projects=digests)
    check_held_out([{"project": "other"}], folder)
    check_held_out([{"project": "acme"}], None)
    with pytest.raises(ValueError, match=r"1 of the projects .* were trained on \('acme'\), says .*manifest"):
        check_held_out([{"project": "acme"}, {"project": "other"}], folder)
    assert "acme" not in (tmp_path / "v" / "manifest.json").read_text()


def test_the_chat_template_gets_the_same_options_as_in_training():
    assert template_options('{"enable_thinking": false}') == {"enable_thinking": False}
    config = evaluation_config(chat_template_kwargs='{"enable_thinking": false}')
    assert config.chat_template_kwargs == {"enable_thinking": False}
    for text in ("{", "[1]", "1"):
        with pytest.raises(ValueError, match="expected a JSON object"):
            template_options(text)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("memagent", {"exit_gate": True}, "memagent has no gates"),
    ("single_turn", {"layout": "chunk_first"}, "--layout belong to the workflows gated and memagent"),
    ("gate", {}, "expected one of gated, memagent, single_turn"),
])  # fmt: skip
def test_workflows_that_make_no_sense(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_workflow(name, **options)


def test_any_workflow_can_be_watched():
    seen = []
    workflow = MemAgent()
    workflow.advance = lambda state, turn: "goes on"
    watched = Watched(workflow, lambda state, turn: seen.append((state, turn)))
    assert watched.strict_format is False and watched.advance("state", "turn") == "goes on"
    assert seen == [("state", "turn")]
