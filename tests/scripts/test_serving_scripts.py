"""read_document.py and evaluate.py through a small server that computes with a model which has learnt its replies."""

import json
import os
import signal
import threading
import time

import evaluate
import pytest
import read_document
import torch
import train
from arguments.commands import ReadArguments
from datasets import Dataset
from jobs import quickstart
from jobs import reading as reading_job
from lib.options import evaluation_config
from lib.running import SetupError
from loaded import run
from openai_server import serving
from peft import LoraConfig, get_peft_model
from rich.console import Console
from training import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from turngrpo.data_prep import build_needle_corpus, write_corpus
from turngrpo.rewards import answer_reward, exit_reward
from turngrpo.trainer import GatedMemory, MemAgent

TURN = "<check>yes</check><update>the code is 7</update><next>end</next>"
ANSWER = "\\boxed{7}"
NOTE = "the code is 7"
TEXT = "The code of red is 7. " * 12
LIMITS = ["--max_completion_length", "16", "--max_memory_tokens", "12", "--max_prompt_length", "200"]
READING = ["--instruction", "Read.", "--chunk_size", "30", "--eval_temperature", "0", *LIMITS]
OPTIONS = {"max_memory_tokens": 12, "max_completion_length": 16, "max_prompt_length": 200}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny model that answers chunks with TURN, MemAgent's with NOTE, and answer prompts with ANSWER."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = quickstart.train_tokenizer([TEXT, TURN, ANSWER, MemAgent.instruction] * 50)
    model = quickstart.tiny_model(tokenizer, 0)
    rows = [{"question": "red?", "answers": [], "chunks": [{"text": TEXT[: 20 * n]}]} for n in range(1, 9)]
    examples = []
    for workflow, memory, reply, some in (
        (GatedMemory(instruction="Read."), None, TURN, rows),
        (MemAgent(), None, NOTE, rows[::3]),
        (MemAgent(), NOTE, NOTE, rows[::3]),
        (MemAgent(), NOTE, ANSWER, rows[:2]),  # the same for every row, and as GatedMemory asks
    ):
        workflow.bind(tokenizer, evaluation_config(**OPTIONS))
        for row in some:
            state = workflow.start(row)
            state.answering, state.memory = reply == ANSWER, memory or state.memory
            prompt = [token for segment in workflow.prompt(state) for token in segment]
            examples.append((prompt, [*tokenizer(reply)["input_ids"], tokenizer.eos_token_id]))
    width = max(len(prompt) + len(reply) for prompt, reply in examples)
    ids = torch.full((len(examples), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, reply) in enumerate(examples):
        ids[row, : len(prompt) + len(reply)] = torch.tensor([*prompt, *reply])
        labels[row, len(prompt) : len(prompt) + len(reply)] = torch.tensor(reply)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.05
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.md"
    path.write_text(TEXT, encoding="utf-8")
    return path


def arguments(server, document, *more):
    where = ["--base_url", f"{server.url}/v1", "--model", server.base, "--document", str(document)]
    return [*where, "--question", "red?", *READING, *more]


def test_gates_memory_and_answer_are_shown(model, document, capsys):
    with serving(model) as server:
        assert read_document.main(arguments(server, document)) == 0
    shown = capsys.readouterr().out
    assert "chunk 1/4  update yes  next end  memory" in shown
    assert "\n  the code is 7\n" in shown
    assert "read 1 of 4 chunks" in shown and "answer: 7\n" in shown


def test_json_holds_the_trace_and_the_prompts_are_those_of_training(model, document, capsys):
    with serving(model) as server:
        assert read_document.main(arguments(server, document, "--ignore_exit", "--json")) == 0
        asked = [body for body in server.asked if body["max_tokens"] == 16]
    report = json.loads(capsys.readouterr().out)  # one object and nothing else
    assert (report["answer"], report["memory"], report["api"]) == ("7", "the code is 7", "completions")
    assert (report["chunks"], report["chunks_read"], report["error"]) == (4, 4, None)
    assert [turn["chunk"] for turn in report["turns"]] == [1, 2, 3, 4, None]
    assert [turn["exit"] for turn in report["turns"]] == [True] * 4 + [None]
    tokenizer, workflow = AutoTokenizer.from_pretrained(model), GatedMemory(instruction="Read.")
    workflow.bind(tokenizer, evaluation_config(**OPTIONS))
    cut = [{"text": chunk["text"]} for chunk in reading_job.chunk_document(TEXT, [], tokenizer, 30)]
    state = workflow.start({"question": "red?", "answers": [], "chunks": cut})
    assert asked[0]["prompt"] == [token for segment in workflow.prompt(state) for token in segment]
    assert asked[0]["temperature"] == 0.0 and len(asked) == 5


def exported(model, folder, workflow, **options):
    """Return the version of a fresh adapter, which reads as its base does, that a trainer of a workflow exports."""
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), LoraConfig(r=2, target_modules=["q_proj"]))
    row = {"question": "red?", "answers": ["7"], "chunks": [{"text": TEXT, "evidence": True}]}
    data, tokenizer = Dataset.from_list([row] * 4), AutoTokenizer.from_pretrained(model)
    given = OPTIONS | {"chunk_size": 30, "eval_temperature": 0.0} | options
    return make_trainer(folder, workflow, model=adapted, dataset=data, tokenizer=tokenizer, **given).export_adapter()


