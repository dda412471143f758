"""scripts/inspect_group.py on a tiny model: the numbers of one group and one real update, and what it refuses."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import inspect_group
import pytest
from arguments.commands import InspectArguments, UpdateArguments
from jobs import inspecting, quickstart
from lib import options as options_module
from lib import running
from lib.reporting import make_console
from trl import ModelConfig

from turngrpo.data_prep import build_needle_corpus, stock_arithmetic, write_corpus


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder with `model` (random weights, a tokenizer of stock problems) and `corpus.jsonl` (rows of 3 chunks)."""
    folder = tmp_path_factory.mktemp("tiny")
    rows = stock_arithmetic.build(0)["train"].select(range(200))
    tokenizer = quickstart.train_tokenizer([row[0]["content"] for row in rows["prompt"]])
    quickstart.tiny_model(tokenizer, 0, hidden_size=48).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    manifest, rows = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
    write_corpus(folder / "corpus.jsonl", manifest, rows)
    return folder


def arguments(tiny, *more):
    return ["--model_name_or_path", str(tiny / "model"), "--max_completion_length", "6", *more]


def test_a_problem_that_would_steer_the_terminal_is_shown(capsys):
    problem = {"row": "r\x1b[2J", "problem": "red\r\u202e", "expected": ["\x9b1m"]}
    report = problem | {"update": {"loss": 0.0, "grad_norm": 0.0}}
    turn = dict.fromkeys(inspecting.TURN, 0) | {"id": "r\x1b[2J", "text": "a\x1b[1m", "token_weight": 1.0}
    turn["tokens"] = [dict.fromkeys(inspecting.TOKEN, 0) | {"text": "\x1b"}]
    options = {"corpus": "c", "learning_rate": 0.1, "beta": 0.0, "loss_type": "grpo", "scale_rewards": "none"}
    inspecting.show(report | {"turns": [turn], "options": options}, make_console(), tokens=True)
    shown = capsys.readouterr().out
    assert r"r\x1b[2J: red\r\u202e" in shown and r"a\x1b[1m" in shown
    assert not {"\x1b", "\r", "\x9b", "\u202e"} & set(shown)


def inspect(tiny, folder, *more):
    """Run the script and return what it wrote as JSON."""
    path = folder / "group.json"
    assert inspect_group.main(arguments(tiny, "--json", str(path), *more)) == 0
    return json.loads(path.read_text())


def test_log_probabilities_before_are_the_recorded_ones_and_after_follow_the_advantage(tiny, tmp_path, capsys):
    report = inspect(
        tiny,
        tmp_path,
        "--row",
        "3",
        "--rewards",
        "1",
        "0",
        "1",
        "0",
        "--learning_rate",
        "1e-3",
        "--updates",
        "1",
        "--tokens",
    )
    turns, shown = report["turns"], capsys.readouterr().out
    assert [turn["member"] for turn in turns] == [0, 1, 2, 3]
    assert [turn["reward"] for turn in turns] == [1, 0, 1, 0]
    assert [turn["advantage"] for turn in turns] == pytest.approx([1, -1, 1, -1], abs=1e-6)
    for turn in turns:
        tokens = turn["tokens"]
        assert [token["id"] for token in tokens] == turn["completion_ids"]
        assert [token["behavior"] for token in tokens] == turn["behavior_logprobs"]
        assert [token["before"] for token in tokens] == pytest.approx(turn["behavior_logprobs"], abs=2e-4)
        assert turn["before"] == pytest.approx(sum(token["before"] for token in tokens))
        assert turn["change"] == pytest.approx(sum(token["after"] - token["before"] for token in tokens))
        assert turn["change"] * turn["advantage"] > 0.1  # up where the reward was, down where it was not
        assert turn["token_weight"] == pytest.approx(1 / (4 * turn["length"]))
        assert all(token["exact_kl"] > 0 for token in tokens)
    # All members start from the same prefix, so the first KL is the same for all.
    assert len({round(turn["tokens"][0]["exact_kl"], 6) for turn in turns}) == 1
    assert "all rewards equal" not in shown and shown.count("exact_kl") == 4 and "active" in shown


def test_ratio_and_clip_are_those_of_the_surrogate(tiny, tmp_path):
    report = inspect(tiny, tmp_path, "--rewards", "1", "0", "1", "0", "--learning_rate", "3e-3", "--updates", "1")
    tokens = [(turn["advantage"], token) for turn in report["turns"] for token in turn["tokens"]]
    for advantage, token in tokens:
        assert token["ratio"] == pytest.approx(2.718281828459 ** (token["after"] - token["behavior"]))
        # A > 0 clips above 1.2, A < 0 below 0.8; never both sides for one advantage.
        assert token["clip_active"] == (token["ratio"] > 1.2 if advantage > 0 else token["ratio"] < 0.8)
    assert {token["clip_active"] for _, token in tokens} == {True, False}


