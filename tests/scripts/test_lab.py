"""The laboratory: schedule, data, stages and scores, and the whole path on a tiny model, killed and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import report
import run_lab
import torch
from lab import data, exercise, experiment, stages, testing, training
from lab.archive import archive_state, unpacked_state
from lab.config import LabConfig
from lab.training import Checkpoints, optimizers
from lib.output import held
from lib.schedule import learning_rate_factor
from page import sources, turns
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

from turngrpo.data_prep import stock_arithmetic
from turngrpo.trainer.forward.policy import Policy, tensors_digest
from turngrpo.trainer.runs import ledger
from turngrpo.trainer.runs.compare import compare_states
from turngrpo.trainer.runs.ledger import read
from turngrpo.trainer.runs.proof import ResumeError, write_proof
from turngrpo.trainer.warm_start import completion_nll, fit, target_examples

ROOT = Path(__file__).parents[2]


# ---- numbers ----


def test_the_schedule_by_hand():
    # 200 updates: 20 rise by a twentieth each, number 20 has the peak too, and the 179 steps from it to number 199
    # fall by 0.9/179 each: number 21 has 0.994972, and numbers 109 and 110, around the middle, 0.552514 and 0.547486.
    # Wrong: falling from number 19 on gives number 20 0.995, 21 0.99 and 109 0.55; transformers' would begin at 0.
    factors = [learning_rate_factor(update, 200, 0.1, 0.1) for update in range(200)]
    assert factors[:2] == [0.05, 0.1] and factors[19] == factors[20] == 1.0 == max(factors)
    assert factors[21] == pytest.approx(0.994972, abs=1e-6)
    assert factors[109:111] == pytest.approx([0.552514, 0.547486], abs=1e-6)
    assert factors[199] == pytest.approx(0.1, abs=1e-12)
    assert (
        learning_rate_factor(200, 200, 0.1, 0.1) == factors[199]
    )  # what the scheduler asks for after the last update


@pytest.mark.parametrize(
    ("updates", "warm", "later"),
    [
        (48, 4, {4: 1.0, 5: 1 - 0.9 / 43, 47: 0.1}),  # 4.8 is cut to 4; rounded, number 3 would have 0.8
        (218, 21, {21: 1.0, 22: 1 - 0.9 / 196, 217: 0.1}),  # 21.8 to 21; rounded, number 20 would have 0.9545
        (40, 4, {4: 1.0, 39: 0.1}),
        (9, 1, {1: 1.0, 8: 0.1}),  # 0.9 to 0, and one at least
        (2, 1, {1: 1.0}),
        (1, 1, {}),
    ],
)
def test_the_warm_up_is_cut_to_whole_updates(updates, warm, later):
    factors = [learning_rate_factor(update, updates, 0.1, 0.1) for update in range(updates)]
    assert factors[:warm] == [(update + 1) / warm for update in range(warm)] and factors[warm - 1] == 1.0
    assert {update: factors[update] for update in later} == pytest.approx(later, abs=1e-12)
    assert min(factors) > 0


def test_the_minimum_preset_is_the_full_experiment():
    _, config = run_lab.parse(["--preset", "minimum"])
    assert config == LabConfig()
    assert config.revision == "7ae557604adf67be50417f59c2c2f167def9a775"
    assert config.prompts * config.generations * config.grpo_iterations == 1600
    assert config.updates_per_rollout * config.grpo_iterations == 200
    assert (config.warm_start_epochs * 128 // config.batch_size, config.sft_epochs * 872 // config.batch_size) == (
        48,
        218,
    )
    learning = [
        stage for stage in experiment.stages(config) if stage.run in (experiment.train_sft, experiment.train_grpo)
    ]
    assert len(learning) == 15  # five branches, each straight, interrupted and resumed
    assert sum(bool(stage.options.get("keep_model")) for stage in learning) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "large"], "--preset is 'large': expected minimum or smoke"),
        (["--grpo_interrupt", "100"], "--grpo_interrupt is 100: expected 1 to grpo_iterations - 1 = 99"),
        (
            ["--exercise_generations", "4"],
            r"--exercise_generations is \[4\]: expected sizes that differ from each other and from --generations 4",
        ),
        (["--micro_batch_size", "3"], "--micro_batch_size is 3: expected a divisor of batch_size"),
        (["--micro_batch_size", "0"], "--micro_batch_size is 0: expected 1 or more"),
        (["--batch_size", "0"], "--batch_size is 0: expected 1 or more"),
        (["--max_prompt_length", "0"], "--max_prompt_length is 0: expected 1 or more"),
        (["--warmup", "10"], "--warmup is 10.0: expected a share, 0 to 1"),  # 10 updates were meant: it never peaks
        (["--final", "nan"], "--final is nan: expected a share, 0 to 1"),
        (["--grpo_learning_rate", "nan"], "--grpo_learning_rate is nan: expected a positive number"),
        (["--sft_learning_rate=-2e-5"], "--sft_learning_rate is -2e-05: expected a positive number"),
        (["--sft_epochs", "1"], "stops after one"),
        (["--test_rows", "7"], "--test_rows is 7: expected an even number, 2 to 200"),
    ],
)
def test_wrong_numbers_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_lab.parse(arguments)


def test_another_model_is_not_taken_for_the_source_experiments(tmp_path, monkeypatch):
    model, tokenizer = tiny()
    monkeypatch.setattr(data, "load_model", lambda options: model)
    monkeypatch.setattr(data, "load_tokenizer", lambda name, revision: tokenizer)
    with pytest.raises(ValueError, match="parameters .*, expected 494032768; eos .*, expected 151645"):
        data.make_model(tmp_path, LabConfig())


# ---- who is given what ----


def test_problems_lie_apart_by_use_and_prompts_hold_no_label(tmp_path):
    data.make_data(tmp_path, LabConfig())
    rows = {path.stem: data.read_rows(path) for path in tmp_path.iterdir()}
    sizes = {name: len(found) for name, found in rows.items()}
    assert sizes == {
        "warm_start": 128, "sft": 872, "rl": 872, "validation": 200, "test_prompts": 200, "test_labels": 200,
    }  # fmt: skip
    assert all(row.keys() == {"id", "prompt", "stratum"} for row in rows["test_prompts"])
    assert [row["id"] for row in rows["rl"]] == [row["id"] for row in rows["sft"]]
    assert not {row["id"] for row in rows["rl"]} & {row["id"] for row in rows["warm_start"]}
    answers = [f'"final_stock": {row["problem"]["final_stock"]}' for row in rows["test_labels"]]
    text = (tmp_path / "test_prompts.jsonl").read_text()
    assert not any(answer in text for answer in answers)


def test_a_part_of_the_test_has_both_strata(tmp_path):
    data.make_data(tmp_path, LabConfig(test_rows=6, validation_rows=5))
    labels = data.read_rows(tmp_path / "test_labels.jsonl")
    assert [row["problem"]["stratum"] for row in labels] == ["ID50"] * 3 + ["OOD100"] * 3
    assert [row["id"] for row in labels] == [row["id"] for row in data.read_rows(tmp_path / "test_prompts.jsonl")]
    assert len(data.read_rows(tmp_path / "validation.jsonl")) == 5


def test_learning_sees_no_test_and_inference_no_label():
    for stage in experiment.stages(LabConfig()):
        given = " ".join(stage.inputs.values())
        if stage.run in (experiment.train_sft, experiment.train_grpo):
            assert "test" not in given
        if stage.run is experiment.respond:
            model = stage.inputs["model"]
            assert dict(stage.inputs) == {"model": model, "prompts": "data/test_prompts.jsonl"}
            assert model.endswith("/straight/model")
        if stage.run is experiment.probe:
            assert stage.inputs["examples"] == "data/validation.jsonl"
        if "test_labels" in given:
            assert stage.name in ("scores", "exercise/scores")


def test_the_exercise_begins_when_the_main_experiment_is_protected():
    names = [stage.name for stage in experiment.stages(LabConfig())]
    for name in ("grpo/straight", "responses/warm_start", "responses/sft", "responses/grpo", "scores"):
        assert names.index(name) < names.index("main") < names.index("grpo_g2/straight")
    (main,) = (stage for stage in experiment.stages(LabConfig()) if stage.name == "main")
    assert {"scores/scores.json", "grpo/straight/model", "responses/sft/responses.parquet"} <= set(
        main.inputs.values()
    )


# ---- scores ----


def test_greedy_is_one_response_each_and_every_draw_counts(tmp_path):
    # Two problems (ID50: 3, OOD100: 60), one greedy response and four draws each.
    problems = [
        {"initial": 3, "deliveries": [0, 0], "withdrawals": [0, 0], "stratum": "ID50"},
        {"initial": 60, "deliveries": [0, 0], "withdrawals": [0, 0], "stratum": "OOD100"},
    ]
    labels = [{"id": f"test-{i}", "problem": problem} for i, problem in enumerate(problems)]
    data.write_rows(tmp_path / "labels.jsonl", labels, ["id", "problem"])
    right, wrong = '{"final_stock": 3}', '{"final_stock": 4}'
    texts = {"test-0": [wrong, right, wrong, wrong, "no"], "test-1": [wrong] * 5}
    rows = [
        {"id": row_id, "kind": kind, "draw": draw, "text": text, "finish_reason": "eos",
         "completion_ids": [1, 2], "logprobs": [0.0, 0.0]}
        for row_id, said in texts.items()
        for (kind, draw), text in zip(testing.numbered(4), said, strict=True)
    ]  # fmt: skip
    rows[9]["finish_reason"] = "length"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "grpo.parquet")
    testing.score_responses(tmp_path, LabConfig(), labels=tmp_path / "labels.jsonl", grpo=tmp_path / "grpo.parquet")
    table = json.loads((tmp_path / "scores.json").read_text())["grpo"]
    assert (table["all"]["greedy"]["correct"], table["all"]["greedy"]["responses"]) == (0, 2)
    draws = table["all"]["draws"]
    assert (draws["correct"], draws["responses"]) == (1, 8)  # best of four would be 1 of 2, or 4 of 8
    assert draws["correct_by_draw"] == [1, 0, 0, 0]
    assert (draws["valid_json"], draws["without_eos"]) == (6, 1)
    assert draws["reasons"] == {"completion_without_eos": 1, "invalid_json_schema": 1}
    assert table["ID50"]["draws"]["correct"] == 1 and table["OOD100"]["draws"]["correct"] == 0
    pq.write_table(pa.Table.from_pylist(rows[:-1]), tmp_path / "short.parquet")
    with pytest.raises(AssertionError):  # a missing response is no smaller denominator
        testing.score_responses(
            tmp_path, LabConfig(), labels=tmp_path / "labels.jsonl", grpo=tmp_path / "short.parquet"
        )


# ---- supervised branches ----


def tiny():
    rows = list(stock_arithmetic.build(0)["train"])[:64]
    texts = [f"{row['prompt'][0]['content']}\n{row['completion'][0]['content']}" for row in rows]
    tokenizer = data.train_tokenizer(texts)
    return data.tiny_model(tokenizer, 0, hidden_size=48), tokenizer


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    rows = list(stock_arithmetic.build(0)["train"])[:12]
    rows[0]["completion"] = [{"role": "assistant", "content": "one much longer answer than all of the others"}]
    data.write_rows(folder / "rows.jsonl", rows, ["id", "prompt", "completion"])
    return folder / "rows.jsonl"


def lengths(path, tokenizer):
    """(prompt, response with EOS) of every row in tokens, made by the tokenizer alone."""
    return [
        (
            len(
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
            ),
            len(tokenizer(row["completion"][0]["content"], add_special_tokens=False)["input_ids"]) + 1,
        )
        for row in data.read_rows(path)
    ]


@pytest.fixture
def start_of_training(monkeypatch):
    """`train_sft` with the tiny model up to where training would begin."""
    loaded = tiny()
    monkeypatch.setattr(training, "load", lambda path: loaded)

    class Begun(Exception):
        pass

    def begin(*args, **options):
        raise Begun

    monkeypatch.setattr(training, "fit", begin)

    def start(folder, examples, validation, **limits):
        try:
            training.train_sft(
                folder, LabConfig(**limits), model=folder, examples=examples, validation=validation, epochs=2
            )
        except Begun:
            return "begun"

    return SimpleNamespace(run=start, tokenizer=loaded[1])


def test_prompt_and_response_have_limits_of_their_own(examples, start_of_training, tmp_path):
    found = lengths(examples, start_of_training.tokenizer)
    prompt, response = (max(column) for column in zip(*found, strict=True))
    assert (sum(n == response for _, n in found), response) == (1, found[0][1])  # the fixture's long answer
    fits = {"max_prompt_length": prompt, "max_completion_length": response}
    assert start_of_training.run(tmp_path, examples, examples, **fits) == "begun"
    # One token less for the response: 1 row is over it, however much room the prompts leave in the sum of both.
    roomy = {"max_prompt_length": prompt + 100, "max_completion_length": response - 1}
    with pytest.raises(ValueError) as error:
        start_of_training.run(tmp_path, examples, examples, **roomy)
    assert str(error.value) == (
        f"1 examples have a response (EOS included) of more than {response - 1} tokens; none is truncated: raise "
        f"--max_completion_length\n  {examples}, row 1: {response} tokens"
    )
    # And one less for the prompt, whatever room the responses leave; the row is found in the validation rows as well.
    longest = [n for n, (length, _) in enumerate(found, start=1) if length == prompt]
    roomy = {"max_prompt_length": prompt - 1, "max_completion_length": response + 100}
    short = tmp_path / "short.jsonl"
    rows = [row for n, row in enumerate(data.read_rows(examples), start=1) if n not in longest]
    data.write_rows(short, rows, ["id", "prompt", "completion"])
    assert start_of_training.run(tmp_path, short, short, **roomy) == "begun"
    for imitated, measured in ((examples, short), (short, examples)):
        with pytest.raises(ValueError, match=f"examples have a prompt of more than {prompt - 1} tokens") as error:
            start_of_training.run(tmp_path, imitated, measured, **roomy)
        listed = [f"  {examples}, row {n}: {prompt} tokens" for n in longest]
        assert str(error.value).splitlines()[1:] == listed and "--max_prompt_length" in str(error.value)


def test_up_to_20_rows_over_a_limit_are_named(start_of_training, tmp_path):
    rows = list(stock_arithmetic.build(0)["train"])[:23]
    data.write_rows(tmp_path / "rows.jsonl", rows, ["id", "prompt", "completion"])
    with pytest.raises(ValueError) as error:
        start_of_training.run(
            tmp_path, tmp_path / "rows.jsonl", tmp_path / "rows.jsonl", max_prompt_length=2, max_completion_length=1
        )
    lines = str(error.value).splitlines()
    assert len(lines) == 2 * (1 + 20 + 1)  # each part: what is wrong, 20 rows, how many more
    assert lines[0].startswith("23 examples have a prompt of more than 2") and lines[21] == lines[43] == "  and 3 more"
    assert lines[22].startswith("23 examples have a response (EOS included) of more than 1")
    assert lines[20].startswith(f"  {tmp_path / 'rows.jsonl'}, row 20: ")


def supervised(folder, examples, stop=None, resume=None, micro=4, plain=False, **options):
    model, tokenizer = tiny()
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=1.0), None  # a step is the gradient
    rows, names = target_examples(str(examples), tokenizer)
    config = {
        "num_train_epochs": 2, "per_device_train_batch_size": micro, "gradient_accumulation_steps": 4 // micro,
        "learning_rate": 1e-2, "logging_steps": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "resume_from_checkpoint": resume,
    }  # fmt: skip
    return fit(
        model,
        tokenizer,
        rows,
        names,
        SFTConfig(str(folder), **(config | options)),
        callbacks=[Checkpoints(1, stop)],
        validation=rows,
        optimizers=plain_optimizer if plain else optimizers(model, 1e-2, 6, LabConfig()),
    )


@pytest.mark.parametrize("stop", [3, 4])  # after the first epoch of 3 updates, and within the second, unlogged loss
def test_sft_resumed_is_identical_to_straight(stop, examples, tmp_path):
    straight = supervised(tmp_path / "a", examples)
    supervised(tmp_path / "b", examples, stop=stop)
    assert not (tmp_path / "b" / f"checkpoint-{stop + 1}").exists()
    resumed = supervised(tmp_path / "b", examples, resume=str(tmp_path / "b" / f"checkpoint-{stop}"))
    ends = [trainer.state.log_history[-1] for trainer in (straight, resumed)]
    assert ends[0]["train_loss"] == ends[1]["train_loss"] > 0  # of all updates, not of those since the resume
    assert compare_states(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6") == []
    measured = [log for log in straight.state.log_history if "eval_nll" in log]
    assert [log["step"] for log in straight.state.log_history if "loss" in log] == [2, 4, 6]
    assert [log["step"] for log in measured] == [3, 6] and measured[1]["eval_nll"] < measured[0]["eval_nll"]


@pytest.mark.parametrize("component", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "turngrpo_state_0.pt"])
def test_sft_leaving_out_any_one_component_shows(component, examples, tmp_path):
    supervised(tmp_path / "a", examples)
    supervised(tmp_path / "b", examples, stop=4)
    ours, old = tmp_path / "b" / "checkpoint-4" / component, tmp_path / "b" / "checkpoint-1" / component
    ours.write_bytes(old.read_bytes())
    with pytest.raises(ResumeError, match=f"{component} has"):
        supervised(tmp_path / "b", examples, resume=str(ours.parent))
    write_proof(ours.parent, 4, 1)
    supervised(tmp_path / "b", examples, resume=str(ours.parent))
    assert compare_states(tmp_path / "a" / "checkpoint-6", tmp_path / "b" / "checkpoint-6")


def test_sft_refuses_another_learning_rate_or_other_examples(examples, tmp_path):
    supervised(tmp_path, examples, stop=1)
    with pytest.raises(ValueError, match="learning_rate: the checkpoint's is 0.01, this run's 0.001"):
        supervised(tmp_path, examples, resume=str(tmp_path / "checkpoint-1"), learning_rate=1e-3)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(reversed(examples.read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="corpus: other rows"):
        supervised(tmp_path, other, resume=str(tmp_path / "checkpoint-1"))


def test_sft_weighs_every_token_alike_however_an_update_is_cut(examples, tmp_path):
    options = {"stop": 1, "plain": True, "lr_scheduler_type": "constant", "learning_rate": 1.0}
    whole = supervised(tmp_path / "a", examples, **options)
    for micro in (2, 1):
        cut = supervised(tmp_path / str(micro), examples, micro=micro, **options)
        for name, parameter in whole.model.named_parameters():
            torch.testing.assert_close(cut.model.get_parameter(name), parameter, rtol=1e-4, atol=1e-6)


def test_the_loss_and_the_validation_nll_are_means_over_all_tokens(examples, tmp_path):
    model, tokenizer = tiny()
    rows, _ = target_examples(str(examples), tokenizer)
    losses, means = [], []
    for ids, mask in zip(rows["input_ids"], rows["completion_mask"], strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        own = [-float(logprobs[i - 1, ids[i]]) for i in range(len(ids)) if mask[i]]
        assert ids[-1] == tokenizer.eos_token_id  # EOS is learnt too
        losses += own
        means.append(sum(own) / len(own))
    expected, mean_of_means = sum(losses) / len(losses), sum(means) / len(means)
    assert completion_nll(Policy(model), rows, tokenizer.pad_token_id, 300) == pytest.approx(expected, rel=1e-6)
    assert abs(expected - mean_of_means) > 3e-4  # what the tolerances below could not hide
    trainer = supervised(tmp_path, examples, micro=4, gradient_accumulation_steps=3, logging_steps=1, stop=1)
    logged = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    assert logged == pytest.approx(expected, rel=1e-5)


# ---- archives and stages ----


def test_an_archive_gives_back_every_byte(examples, tmp_path):
    supervised(tmp_path, examples, stop=1)
    checkpoint = tmp_path / "checkpoint-1"
    sizes = archive_state(checkpoint, tmp_path / "state.tar.zst")
    assert sizes["archived_bytes"] == (tmp_path / "state.tar.zst").stat().st_size < sizes["bytes"]
    assert sizes["bytes"] == sum(path.stat().st_size for path in checkpoint.iterdir())
    with unpacked_state(tmp_path / "state.tar.zst", tmp_path) as unpacked:
        assert stages.digests(unpacked) == stages.digests(checkpoint)
        assert compare_states(unpacked, checkpoint) == []
    assert not unpacked.exists()


def add_one(folder, config, *, number, fail=False):
    (folder / "tries").open("a").write("x")
    if fail:
        raise SystemExit(3)
    (folder / "number").write_text(str(int(number.read_text()) + 1))


def write_one(folder, config):
    (folder / "number").write_text("1")


@pytest.fixture
def laboratory(tmp_path, monkeypatch):
    """A laboratory whose stages run in forked processes, so that they can be functions of this file."""
    made = stages.Laboratory(tmp_path / "lab", LabConfig(), Console(quiet=True))
    made._processes = stages.multiprocessing.get_context("fork")
    return made


FIRST = stages.Stage("first", write_one)
SECOND = stages.Stage("second/part", add_one, {"number": "first/number"})


def test_finished_stages_are_kept_and_every_artefact_is_checked(laboratory):
    for _ in range(2):
        laboratory.run(FIRST)
        laboratory.run(SECOND)
    assert (laboratory.root / "second/part/tries").read_text() == "x"
    manifest = json.loads((laboratory.root / "manifest.json").read_text())["stages"]
    one = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"  # sha256 of "1"
    assert manifest["first"]["outputs"] == {"number": one}
    assert manifest["second/part"]["inputs"] == {"first/number": one}
    assert laboratory.verify() == 3
    number = laboratory.root / "first" / "number"
    assert number.stat().st_mode & 0o222 == 0
    number.chmod(0o644)
    number.write_text("2")
    with pytest.raises(ValueError, match=f"number changed since its stage ended: SHA-256 {one} then"):
        laboratory.run(stages.Stage("third", add_one, {"number": "first/number"}))
    with pytest.raises(ValueError, match="number changed"):
        laboratory.verify()


def look_around(folder, config, *, number, elsewhere):
    """Try to read what is no input: beside it, by a link, and by the whole path."""
    (folder / "link").symlink_to(elsewhere)
    said = []
    for path in (number.parent / "secret", folder / "link", Path(elsewhere), Path(os.path.relpath(elsewhere))):
        try:
            said.append(path.read_text())
        except PermissionError as error:
            said.append(str(error).partition(":")[0])
    (folder / "link").unlink()
    (folder / "said.json").write_text(json.dumps([number.read_text(), *said]))


def write_two(folder, config):
    (folder / "number").write_text("1")
    (folder / "secret").write_text("a label")


def test_a_stage_can_open_nothing_but_its_inputs(laboratory):
    laboratory.run(stages.Stage("first", write_two))
    secret = laboratory.root / "first" / "secret"
    assert secret.read_text() == "a label"
    looking = stages.Stage("second", look_around, {"number": "first/number"}, {"elsewhere": str(secret)})
    laboratory.run(looking)
    said = json.loads((laboratory.root / "second" / "said.json").read_text())
    assert said == ["1", *[f"{secret.resolve()} is no input of this stage"] * 4]


# ---- the exercise ----


def turn(iteration, group, member, update, row_id, tokens=2):
    place = {"iteration": iteration, "group": group, "member": member, "update": update, "row_id": row_id}
    return {"id": f"{iteration}-{group}-{member}-0", "behavior_logprobs": [-0.5] * tokens, **place}


def test_groups_made_by_hand():
    """Responses of 2, 2, 4 and 4 tokens; one right of four: (1 - 1/4) / (sqrt(3)/4) = sqrt(3), others -1/sqrt(3)."""
    group = [turn(0, 0, member, 1, "a", 2 if member < 2 else 4) for member in (2, 0, 3, 1)]
    for rewards in ([0.0] * 4, [1.0] * 4):
        made = exercise.constructed(group, rewards)
        assert made["advantages"] == [0.0] * 4 and made["surrogate"] == 0.0
        assert [len(row) for row in made["token_gradients"]] == [2, 2, 4, 4]
        assert not any(value for row in made["token_gradients"] for value in row)
    made = exercise.constructed(group, [1.0, 0.0, 0.0, 0.0])
    assert made["advantages"] == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], abs=1e-6)
    assert made["surrogate"] == pytest.approx(0.0, abs=1e-9)  # the mean of minus the advantages
    assert made["token_gradients"][0] == pytest.approx([-(3**0.5) / (4 * 2)] * 2, abs=1e-6)
    assert made["token_gradients"][2] == pytest.approx([3**-0.5 / (4 * 4)] * 4, abs=1e-6)


def test_budgets_and_problems_are_counted(tmp_path, monkeypatch):
    config = LabConfig(prompts=1, generations=2, exercise_generations=[3], grpo_iterations=3, grpo_interrupt=1,
                       exercise_iterations=2, exercise_interrupt=1, updates_per_rollout=1)  # fmt: skip
    branches = {
        name: [turn(i, 0, m, i + 1, f"row-{i}") for i in range(length) for m in range(size)]
        for name, size, length in (("grpo", 2, 3), ("grpo_g3", 3, 2))
    }
    monkeypatch.setattr(exercise.ledger, "read", lambda path: pa.Table.from_pylist(branches[path.parent.name]))
    (tmp_path / "kept").write_text("x")
    exercise.protect(tmp_path, config, kept=tmp_path / "kept")
    seen = {f"{name}_seen": tmp_path / name / "straight" / "rollouts" for name in branches}

    def check():
        given = {"main": tmp_path / "main.json", "kept": tmp_path / "kept", "sizes": {"grpo": 2, "grpo_g3": 3}}
        exercise.check_exercise(tmp_path, config, **given, **seen)

    check()
    found = json.loads((tmp_path / "exercise.json").read_text())
    assert found["budgets"]["grpo_g3"] == {"problems": 2, "responses": 6, "updates": 2}
    assert (found["same_problems"], found["protected"]) == (2, 1)
    branches["grpo_g3"][0]["row_id"] = branches["grpo_g3"][1]["row_id"] = branches["grpo_g3"][2]["row_id"] = "row-9"
    with pytest.raises(ValueError, match="grpo_g3 saw other problems than grpo in the first 2 rollouts"):
        check()
    del branches["grpo_g3"][0]
    with pytest.raises(ValueError, match="'responses': 5, .* expected .*'responses': 6"):
        check()
    (tmp_path / "kept").write_text("y")
    with pytest.raises(ValueError, match="changed since the exercise began: kept/kept"):
        check()


def test_a_failed_stage_leaves_no_finished_one_and_can_be_run_again(laboratory):
    laboratory.run(FIRST)
    with pytest.raises(RuntimeError, match="stage second/part ended with status 3; the same command goes on from it"):
        laboratory.run(stages.Stage(SECOND.name, add_one, SECOND.inputs, {"fail": True}))
    assert not (laboratory.root / "second/part").exists()
    laboratory.run(SECOND)
    assert (laboratory.root / "second/part/number").read_text() == "2"


def test_a_folder_of_another_run_is_refused(laboratory, tmp_path):
    with pytest.raises(ValueError, match="run with other options.*\nseed: 0 there, 1 here"):
        stages.Laboratory(laboratory.root, LabConfig(seed=1), Console(quiet=True))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty and holds no laboratory"):
        stages.Laboratory(tmp_path / "mine", LabConfig(), Console(quiet=True))
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    held_by = rf"--output .*another process holds .*lab \(process {os.getpid()} on .*\): wait for it to end"
    with (
        held(laboratory.root, "--output"),
        pytest.raises(ValueError, match=held_by),
        held(laboratory.root, "--output"),
    ):
        pass


# ---- the whole path ----

SMALL = (
    "--preset smoke --warm_start_epochs 2 --sft_rows 16 --grpo_iterations 3 --grpo_interrupt 1 "
    "--exercise_iterations 2 --exercise_interrupt 1 --exercise_generations 2 --save_every 2 --draws 2"
).split()


def start(folder):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "run_lab.py"), *SMALL, "--output", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A whole run on a tiny model, killed once in mid-training and gone on with; (folder, output, killed in)."""
    folder = tmp_path_factory.mktemp("lab") / "run"
    first = start(folder)
    partial = folder / "warm_start" / "straight.partial"
    while not list(partial.glob("checkpoint-*")) and first.poll() is None:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert partial.exists() and not (folder / "warm_start" / "straight").exists()
    second = start(folder)
    output, _ = second.communicate(timeout=500)
    assert second.returncode == 0, output[-3000:]
    return SimpleNamespace(folder=folder, output=output)


