"""The scripts, run as a user runs them on a tiny model and corpus that lie on disk."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import evaluate
import pyarrow.parquet as pq
import pytest
import report
import sft
import train
from jobs import quickstart, training
from lib import curves, lookup, reporting, running, tokenizing
from lib.options import told_of_warm_start
from page import embedding, sources, turns
from peft import LoraConfig, get_peft_model

from turngrpo.data_prep import build_needle_corpus, write_corpus
from turngrpo.trainer import warm_start
from turngrpo.trainer.evaluation.forced_gates import TRIVIAL_GATES
from turngrpo.trainer.export.versions import read_version
from turngrpo.trainer.reading import gates
from turngrpo.trainer.reading.gates import GateDecision, parse_turn
from turngrpo.trainer.reward_calls import RewardError

SCRIPTS = Path(__file__).parents[2] / "scripts"

READING = ["--instruction", quickstart.INSTRUCTION, "--max_memory_tokens", "16"]
LIMITS = ["--max_prompt_length", "150", "--max_completion_length", "8"]
PLAIN = ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to", "none"]
REWARDS = ["--reward_funcs", "answer_reward", "exit_reward", "format_reward", "--turn_reward_funcs", "update_reward"]
SPEC_METRICS = (
    "update_accuracy/evidence update_accuracy/evidence_free update_accuracy/balanced exit/exact exit/early exit/late "
    "format/parsed answer/accuracy turns/mean response_tokens/mean memory_tokens/mean memory/cut reward "
    "frac_reward_zero_std"
).split()


def tiny_tokenizer():
    _, rows = build_needle_corpus("multi_key", 4, 20, 3, 8, shared_keys=True)
    return quickstart.train_tokenizer([f"{row['question']}\n{c['text']}" for row in rows for c in row["chunks"]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder with `model` (random weights) and `corpus.jsonl` (two projects of 6 rows, 3 chunks)."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    quickstart.tiny_model(tokenizer, 0, hidden_size=48).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    manifest, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
    write_corpus(folder / "corpus.jsonl", manifest, rows)
    return folder


def train_arguments(tiny, output, *more):
    model = ["--model_name_or_path", str(tiny / "model"), "--corpus", str(tiny / "corpus.jsonl")]
    group = ["--per_device_train_batch_size", "4", "--num_generations", "4", "--loss_type", "group"]
    steps = ["--max_steps", "2", "--logging_steps", "1", "--save_strategy", "no", "--beta", "0.01"]
    return [*model, "--output_dir", str(output), *group, *steps, *READING, *LIMITS, *PLAIN, *REWARDS, *more]


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """Output folder of one run of train.py in a process of its own."""
    output = tmp_path_factory.mktemp("runs") / "run"
    command = [sys.executable, str(SCRIPTS / "train.py"), *train_arguments(tiny, output, "--use_peft")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return output, done.stdout


def test_train_leaves_summary_metrics_curves_and_adapter(trained):
    output, shown = trained
    summary = json.loads((output / "summary.json").read_text())
    told = {"updates", "stopped_early", "convergence", "best", "exported"}
    run = {"before", "after", "policies", "adapter", "processes", "distributed_type", "seconds"}
    assert set(summary) == run | told
    assert summary["best"] is None and summary["convergence"]["verdict"] == "too few evaluations"  # none was asked for
    assert summary["exported"] == {"version": "v0001", "update": 2, "is_best": False}
    assert set(SPEC_METRICS) | {"kl"} <= set(summary["after"])
    assert summary["before"]["kl"] == 0.0  # a fresh adapter is the base model
    assert list(summary["policies"]) == ["before", "after", *TRIVIAL_GATES]
    assert summary["adapter"] == str(output / "adapters" / "run" / "v0001")
    reading = read_version(output / "adapters" / "run" / "v0001")["config"]["reading"]
    _, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)  # came in chunks: --chunk_size cut none
    lengths = [len(ids) for row in rows for ids in tiny_tokenizer()([c["text"] for c in row["chunks"]])["input_ids"]]
    assert reading["chunk_size"] == pytest.approx(max(lengths), abs=2) and reading["instruction"]
    stages = summary["seconds"]
    assert stages["total"] >= stages["training"] > 0
    updates = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [log["update"] for log in updates if "reward" in log] == [1, 2]
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    for text in ("update 2/2", *TRIVIAL_GATES):
        assert text in shown


def test_the_page_of_the_run_agrees_with_its_files(trained, tiny, tmp_path, capsys):
    """The mean reward of an iteration on the page is the one that was logged, and chunks are those of the corpus."""
    output, _ = trained
    assert report.main(["--run", str(output), "--output", str(tmp_path / "page.html")]) == 0
    made = json.loads((output / "run.json").read_text())
    assert made["files"] == {"corpus": str(tiny / "corpus.jsonl"), "model": str(tiny / "model")}
    assert made["config"]["reading"]["max_memory_tokens"] == 16 and made["corpus"]["projects"] == 2
    found = sources.find(output)
    shown = list(embedding.batches(found, turns.whole(found, turns.overview(found))))
    assert found.notes == []
    readings = [one for batch in shown for one in batch["trajectories"]]
    logs = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for iteration, log in enumerate(log for log in logs if "reward" in log):
        rewards = [one["reward"] for one in readings if one["iteration"] == iteration]
        assert len(rewards) == 4 and sum(rewards) / 4 == pytest.approx(log["reward"], abs=1e-6)
    chunk_turns = [turn for one in readings for turn in one["turns"] if turn["step"]]
    assert chunk_turns and all("chunk" in turn["prompt"] and "memory" in turn["prompt"] for turn in chunk_turns)


def test_a_resumed_run_logs_every_update_once(tmp_path):
    """Updates 1 to 3 were logged, the checkpoint is of update 2, and the kill tore the line of update 4."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1, "kl": 0.1}\n{"update": 2, "kl": 0.2}\n{"update": 3, "kl": 9.0}\n{"update": 4, "k')
    log = reporting.RunLog(path, reporting.make_console())
    state = SimpleNamespace(is_world_process_zero=True, global_step=2, max_steps=3)
    log.on_train_begin(None, state, None)
    log.on_log(None, SimpleNamespace(**{**vars(state), "global_step": 3}), None, logs={"kl": 0.3})
    assert [record["kl"] for record in log.history] == [0.1, 0.2, 0.3]
    assert list(map(json.loads, path.read_text().splitlines())) == log.history