def test_an_adapter_of_memagent_is_asked_as_memagent_asks(model, document, tmp_path, capsys):
    version = exported(model, tmp_path, MemAgent())
    with serving(model) as server:
        server.load({"lora_name": "reader", "lora_path": str(version)})
        where = ["--base_url", server.url, "--model", "reader", "--document", str(document), "--question", "red?"]
        assert read_document.main([*where, "--json"]) == 0
        asked = [body["prompt"] for body in server.asked if body["max_tokens"] == 16]
    report = json.loads(capsys.readouterr().out)
    assert (report["answer"], report["chunks_read"], len(asked)) == ("7", 4, 5)  # there is no gate to leave by
    assert [turn["memory"] for turn in report["turns"]] == [NOTE] * 5  # the reply itself
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = {}
    for workflow in (MemAgent(), GatedMemory()):
        workflow.bind(tokenizer, evaluation_config(**OPTIONS))
        cut = [{"text": chunk["text"]} for chunk in reading_job.chunk_document(TEXT, [], tokenizer, 30)]
        state = workflow.start({"question": "red?", "answers": [], "chunks": cut})
        first = [token for segment in workflow.prompt(state) for token in segment]
        state.chunk, state.memory = 1, NOTE
        prompts[type(workflow)] = [first, [token for segment in workflow.prompt(state) for token in segment]]
    assert asked[:2] == prompts[MemAgent] and asked[:2] != prompts[GatedMemory]


def test_no_torch_is_imported_where_a_server_does_the_work(model, document):
    with serving(model) as server:
        shown, err, status, heavy = run("read_document", *arguments(server, document, "--json"))
    assert (json.loads(shown)["answer"], status) == ("7", "0"), err
    assert heavy == {"trl", "transformers"}