def test_the_whole_path_after_a_kill(finished):
    results = json.loads((finished.folder / "report" / "results.json").read_text())
    assert results["resume"].keys() == {"warm_start", "sft", "grpo", "grpo_g2"}
    assert all(one["identical"] for one in results["resume"].values()), results["resume"]
    assert results["resume"]["grpo"]["rollouts"] == 3 and results["resume"]["grpo"]["rollouts_identical"]
    for policy in results["test"].values():
        assert policy["all"]["greedy"]["responses"] == 200 and policy["all"]["draws"]["responses"] == 400
        assert policy["ID50"]["greedy"]["responses"] == policy["OOD100"]["greedy"]["responses"] == 100
    costs = results["costs"]["grpo"]["straight"]
    purposes = ("generation", "behavior_check", "reference", "scoring", "optimisation", "saving", "archiving")
    assert all(costs[f"time/{purpose}"] > 0 for purpose in purposes)
    parts = [results["costs"]["grpo"][kind]["tokens/optimisation"] for kind in ("straight", "interrupted", "resumed")]
    assert parts[0] == parts[1] + parts[2] > 0  # each process counts its own updates
    assert "finished before" in finished.output and "identical" not in finished.output
    checks = results["exercise"]
    assert checks["budgets"]["grpo_g2"] == {"problems": 8, "responses": 16, "updates": 4}
    assert checks["same_problems"] == 8 and checks["protected"] > 10
    assert checks["constructed"]["all wrong"]["advantages"] == [0.0] * 4
    assert checks["constructed"]["one right"]["advantages"][0] > 1
    spent = results["costs"]["sft"]["responses"]
    assert all(spent[f"time/{kind}, {stratum}"] > 0 for kind in ("greedy", "draws") for stratum in ("ID50", "OOD100"))
    text = (finished.folder / "report" / "report.md").read_text()
    assert "| grpo | all |" in text and (finished.folder / "report" / "training.png").stat().st_size > 10_000