def test_a_line_says_when_how_fast_and_how_long_still(monkeypatch, capsys):
    """Resumed after update 2: updates 3 and 4 take 10 s each, 5 takes 40 s, so that 5 more take 20 s each."""
    now = iter([0.0, 100.0, 120.0, 160.0, 170.0])
    monkeypatch.setattr(reporting.time, "perf_counter", lambda: next(now))
    log = reporting.RunLog(None, reporting.make_console())
    state = {"is_world_process_zero": True, "max_steps": 10}
    log.on_train_begin(None, SimpleNamespace(**state, global_step=2), None)
    for update in (4, 5, 5):  # the sum at the end comes at the last update once more
        log.on_log(None, SimpleNamespace(**state, global_step=update), None, logs={"kl": 0.25})
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert re.fullmatch(r"\d\d:\d\d:\d\d update 4/10", lines[0][0])
    assert [line[1:] for line in lines] == [
        ["kl 0.2500", "10.00 s/update", "0:01:00 left"],
        ["kl 0.2500", "40.00 s/update", "0:01:40 left"],
        ["kl 0.2500"],
    ]


def test_a_validation_has_a_line_and_a_curve_of_its_own(tmp_path, capsys):
    log = reporting.RunLog(None, reporting.make_console())
    state = SimpleNamespace(is_world_process_zero=True, global_step=3, max_steps=9)
    log.on_log(None, state, None, logs={"eval_reward": 0.5, "eval_kl": 0.25, "eval_runtime": 1.0})
    assert re.fullmatch(r"\S+ update 3/9  validation  reward 0.50  kl 0.2500\n", capsys.readouterr().out)
    log.history[0] |= {"eval_interval/reward/low": 0.4, "eval_interval/reward/high": 0.6}
    curves.write_curves(log.history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    curves.write_curves([{"update": 1, "loss": 0.5}], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_signal_ends_train_and_the_same_command_goes_on(tiny, tmp_path, capsys, monkeypatch):
    """SIGTERM in the first rollout: the update is finished, its checkpoint taken by the next run, which says so."""
    (tmp_path / "signalling.py").write_text(
        "import os, signal\n"
        "def reward(trajectories, trainer_state, **columns):\n"
        "    if os.path.exists('armed') and trainer_state.max_steps:  # of a training\n"
        "        os.remove('armed')\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return [float(len(t.turns)) for t in trajectories]\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "armed").touch()
    given = train_arguments(tiny, "run", "--use_peft", "--validation_rows", "1", "--reward_funcs", "signalling.reward")
    with pytest.raises(KeyboardInterrupt):
        train.main(given)
    assert "stopped after update 1: its checkpoint is written" in capsys.readouterr().out
    assert not (tmp_path / "run" / "summary.json").exists()
    assert train.main([*given, "--resume_from_checkpoint", "true"]) == 0
    assert "going on from run/checkpoint-1" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["adapter"]


def test_evaluate_compares_adapter_and_base(tiny, trained, tmp_path, capsys):
    output = tmp_path / "evaluation.json"
    adapter = ["--adapter", str(trained[0] / "adapters" / "run" / "v0001"), "--max_prompt_length", "170"]
    arguments = ["--model", str(tiny / "model"), *adapter, "--corpus", str(tiny / "corpus.jsonl")]
    assert (
        evaluate.main(
            [
                *arguments,
                "--baselines",
                "--ignore_exit",
                "--trajectories",
                str(tmp_path / "rows.parquet"),
                "--output",
                str(output),
            ]
        )
        == 0
    )
    report = json.loads(output.read_text())
    others = ["ungated", "whole document"]
    assert list(report["policies"]) == ["base", "adapter", "exit ignored", *others, *TRIVIAL_GATES]
    document = report["policies"]["whole document"]["metrics"]
    assert document["turns/mean"] == 0.0 and "exit/exact" not in document and document["answer/accuracy"] <= 1.0
    for name, policy in report["policies"].items():
        assert name in others or set(SPEC_METRICS) <= set(policy["metrics"])
        gained = report.get(f"adapter_minus_{name.replace(' ', '_')}", {}).get("format/parsed")
        ours = report["policies"]["adapter"]["metrics"]["format/parsed"]
        assert name == "adapter" or gained["difference"] == ours - policy["metrics"]["format/parsed"]
        assert policy["intervals"]["reward"][0] <= policy["metrics"]["reward"] <= policy["intervals"]["reward"][1]
    assert set(SPEC_METRICS) - {"frac_reward_zero_std"} <= set(report["adapter_minus_base"])
    # Limits and instruction come from the adapter's manifest, so the numbers are those of the training run.
    summary = json.loads((trained[0] / "summary.json").read_text())
    assert report["policies"]["adapter"]["metrics"]["reward"] == pytest.approx(summary["after"]["reward"])
    assert report["policies"]["adapter"]["metrics"]["turns/mean"] == summary["after"]["turns/mean"]
    assert report["policies"]["stop at once"]["metrics"]["turns/mean"] == 1.0
    turns = pq.read_table(tmp_path / "rows.parquet").to_pandas()
    assert list(turns.policy.unique()) == list(report["policies"])
    for name, policy in report["policies"].items():
        read = turns[turns.policy == name].groupby(["group", "member"])
        assert read.reward.first().mean() == pytest.approx(policy["metrics"]["reward"])
        assert read.parsed.first().mean() == pytest.approx(policy["metrics"]["format/parsed"])
    shown = capsys.readouterr().out
    assert "exit ignored" in shown and shown.count("adapter minus") == 8

    # A document has 123 tokens, a chunk's prompt up to 68: the first does not fit and is no policy.
    # Rows of both splits are the whole corpus.
    short = ["--max_completion_length", "8", "--max_prompt_length", "100", "--workflow", "memagent", "--split", "all"]
    short += ["--instruction", "read", "--trajectories", str(tmp_path / "rows.jsonl"), "--allow_overlap"]
    assert evaluate.main([*arguments, *short, "--compare_document", "--output", str(output)]) == 0
    assert "whole document: left out, " in capsys.readouterr().out
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert first["policy"] == "adapter" and first["step"] == 1 and first["evidence"] in (True, False)
    report = json.loads(output.read_text())
    assert list(report["policies"]) == ["adapter"]
    assert report["rows"] == sum(1 for _ in (tiny / "corpus.jsonl").open()) - 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--output", "."], "a folder: expected a file"),
        (["--dtype", "float31"], "'float31': expected one of auto, float32"),
        (["--splt", "train"], "--splt is no option: did you mean --split?"),
        (["--spli", "train"], "--spli is no option: did you mean --split?"),  # no abbreviation
        (["--cluster", "project"], "all 6 rows are of one project, and nothing can be said of others"),
        (["--adapter", "wider"], "wider was trained on 'owner/wide' and does not fit --model .*size mismatch"),
        (["--reward_funcs", "hanging.score", "--reward_timeout", "0.2"], "'score' took longer than reward_timeout"),
    ],
)
def test_evaluate_names_what_is_wrong_before_it_reads(tiny, tmp_path, monkeypatch, changes, message):
    wide = quickstart.tiny_model(tiny_tokenizer(), 0, hidden_size=96)
    wide.name_or_path = "owner/wide"
    (tmp_path / "hanging.py").write_text("import time\ndef score(**columns):\n    time.sleep(600)\n")
    get_peft_model(wide, LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "wider")
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", str(tiny / "model"), "--corpus", str(tiny / "corpus.jsonl"), "--output", "evaluation.json"]
    with pytest.raises((running.SetupError, RewardError), match=message):
        evaluate.main([*arguments, *READING, *LIMITS, *changes])


def test_dry_run_estimates_and_writes_nothing(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    update = ["--gradient_accumulation_steps", "2", "--probe", "--eval_strategy", "steps"]
    assert train.main(train_arguments(tiny, tmp_path / "out", "--use_peft", "--dry_run", *update)) == 0
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    for text in ("weights", "KV cache", "activations", "AdamW", "6 train, 6 validation", "nothing was trained"):
        assert text in shown
    for name, found in (  # of 12 needle rows, which have a chunk of evidence each among three
        ("projects", "1 train, 1 validation"),
        ("chunks of a row", "3.0, 33% of them evidence"),
        ("rows without evidence", "0 of 12"),
        ("answer stands in the evidence", "in 12 of 12 rows"),
    ):
        assert re.search(rf"{name} +│ +{found}", shown), name
    cut = float(re.search(r"its first rollout: reward 0.00, parsed 0.00, turns cut ([\d.]+)", shown)[1])
    assert cut > 0.1  # the random model hardly ever ends within 8 tokens, and that is said
    flowing = " ".join(shown.split())  # lines are broken where the console ends
    assert "warning: the probe: 0% of the readings parse" in flowing
    assert "of the turns are cut at --max_completion_length 8, which may be too short" in flowing
    assert "CPU memory of a process, estimated" in shown and "GPU" not in shown
    # 8 trajectories at once, of a prompt and 8 tokens: all that there is to cache.
    longest = int(re.search(r"up to (\d+) tokens", shown)[1])
    assert f"KV cache of {8 * (longest + 8)} tokens" in shown.replace(",", "")
    measured, whole = re.findall(r"trajectories +│ +([\d.]+) |less each\) +│ +([\d.]+)", shown)
    assert float(whole[1]) == pytest.approx(2 * float(measured[0]), abs=0.02) and float(measured[0]) > 0


def test_a_dry_run_refuses_an_output_that_is_taken(tiny, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(running.SetupError, match="is not empty and its results would be overwritten"):
        train.main(train_arguments(tiny, tmp_path, "--dry_run"))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["summary.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--corpus", "absent.jsonl"], "no such file"),
        (["--reward_funcs", "anwser_reward"], "anwser_reward.*answer_reward.*exit_reward.*format_reward"),
        (["--reward_funcs", "no_such_module.reward"], "cannot be imported"),
        (["--turn_reward_funcs", "exit_rewards"], "update_reward"),
        (["--workflow", "gate"], "gated, memagent, single_turn"),
        (["--layout", "sideways"], "chunk_first"),
        (
            ["--reward_weights", ".7", ".3"],
            "reward_weights has 2 numbers, expected one for each of 3 reward functions",
        ),
        (["--reward_weights", ".7", ".3", "--dry_run"], "reward_weights has 2 numbers, expected one for each of 3"),
        (["--turn_reward_weights", "1", "2"], "turn_reward_weights has 2 numbers, expected one for each of 1 turn"),
        (["--max_prompt_length", "20"], "12 rows|6 rows|cannot fit"),
        (["--top_p", "0.9"], "top_p"),
        (["--workflow", "single_turn"], "gated and memagent"),
        (["--dataset_name", "some/data"], "reads a corpus: give --corpus, and leave --dataset_name out"),
        (["--use_peft", "--adapter_name", "a/b"], "the adapter's name is 'a/b'"),
        (["--push_to_hub"], "hub_strategy='end'"),
        (["--leraning_rate", "1"], "--leraning_rate is no option: did you mean --learning_rate?"),
        (
            ["--reward_funcs", "answr_reward", "no_module.reward"],
            r"(?s)--reward_funcs is 'answr_reward'.*--reward_funcs is 'no_module.reward', which cannot be imported",
        ),
        (
            ["--config", str(SCRIPTS / "recipes" / "lora.yaml"), "--config", "b.yaml", "--save_strategy", "steps"],
            "--config is there twice",
        ),
        (["--learning_rat", "1"], "--learning_rat is no option: did you mean --learning_rate?"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--config"], "expected a YAML file"),
        (["--threads", "1", "stray"], "stray is no option"),
        (["--model_name_or_path", "/no/such/model"], "found no folder '/no/such/model'"),
        (["--use_peft", "--lora_target_modules", "foo_proj"], "foo_proj"),
        (["--resume_from_checkpoint", "true"], "'true': found no checkpoint in"),
        (
            ["--resume_from_checkpoint", "/no/such"],
            "found no checkpoint in '/no/such'; expected a folder checkpoint-N",
        ),
        (["--num_generations", "0"], "num_generations is 0"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size is 0"),
        (["--max_completion_length", "0"], "max_completion_length=0"),
        (["--learning_rate", "-1"], "learning_rate=-1.0"),
        (["--load_in_4bit"], "--load_in_4bit and --load_in_8bit are not honoured"),
        (["--gradient_accumulation_steps", "9"], "has 6 rows, but one rollout takes 9 prompts"),
        (["--reward_funcs", "exit_reward", "exit_reward"], r"several reward functions are named \['exit_reward'\]"),
        (["--probe"], "--probe is a part of --dry_run"),
        (["--dry_run", "--probe", "--rollout_engine", "vllm", "--vllm_base_url", "http://x"], "--probe samples with"),
        (["--push_to_hub", "--hub_strategy", "end"], "pushes the exported adapter: add --use_peft"),
        (["--use_peft", "--push_to_hub", "--hub_strategy", "end", "--hub_model_id", "a/b/c"], "Repo id must be"),
    ],
)
def test_train_names_what_is_wrong_before_it_starts(tiny, tmp_path, changes, message, monkeypatch):
    """So does a dry run, which comes as far: no model is loaded for any of it."""
    monkeypatch.setattr(training, "load_model", None)
    with pytest.raises(running.SetupError, match=message):
        train.main(train_arguments(tiny, tmp_path / "out", *changes))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [("learning_rat: 1", "learning_rat is no option .in the file"), ("- a", "mapping"), ("a: [1", "expected a YAML")],
)
def test_faults_of_a_recipe_are_named(tiny, tmp_path, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(running.SetupError, match=message):
        train.main(train_arguments(tiny, tmp_path / "out", "--config", str(tmp_path / "recipe.yaml")))


def test_on_a_cpu_the_rewards_are_the_only_thing_to_know(tiny, tmp_path, capsys):
    """No option says that there is no GPU, and none says the method's rewards."""
    model = ["--model_name_or_path", str(tiny / "model"), "--corpus", str(tiny / "corpus.jsonl"), "--use_peft"]
    assert train.main([*model, *READING, *LIMITS, "--output_dir", str(tmp_path / "out"), "--dry_run"]) == 0
    assert "answer_reward, exit_reward, format_reward, update_reward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def score(:", "SyntaxError: invalid syntax.*broken_0.py"),
        ("raise RuntimeError('no key')", "RuntimeError: no key at .*broken_1.py:1"),
        ("import no_such_package", "no_such_package"),
        ("def score(**columns):\n    return ['good']", "'score' returned 1 numbers, expected 4"),
        (
            "import time\ndef score(**columns):\n    time.sleep(600)",
            "'score' took longer than reward_timeout, 0.2",
        ),
    ],
)
def test_a_broken_reward_is_found_before_anything_is_loaded(tiny, tmp_path, monkeypatch, request, code, message):
    number = request.node.callspec.indices["code"]
    (tmp_path / f"broken_{number}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((running.SetupError, RewardError), match=message):
        more = ["--reward_funcs", f"broken_{number}.score", "--reward_timeout", "0.2"]
        train.main(train_arguments(tiny, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_train_overwrites_no_results(tiny, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(running.SetupError, match="not empty"):
        train.main(train_arguments(tiny, tmp_path))


def test_reward_by_dotted_path_of_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text("def my_reward(completions, **columns):\n    return [1.0]\n")
    monkeypatch.chdir(tmp_path)
    (found,) = lookup.find_rewards(["my_rewards_here.my_reward"], lookup.TRAJECTORY_REWARDS, "--reward_funcs")
    assert found(completions=[""]) == [1.0]


def test_single_turn_trains_on_prompts_with_a_reward_of_the_user(tiny, tmp_path, monkeypatch):
    """Full fine-tuning without validation rows: no adapter, the model is saved."""
    (tmp_path / "word_reward.py").write_text(
        "def score(completions, **c):\n    return [len(x) for x in completions]\n"
    )
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the code of lamp is"}\n{"prompt": "what is"}\n')
    monkeypatch.chdir(tmp_path)
    group = ["--per_device_train_batch_size", "4", "--num_generations", "4", "--max_completion_length", "4"]
    source = ["--workflow", "single_turn", "--dataset_name", "prompts.jsonl", "--reward_funcs", "word_reward.score"]
    model = ["--model_name_or_path", str(tiny / "model"), "--output_dir", "out", "--disable_tqdm", "true"]
    steps = ["--max_steps", "1", "--logging_steps", "1", "--save_strategy", "no", "--loss_type", "grpo"]
    assert train.main([*model, *source, *group, *steps, *PLAIN, "--scale_rewards", "group"]) == 0
    summary = json.loads(Path("out/summary.json").read_text())
    assert summary["before"] is None and summary["adapter"] is None
    assert Path("out/model/model.safetensors").exists()


def test_sft_lowers_the_loss_and_saves(tiny, tmp_path, capsys):
    corpus = ["--corpus", str(tiny / "corpus.jsonl"), "--model_name_or_path", str(tiny / "model")]
    steps = ["--max_steps", "12", "--logging_steps", "4", "--learning_rate", "5e-3"]
    folder = tmp_path / "warm"
    assert sft.main([*corpus, "--output_dir", str(folder), *steps, *READING, *PLAIN, "--disable_tqdm", "true"]) == 0
    losses = [log["loss"] for log in json.loads((folder / "sft.json").read_text())]
    assert losses[-1] < losses[0] - 0.5
    assert (
        tokenizing.load_tokenizer(str(folder))("<check>yes")["input_ids"]
        == tiny_tokenizer()("<check>yes")["input_ids"]
    )
    assert (folder / "model.safetensors").exists()
    left = {path.name for path in folder.iterdir()}
    assert not any(name.startswith(("checkpoint", "README")) for name in left)  # nobody asked for them
    reading = json.loads((folder / "reading.json").read_text())
    assert (reading["workflow"], reading["layout"]) == ("gated", "chunk_first") and reading["instruction"]
    assert told_of_warm_start(str(folder), reading) == told_of_warm_start(str(tiny / "model"), {}) == []
    (line,) = told_of_warm_start(str(folder), reading | {"instruction": "Read."})
    assert line.startswith("instruction is 'Read.' here, and was ") and line.endswith(f"in the warm start of {folder}")
    # Whoever reads with it reads as it was taught, and not on what it was taught with.
    said = ["--output_dir", str(tmp_path / "out"), "--use_peft", *REWARDS, *LIMITS, *PLAIN, "--dry_run"]
    said += READING[2:]
    assert train.main([*corpus[:2], "--model_name_or_path", str(folder), *said, "--num_generations", "4"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"--layout, --instruction: as in the warm start of {folder}" in shown and "warning" not in shown
    evaluated = [
        "--model",
        str(folder),
        *corpus[:2],
        *LIMITS,
        *READING[2:],
        "--output",
        str(tmp_path / "evaluation.json"),
    ]
    assert evaluate.main([*evaluated, "--rows", "1"]) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["options"]["instruction"] == reading["instruction"]
    with pytest.raises(running.SetupError, match="were trained on .* says .*reading.json"):
        evaluate.main([*evaluated, "--split", "train"])


def test_sft_refuses_to_cut_an_example(tiny, tmp_path):
    targets = tmp_path / "targets.jsonl"
    rows = [{"prompt": "the code", "completion": "of lamp"}, {"prompt": "the code " * 20, "completion": "of lamp"}]
    targets.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--targets", str(targets), "--model_name_or_path", str(tiny / "model"), *PLAIN]
    with pytest.raises(running.SetupError, match=r"targets.jsonl, row 2: 4\d tokens"):
        sft.main([*arguments, "--output_dir", str(tmp_path / "out"), "--max_length", "20"])
    with pytest.raises(running.SetupError, match="not empty"):
        sft.main([*arguments, "--output_dir", str(tmp_path)])


def bound_workflow():
    workflow = lookup.make_workflow("gated", instruction=quickstart.INSTRUCTION)
    tokenizer = tiny_tokenizer()
    workflow.bind(tokenizer, SimpleNamespace(chat_template_kwargs=None, max_memory_tokens=16))
    return workflow, tokenizer


def needle_row(place):
    keys = {place: ("lamp", "42")}
    texts = [f"the code of {keys.get(k, ('bell', '13'))[0]} is {keys.get(k, ('bell', '13'))[1]} ." for k in (1, 2, 3)]
    chunks = [{"text": text, "evidence": k == place} for k, text in enumerate(texts, start=1)]
    return {"id": "a", "question": "what is the code of lamp ?", "answers": ["42"], "chunks": chunks}


def test_gold_examples_follow_the_gold_trajectory():
    """T* = 2 of 3: continue, write and end, answer from that memory; the prompts are the rollout's own."""
    workflow, tokenizer = bound_workflow()
    examples = warm_start.row_examples(needle_row(2), workflow)
    texts = []
    for example in examples:
        start = example["completion_mask"].index(1)
        assert example["completion_mask"] == [0] * start + [1] * (len(example["input_ids"]) - start)
        assert example["input_ids"][-1] == tokenizer.eos_token_id
        texts.append(tokenizer.decode(example["input_ids"][start:-1]))
    assert parse_turn(texts[0], "eos") == GateDecision(False, "", False)
    assert parse_turn(texts[1], "eos") == GateDecision(True, "the code of lamp is 42 .", True)
    assert texts[2] == "\\boxed{42}" and len(texts) == 3
    state = workflow.start(needle_row(2))
    prompt = [token for segment in workflow.prompt(state) for token in segment]
    assert examples[0]["input_ids"][: len(prompt)] == prompt
    assert "the code of lamp is 42 ." in tokenizer.decode(examples[2]["input_ids"])


def test_gate_noise_flips_as_often_as_asked_and_stays_parsable():
    """Noise 0.3 over 600 gates: 180 flips, three standard deviations of sqrt(600 * 0.21) = 11.2 to either side."""
    generator, row = random.Random(0), needle_row(2)
    gold = GateDecision(False, "", False)
    noisy = [warm_start.noisy_gates(gold, row, row["chunks"][0], 0.3, generator) for _ in range(300)]
    flips = sum(decision.check for decision in noisy) + sum(decision.exit for decision in noisy)
    assert 146 < flips < 214
    assert all(parse_turn(gates.write_turn(decision), "eos") == decision for decision in noisy)
    assert {decision.candidate for decision in noisy if decision.check} == {"the code of bell is 13 ."}