def test_a_model_that_is_loaded_here_reads_as_the_served_one(model, document, capsys):
    where = ["--model", str(model), "--document", str(document), "--question", "red?", *READING]
    assert read_document.main([*where, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["answer"], report["memory"], report["api"]) == ("7", "the code is 7", None)
    assert report["chunks_read"] == 1
    # Two tokens are no reply: what was said is shown, and reading goes on.
    assert read_document.main([*where, "--max_completion_length", "2"]) == 0
    shown = capsys.readouterr().out
    assert "chunk 4/4  unparsed (length), memory kept" in shown and shown.count("\n  <check>") == 4
    assert "answer turn  unparsed" in shown and "none (no answer in" in shown
    with pytest.raises(SetupError, match="cannot fit in 20 prompt tokens"):
        read_document.main([*where, "--max_prompt_length", "20"])


TWICE = """
class Twice:
    strict_format = False

    def bind(self, tokenizer, config):
        self.tokenizer = tokenizer

    def start(self, row):
        return {"question": row["question"], "turns": 0}

    def prompt(self, state):
        return [self.tokenizer(state["question"])["input_ids"]]

    def advance(self, state, turn):
        state["turns"] += 1
        return state["turns"] < 2
"""


def test_a_workflow_without_gates_is_shown_by_its_replies(model, document, tmp_path, monkeypatch, capsys):
    (tmp_path / "asking.py").write_text(TWICE)
    monkeypatch.chdir(tmp_path)
    where = ["--model", str(model), "--document", str(document), "--question", "red?", *READING[2:]]
    where += ["--workflow", "asking.Twice"]
    assert read_document.main(where) == 0
    shown = capsys.readouterr().out
    assert "turn 1\n  " in shown and "turn 2\n  " in shown and "read 2 turns in" in shown
    assert not any(word in shown for word in ("memory ", "chunk ", "unparsed"))
    assert read_document.main([*where, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["chunks_read"] is None and [turn["turn"] for turn in report["turns"]] == [1, 2]


def test_an_unparsed_reply_is_short_and_safe_for_a_terminal(capsys):
    entry = {
        "chunk": 2,
        "parsed": False,
        "finish_reason": "eos",
        "memory_tokens": 0,
        "text": "\x1b[31m[red]a\nb" + " c" * 999,
    }
    reading_job.show(Console(width=150, highlight=False), entry | {"check": None}, 3)
    shown = capsys.readouterr().out
    assert "chunk 2/3  unparsed (eos)" in shown and "[31m[red]a b c c" in shown
    assert "\x1b" not in shown and "..." in shown and len(shown) < 500


def test_a_server_without_token_ids_is_asked_by_messages(model, document, capsys):
    with serving(model, token_ids=False, lists_models=False) as server:
        assert read_document.main(arguments(server, document, "--json")) == 0
        (content,) = {body["messages"][0]["content"] for body in server.asked[1:2]}
    report = json.loads(capsys.readouterr().out)
    assert (report["api"], report["answer"], report["chunks_read"]) == ("chat", "7", 1)
    assert content.startswith("Read.\n\n<question>\nred?\n</question>\n\n<section>\nThe code of red is 7.")


@pytest.fixture
def listening_to_ctrl_c():
    """Python's own handler of Ctrl-C: a process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_the_trace_so_far(model, document, capsys, listening_to_ctrl_c):
    with serving(model, delay=0.3) as server:

        def interrupt():
            while sum(body["max_tokens"] == 16 for body in server.asked) < 3:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        assert read_document.main(arguments(server, document, "--ignore_exit", "--json")) == 130
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [turn["chunk"] for turn in report["turns"]] == [1, 2]
    assert (report["error"], report["answer"], report["memory"]) == ("interrupted", None, "the code is 7")
    assert "error: interrupted after 2 of 4 chunks" in err


def test_a_megabyte_is_cut_and_checked(model, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(TEXT * (1_000_000 // len(TEXT) + 1), encoding="utf-8")
    with serving(model, max_model_len=4096) as server:
        more = ["--chunk_size", "3000", "--max_prompt_length", "3500"]
        (options,) = read_document.parse_options([ReadArguments], arguments(server, path, *more))
        reading = reading_job.Reading.prepare(options)
    chunks = reading.row["chunks"]
    assert "".join(chunk["text"] for chunk in chunks) == path.read_text(encoding="utf-8")
    assert len(chunks) > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x7fELF\x00\x01", "is a binary file"),
        (b" \n", "has no text in it"),
        ("Zürich".encode("latin-1"), r"is no UTF-8 text \(byte 1 is 0xfc\): convert it to UTF-8 first"),
        (b"%PDF-1.4 nothing", "is a PDF"),
        (None, "no such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, content, message):
    path = tmp_path / "document"
    if content is not None:
        path.write_bytes(content)
    where = ["--base_url", "http://127.0.0.1:9", "--model", "m", "--document", str(path), "--question", "red?"]
    with pytest.raises(SetupError, match=message):
        read_document.main(where)


def test_utf_16_with_its_mark_is_text(tmp_path):
    (tmp_path / "document").write_bytes("Zürich".encode("utf-16"))
    assert reading_job.read_text(str(tmp_path / "document")) == "Zürich"


def test_servers_that_cannot_read(model, document, monkeypatch):
    monkeypatch.setattr(reading_job, "PATIENCE", 0.5)
    with serving(model, max_model_len=60) as server:
        with pytest.raises(SetupError, match="needs prompts of up to .* and cannot fit in 44 prompt tokens"):
            read_document.main(arguments(server, document))
        with pytest.raises(SetupError, match="takes 60 tokens and a completion may have 80: no room"):
            read_document.main(arguments(server, document, "--max_completion_length", "80"))
        unknown = arguments(server, document, "--model", "other", "--tokenizer", str(model))
        with pytest.raises(SetupError, match=f"does not serve 'other' .it lists '{model}'.*`other` does not exist"):
            read_document.main(unknown)
        url = server.url
    with pytest.raises(SetupError, match=f"{url}/v1/models has been out of reach .* 0.5 seconds"):
        read_document.main(arguments(server, document))


# ---- training and evaluation ----


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Corpus file with a project to train on and one to validate on, two rows each."""
    manifest, _ = build_needle_corpus("multi_key", 2, 6, 3, 8, shared_keys=True)
    chunks = [{"text": TEXT[: 20 * n], "evidence": n == 2} for n in (1, 2, 3)]
    shared = {"question": "red?", "answers": ["7"], "chunks": chunks}
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, manifest, [{"id": f"r{i}", "project": f"p{i % 2}", **shared} for i in range(4)])
    return path


def test_training_and_its_evaluations_are_sampled_by_the_server(model, corpus, tmp_path):
    plain = ["--use_cpu", "--bf16", "false", "--gradient_checkpointing", "false", "--report_to", "none"]
    group = [
        "--per_device_train_batch_size",
        "4",
        "--num_generations",
        "4",
        "--loss_type",
        "group",
        "--max_steps",
        "1",
    ]
    rest = ["--instruction", "Read.", *LIMITS, *plain, *group, "--reward_funcs", "answer_reward", "format_reward"]
    given = ["--model_name_or_path", str(model), "--corpus", str(corpus), "--output_dir", str(tmp_path / "run"), *rest]
    with serving(model) as server:
        vllm = ["--rollout_engine", "vllm", "--vllm_base_url", server.url, "--vllm_server_timeout", "0.5"]
        with pytest.raises(SetupError, match="rollout_engine='vllm' needs a PEFT adapter"):
            train.main([*given, *vllm])
        assert train.main([*given, *vllm, "--use_peft", "--seed", "2"]) == 0
        asked = [body["model"] for body in server.asked if body["max_tokens"] == 16]
    with pytest.raises(SetupError, match="has been out of reach or failing for 0.5 seconds"):
        train.main([*given, *vllm, "--use_peft", "--dry_run", "--output_dir", str(tmp_path / "other")])
    # The adapter before and after the update; 2 validation rows and 4 rows of training take 2 turns or more each.
    assert len(set(asked)) == 2 and server.base not in asked and len(asked) >= 2 * (2 + 4 + 2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["before"]["answer/accuracy"] > 0.5


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """Folder of an adapter that makes the model forget its replies."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(3)
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


def test_evaluation_through_a_server_has_the_metrics_of_the_local_one(model, corpus, adapter, tmp_path):
    read = ["--corpus", str(corpus), "--instruction", "Read.", *LIMITS, "--eval_temperature", "0"]
    local = ["--model", str(model), "--adapter", str(adapter), "--output", str(tmp_path / "local.json")]
    assert evaluate.main([*read, *local, "--compare_base", "--ignore_exit"]) == 0
    with serving(model) as server:
        server.load({"lora_name": "reader", "lora_path": str(adapter)})
        remote = ["--base_url", server.url, "--model", "reader", "--output", str(tmp_path / "remote.json")]
        assert evaluate.main([*read, *remote, "--compare_base", "--ignore_exit"]) == 0
        assert {body["model"] for body in server.asked} == {"reader", server.base}
        alone = [*read, "--base_url", server.url, "--model", server.base, "--output", str(tmp_path / "x.json")]
        with pytest.raises(SetupError, match="--compare_base compares an adapter with its base, but .* names no base"):
            evaluate.main([*alone, "--compare_base"])
    reports = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("local", "remote")]
    assert list(reports[1]["policies"]) == ["base", "adapter", "exit ignored"]
    for name in reports[0]["policies"]:
        first, second = (report["policies"][name] for report in reports)
        assert first["metrics"] == second["metrics"] and first["intervals"] == second["intervals"]
    assert reports[0]["adapter_minus_base"] == reports[1]["adapter_minus_base"]
    base, adapted = (reports[1]["policies"][name]["metrics"] for name in ("base", "adapter"))
    assert (base["answer/accuracy"], base["exit/early"], base["turns/mean"]) == (1.0, 1.0, 1.0)  # it ends at once
    assert base != adapted


def test_an_ungated_reading_beside_the_gated_one(model, corpus, tmp_path, capsys):
    read = ["--model", str(model), "--corpus", str(corpus), *LIMITS, "--eval_temperature", "0"]
    reports = {}
    for name, more in {
        "both": ["--instruction", "Read.", "--compare_ungated"],
        "gated": ["--instruction", "Read."],
        "ungated": ["--workflow", "memagent"],
    }.items():
        output = tmp_path / f"{name}.json"
        assert evaluate.main([*read, *more, "--output", str(output)]) == 0
        reports[name] = json.loads(output.read_text())
        shown = capsys.readouterr().out
        if name == "both":
            # The gated reader leaves at the first of three chunks, before the evidence of the second.
            lines = [line for line in shown.splitlines() if "±" in line]
            (reader, other), (gained,) = (
                [one for one in lines if ("minus" in one) is paired] for paired in (False, True)
            )
            assert "1.000 ±0.00" in reader and "3.000 ±0.00" in other and "-2.000 ±0.00" in gained
    assert list(reports["both"]["policies"]) == ["model", "ungated"]
    gated, ungated = (reports[name]["policies"]["model"]["metrics"] for name in ("gated", "ungated"))
    policies = reports["both"]["policies"]
    assert policies["model"]["metrics"] == gated and policies["ungated"]["metrics"] == ungated
    assert (gated["turns/mean"], ungated["turns/mean"]) == (1.0, 3.0)
    differences = reports["both"]["model_minus_ungated"]
    assert differences["turns/mean"] == {"difference": -2.0, "interval": [-2.0, -2.0]}
    # Answers are right in both; exits are early by the gate, -0.75 in the reward, and late without one, -0.5.
    assert differences["answer/accuracy"]["difference"] == 0.0 and differences["exit/early"]["difference"] == 1.0
    shared = [name for name in gated if name in ungated and name in policies["model"]["intervals"]]
    assert {name: found["difference"] for name, found in differences.items()} == {
        name: gated[name] - ungated[name] for name in shared
    }
    assert all(found["interval"][0] <= found["difference"] <= found["interval"][1] for found in differences.values())


def test_rewards_weigh_as_in_the_training_unless_told_otherwise(model, corpus, tmp_path):
    """One is right and early: answer 1, exit -0.75. By .7 and .3 that is 0.475; by 1 and 1 it was 0.25."""
    version = exported(
        model,
        tmp_path,
        GatedMemory(instruction="Read."),
        reward_funcs=[answer_reward, exit_reward],
        reward_weights=[0.7, 0.3],
    )
    read = ["--model", str(version), "--corpus", str(corpus), "--reward_funcs", "answer_reward", "exit_reward"]
    output = tmp_path / "evaluation.json"
    for more, reward, source in (
        ([], 0.475, str(version / "manifest.json")),
        (["--reward_weights", "1", "1"], 0.25, "command line"),
    ):
        assert evaluate.main([*read, *more, "--output", str(output)]) == 0
        report = json.loads(output.read_text())
        assert report["policies"]["adapter"]["metrics"]["reward"] == pytest.approx(reward)
        assert report["taken_from"]["reward_weights"] == source