def test_every_response_has_its_own_record_of_every_update(finished):
    """One row per response and update, with its policies' log-probabilities, ratios, KL and surrogate by token."""
    kinds = {kind: ledger.read(finished.folder / "grpo" / kind).to_pylist() for kind in ("straight", "resumed")}
    per_token = ("logprobs", "reference_logprobs", "token_ratio", "token_kl", "token_surrogate", "token_clipped")
    for rows in kinds.values():
        assert len({(row["id"], row["update"]) for row in rows}) == len(rows) == 3 * 2 * 16
        for row in rows:
            assert {len(row[name]) for name in per_token} == {len(row["completion_ids"])} == {row["tokens"]}
        first = next(row for row in rows if row["update"] == 1)
        assert first["token_ratio"] == pytest.approx([1.0] * first["tokens"], abs=2e-4)
    shown = [[{**row, "seconds": 0.0} for row in rows] for rows in kinds.values()]
    assert shown[0] == shown[1]


def test_every_supervised_update_says_what_it_was_made_of(finished):
    """Every example once an epoch; the tokens are those of the responses, EOS included."""
    folder, rows = finished.folder, data.read_rows(finished.folder / "data" / "sft.jsonl")
    updates = json.loads((folder / "sft" / "straight" / "updates.json").read_text())
    assert [one["update"] for one in updates] == [1, 2, 3, 4]
    assert [len(one["examples"]) for one in updates] == [8] * 4
    for epoch in (updates[:2], updates[2:]):
        assert sorted(name for one in epoch for name in one["examples"]) == sorted(row["id"] for row in rows)
    tokenizer = AutoTokenizer.from_pretrained(folder / "sft" / "straight" / "model")
    lengths = {row["id"]: len(tokenizer(row["completion"][0]["content"])["input_ids"]) + 1 for row in rows}
    assert all(one["tokens"] == sum(map(lengths.get, one["examples"])) for one in updates)
    assert updates == json.loads((folder / "sft" / "resumed" / "updates.json").read_text())