def test_json_holds_everything(tiny, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    report = inspect(tiny, tmp_path, "--row", "train-0131", "--num_generations", "2", "--seed", "0")
    assert set(report) == {"options", "row", "problem", "expected", "update", "turns"}
    assert report["row"] == "train-0131"  # number 3: the first 128 rows belong to the warm start
    row = stock_arithmetic.build(0)["train"][131]
    assert report["expected"] == row["problem"]["final_stock"] and report["problem"] == row["prompt"][0]["content"]
    assert report["options"]["num_generations"] == 2 == len(report["turns"])
    assert report["options"]["model"] == str(tiny / "model") and report["options"]["beta"] == 0.02
    assert report["update"]["behavior_gap/max"] < 2e-4
    ledger = {
        "id",
        "row_id",
        "text",
        "finish_reason",
        "prompt_ids",
        "completion_ids",
        "reward",
        "rewards",
        "advantage",
    }
    assert ledger | {"prompt", "length", "before", "after", "change", "token_weight"} <= set(report["turns"][0])
    assert report["turns"][0]["rewards"] == {"stock_reward": 0.0}
    assert row["prompt"][0]["content"] in report["turns"][0]["prompt"]
    assert set(report["turns"][0]["tokens"][0]) == {*inspecting.TOKEN}
    assert list(Path.cwd().iterdir()) == []  # nothing but the file that was asked for


def test_equal_rewards_teach_nothing(tiny, tmp_path, capsys):
    """A random model never answers: every reward is 0, and a weight decay of 1e-6 * 0.01 is lost in float32."""
    report = inspect(tiny, tmp_path)
    assert "all rewards equal: advantages 0, only KL and weight decay move the policy" in capsys.readouterr().out
    assert report["update"]["grad_norm"] == 0 and {turn["change"] for turn in report["turns"]} == {0}
    # 0.1 * 0.1: every decayed weight loses a hundredth, and the policy moves without any signal.
    same = (
        "--rewards",
        "1",
        "1",
        "1",
        "1",
        "--learning_rate",
        "0.1",
        "--updates",
        "1",
        "--weight_decay",
        "0.1",
        "--beta",
        "0",
    )
    report = inspect(tiny, tmp_path, *same)
    assert "all rewards equal" in capsys.readouterr().out
    assert report["update"]["grad_norm"] == 0
    assert all(turn["advantage"] == 0 and abs(turn["change"]) > 1e-4 for turn in report["turns"])


def test_other_rewards_leave_the_responses_and_their_start_alone(tiny, tmp_path):
    plain = inspect(tiny, tmp_path)["turns"]
    other = inspect(tiny, tmp_path, "--rewards", "0.5", "0", "0", "0", "--scale_rewards", "none")["turns"]
    for name in ("completion_ids", "behavior_logprobs", "before"):
        assert [turn[name] for turn in plain] == [turn[name] for turn in other]
    # Mean 0.125.
    assert [turn["advantage"] for turn in other] == [0.375, -0.125, -0.125, -0.125]
    again = inspect(tiny, tmp_path, "--seed", "1", "--data_seed", "0")
    assert again["turns"][0]["prompt_ids"] == plain[0]["prompt_ids"]  # the same problem under other noise
    assert again["turns"][0]["completion_ids"] != plain[0]["completion_ids"]


def test_a_gated_group_has_one_line_per_turn(tiny, tmp_path, capsys):
    corpus = ("--workflow", "gated", "--corpus", str(tiny / "corpus.jsonl"), "--instruction", "read the shelves .")
    more = ("--max_memory_tokens", "16", "--num_generations", "2", "--rewards", "1", "0", "--scale_rewards", "none")
    report = inspect(tiny, tmp_path, *corpus, *more)
    # A random model writes no gates: it reads to the end. A = 0.9 * (1 - 0.5); the turn rewards, all -1, add nothing.
    assert [turn["step"] for turn in report["turns"]] == [1, 2, 3, None] * 2
    assert [turn["advantage"] for turn in report["turns"]] == pytest.approx([0.45] * 4 + [-0.45] * 4)
    assert [turn["turn_rewards"]["update_reward"] for turn in report["turns"]] == [-1, -1, -1, None] * 2
    # mean over tokens, four turns, two trajectories
    assert report["turns"][0]["token_weight"] == pytest.approx(1 / (report["turns"][0]["length"] * 4 * 2))
    assert "turn_rewards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--rewards", "1", "0", "1"], "expected 4 finite numbers, one for each response"),
        (["--rewards", "1", "0", "1", "nan"], "expected 4 finite numbers"),
        (["--row", "872"], "expected 0 to 871, or an id as 'train-0128'"),
        (["--row", "-1"], "--row is '-1'"),
        (["--row", "train-0003"], "--row is 'train-0003'"),  # of the warm start
        (["--workflow", "memagent"], "expected gated with --corpus, or single_turn without"),
        (["--workflow", "gated"], "--corpus is missing: expected a corpus file"),
        (["--corpus", "corpus.jsonl"], "single_turn without"),
        (["--workflow", "gated", "--corpus", "absent.jsonl"], "no such file"),
        (["--layout", "chunk_first"], "belong to the workflows gated"),
        (["--num_generations", "1"], "at least 2 generations"),
        (["--loss_type", "bnpo"], "loss_type='bnpo' is not honoured"),
        (["--max_completion_length", "200"], "cannot fit"),
        (["--model_name_or_path", "no/such/model"], "no/such/model"),
    ],
)
def test_faults_are_named(tiny, changes, message):
    with pytest.raises(running.SetupError, match=message):
        inspect_group.main(arguments(tiny, *changes))


def test_a_file_that_cannot_be_written_is_named(tiny, tmp_path):
    with pytest.raises(running.SetupError, match="Is a directory"):
        inspect_group.main(arguments(tiny, "--json", str(tmp_path)))


def test_the_update_is_the_first_of_the_laboratorys(tiny, tmp_path):
    """Of 200 updates 20 warm up: the first has a 20th of the peak; AdamW decays norms too, as torch's does."""
    with TemporaryDirectory() as folder:
        options, sizes, model = options_module.parse_options(
            [InspectArguments, UpdateArguments, ModelConfig], arguments(tiny)
        )
        trainer = inspecting.make_trainer(options, sizes, model, folder)
    assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(1e-6 / 20)]
    (group,) = trainer.optimizer.param_groups
    assert group["weight_decay"] == 0.01 and len(group["params"]) == len(list(trainer.model.parameters()))
    assert (sizes.max_prompt_length, sizes.max_completion_length) == (256, 6)