def test_the_probes_are_whole_distributions_and_their_divergences_exact(finished):
    names = ["warm_start", "sft", "grpo", "grpo_g2"]
    probes = {name: load_file(finished.folder / "probes" / name / "probes.safetensors") for name in names}
    for kept in probes.values():
        assert kept["logprobs"].dtype == torch.float32
        assert torch.allclose(kept["logprobs"].double().exp().sum(-1), torch.ones(len(kept["tokens"]), dtype=float))
    ours, theirs = probes["sft"]["logprobs"].double(), probes["grpo"]["logprobs"].double()
    expected = torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="sum") / len(ours)
    found = json.loads((finished.folder / "divergences" / "divergences.json").read_text())
    assert found["prefixes"] == len(ours) > 100 and found["kl"]["sft"]["grpo"] == pytest.approx(float(expected))
    assert found["kl"]["sft"]["warm_start"] > 1e-4 and "sft" not in found["kl"]["sft"]


def test_the_manifest_covers_every_artefact(finished):
    manifest = json.loads((finished.folder / "manifest.json").read_text())
    listed = {f"{name}/{file}" for name, record in manifest["stages"].items() for file in record["outputs"]}
    own = {"config.json", "manifest.json", ".lock"}
    found = {str(p.relative_to(finished.folder)) for p in finished.folder.rglob("*") if p.is_file()}
    assert {path for path in found if not path.endswith("stage.json")} - own == listed


def test_models_reload_from_safetensors_as_their_state_was_saved(finished):
    for branch in ("sft", "grpo"):
        model = AutoModelForCausalLM.from_pretrained(finished.folder / branch / "straight" / "model")
        with unpacked_state(finished.folder / branch / "straight" / "state.tar.zst", finished.folder) as state:
            saved = AutoModelForCausalLM.from_pretrained(state)
        assert tensors_digest(model.named_parameters()) == tensors_digest(saved.named_parameters())


def test_noise_is_common_to_all_policies_and_greedy_repeats(finished, tmp_path):
    model, prompts = finished.folder / "warm_start" / "straight" / "model", tmp_path / "prompts.jsonl"
    rows = data.read_rows(finished.folder / "data" / "test_prompts.jsonl")
    data.write_rows(prompts, rows[:5] + rows[100:105], ["id", "prompt", "stratum"])
    testing.respond(tmp_path, LabConfig(draws=2, model="tiny"), model=model, prompts=prompts)
    again = {
        (r["id"], r["kind"], r["draw"]): r["completion_ids"]
        for r in pq.read_table(tmp_path / "responses.parquet").to_pylist()
    }
    before = pq.read_table(finished.folder / "responses" / "warm_start" / "responses.parquet").to_pylist()
    for row in before:
        key = (row["id"], row["kind"], row["draw"])
        if key in again:
            assert again[key] == row["completion_ids"]
    assert len(again) == 30


def test_a_finished_run_is_left_alone(finished):
    before = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*") if path.is_file()}
    process = start(finished.folder)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "report: finished before" in output
    after = {path: path.stat().st_mtime_ns for path in finished.folder.rglob("*") if path.is_file()}
    changed = {path.name for path in after if before.get(path) != after[path]}
    assert changed <= {"config.json", ".lock"}


def test_the_page_of_the_run_shows_every_branch(finished, tmp_path, capsys):
    results = json.loads((finished.folder / "report" / "results.json").read_text())
    assert report.main(["--run", str(finished.folder), "--output", str(tmp_path / "page.html")]) == 0
    assert "grpo_g2" in (tmp_path / "page.html").read_text()
    found = sources.find(finished.folder)
    assert list(found.readers) == ["grpo", "grpo_g2"] and found.tokenizer is not None and found.notes == []
    scored = [(one["policy"], one["problems"], one["kind"], one["correct"]) for one in found.tests]
    assert scored == [
        (policy, problems, kind, strata[problems][kind]["correct"])
        for policy, strata in results["test"].items()
        for problems in strata
        for kind in ("greedy", "draws")
    ]
    rows = {}
    for branch in found.readers:
        for row in read(finished.folder / branch / "straight").to_pylist():
            rows[branch, row["id"]] = row
    shown = turns.overview(found)
    assert len(shown) == len(rows) == 3 * 4 * 4 + 2 * 4 * 2  # iterations x prompts x generations
    assert [one["reward"] for one in shown] == [rows[one["source"], one["turns"][0]["id"]]["reward"] for one in shown]
