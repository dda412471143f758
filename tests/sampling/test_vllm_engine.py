"""VllmEngine against a small server that computes: same numbers as the model, pushed adapters, faults, refusals."""

import asyncio
import multiprocessing
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from openai_server import ModelServer, serving
from peft import LoraConfig
from tiny import sharpen, tiny_model, word_tokenizer
from training import ParityWorkflow, make_trainer
from transformers import AutoModelForCausalLM

from turngrpo.trainer import TurnGRPOConfig, TurnGRPOTrainer
from turngrpo.trainer.reading.rollout import NoiseKey, Request
from turngrpo.trainer.reward_calls import run_async
from turngrpo.trainer.sampling.server import Server, ServerError
from turngrpo.trainer.sampling.vllm_engine import VllmEngine, request_seed, vllm_servers

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


def save_model(folder, seed, words=""):
    tokenizer = word_tokenizer(words)
    sharpen(tiny_model(len(tokenizer), seed)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trainer_on(url, model, output, **options):
    defaults = {
        "peft_config": LORA,
        "rollout_engine": "vllm",
        "vllm_base_url": [url],
        "vllm_server_timeout": 2.0,
        "behavior_check": "all",
        "behavior_tolerance": 2e-4,
        "learning_rate": 0.1,
    }
    return make_trainer(output, model=AutoModelForCausalLM.from_pretrained(model), **(defaults | options))


def engine_on(server, **options):
    defaults = {"eos_ids": [3], "max_new_tokens": 6, "prompt_limit": 100, "model": server.base}
    return VllmEngine([Server(server.url, patience=1.0)], **(defaults | options))


def requests(count=4):
    return [Request([[5, 6, 7], [8 + i]], NoiseKey(0, 0, i // 2, i % 2, 0), f"row {i}") for i in range(count)]


# ---- training ----


def test_what_an_earlier_life_left_is_removed_at_the_start_and_nothing_of_others(folder, tmp_path):
    with serving(folder) as server:
        killed = trainer_on(server.url, folder, tmp_path / "mine", vllm_adapter_dir=str(tmp_path / "shared"))
        left = killed.engine.adapter.name  # as SIGKILL leaves it: loaded, and on disk
        killed.engine.adapter._loaded.clear()
        other = trainer_on(server.url, folder, tmp_path / "other", vllm_adapter_dir=str(tmp_path / "shared"))
        others = other.engine.adapter.name
        (tmp_path / "shared" / f".partial-{left}").mkdir()
        again = trainer_on(server.url, folder, tmp_path / "mine", vllm_adapter_dir=str(tmp_path / "shared"))
        mine = again.engine.adapter.name
        assert set(server.adapters) == {others, mine} and left not in (others, mine)
        assert {path.name for path in (tmp_path / "shared").iterdir()} == {others, mine}


def test_every_rollout_is_sampled_from_the_adapter_as_it_is(folder, tmp_path):
    with serving(folder) as server:
        trainer = trainer_on(server.url, folder, tmp_path, max_steps=3)
        trainer.train()
        (served,) = server.adapters.values()  # earlier ones were unloaded
        assert [path.name for path in (tmp_path / "vllm_adapters").iterdir()] == [Path(served).name]
    gaps = [log["behavior_gap/max"] for log in trainer.state.log_history if "behavior_gap/max" in log]
    assert len(gaps) == 3 and max(gaps) < 1e-4
    names = {body["model"] for body in server.asked if body["model"] != server.base}
    assert len(names) == 3  # one for each state: the first is that of the probe
    assert (
        max(log["kl"] if "kl" in log else log["ratio/max"] for log in trainer.state.log_history if "loss" in log) > 0
    )


def test_a_stale_adapter_would_be_caught(folder, tmp_path):
    with serving(folder) as server:
        trainer = trainer_on(server.url, folder, tmp_path)
        trainer.engine.refresh = lambda: None
        with pytest.raises(RuntimeError, match="does not reproduce the recorded .* worst at iteration 1, "):
            trainer.train()


def test_the_same_rollout_as_the_seeds_say(folder, tmp_path):
    """Noise depends on the key alone: neither on how many requests are open nor on the number of servers."""
    with serving(folder) as first, serving(folder) as second:
        one = engine_on(first).generate(requests())
        pair = engine_on(first)
        pair.servers = [Server(first.url, connections=1), Server(second.url)]
        assert pair.generate(requests()) == one
        assert len({tuple(completion.ids) for completion in one}) > 1
        by_server = [{body["prompt"][-1] for body in server.asked} for server in (first, second)]
    assert by_server == [{8, 9, 10, 11}, {10, 11}]  # the second group went to the second server
    assert request_seed(NoiseKey(0, 0, 0, 0, 0)) != request_seed(NoiseKey(0, 0, 0, 1, 0))
    assert 0 <= request_seed(NoiseKey(3, 2, 1, 0, 0)) < 2**63


def test_what_is_asked_and_what_is_recorded(folder):
    with serving(folder) as server:
        sampled = engine_on(server, max_new_tokens=40, eos_ids=[3, 9]).generate(requests())
        (body,) = [body for body in server.asked if body["prompt"] == [5, 6, 7, 8]]  # they arrive in any order
    support = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert support.items() <= body.items()
    assert body["presence_penalty"] == body["frequency_penalty"] == 0.0
    assert body["ignore_eos"] and body["stop_token_ids"] == [3, 9]
    for completion in sampled:
        if completion.finish_reason == "eos":
            assert completion.ids[-1] in (3, 9) and not {3, 9} & set(completion.ids[:-1])
        else:
            assert len(completion.ids) == 40 and not {3, 9} & set(completion.ids)
        assert len(completion.behavior_logprobs) == len(completion.ids) and max(completion.behavior_logprobs) <= 0
    assert {completion.finish_reason for completion in sampled} >= {"eos"}


def test_an_event_loop_may_be_running(folder):
    async def notebook():
        return engine_on(server).generate(requests(1))

    with serving(folder) as server:
        assert run_async(notebook()) == asyncio.run(notebook()) == engine_on(server).generate(requests(1))


# ---- faults ----


def test_a_busy_server_is_asked_again_and_nothing_is_lost(folder):
    with serving(folder) as server:
        expected = engine_on(server).generate(requests())
        server.options.failures = 2
        assert engine_on(server).generate(requests()) == expected
        assert len(server.asked) == 4 + 4 + 2


def test_a_server_that_goes_on_failing_and_one_that_does_not_answer(folder):
    with serving(folder, failures=1000) as server:
        started = time.monotonic()
        with pytest.raises(ServerError, match="failing for 1 seconds: HTTP 503: The server is overloaded"):
            engine_on(server).generate(requests())
        assert 1 <= time.monotonic() - started < 3
        server.options.failures, server.options.delay = 0, 3.0
        silent = engine_on(server)
        silent.servers = [Server(server.url, patience=60.0, answer_timeout=0.5)]
        started = time.monotonic()
        with pytest.raises(ServerError, match="did not answer within 0.5 seconds"):
            silent.generate(requests())
        assert time.monotonic() - started < 2


def test_an_adapter_lost_by_a_restart_is_loaded_again(folder, tmp_path):
    with serving(folder) as server:
        trainer = trainer_on(server.url, folder, tmp_path)
        trainer.engine.refresh()
        expected = trainer.engine.generate(requests())
        server.adapters.clear()
        assert trainer.engine.generate(requests()) == expected
        assert list(server.adapters) == [trainer.engine.model]


class Counted(ParityWorkflow):
    """Two turns each, so that completions can be counted."""

    def advance(self, state, turn):
        super().advance(state, turn)
        return state["turns"] < 2


def start_process(folder, **options):
    """Serve from a process of its own, a fork of this one that may die."""
    server = ModelServer(folder, **options)
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever)
    process.start()
    server.socket.close()  # of this process; connections are the other's
    return process, server.url


def ledger(folder):
    names = ("id", "completion_ids", "behavior_logprobs")
    return {
        path.name: pq.read_table(path).select(names).to_pylist() for path in (folder / "rollouts").glob("*.parquet")
    }


def test_a_server_killed_in_mid_iteration_and_the_resume(folder, tmp_path):
    """8 rows x 2 turns a rollout, after 5 probes: the server dies within the third rollout."""
    options = {"workflow": Counted(), "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    with serving(folder) as server:
        trainer_on(server.url, folder, tmp_path / "straight", **options).train()
    process, url = start_process(folder, die_after=5 + 16 + 16 + 11)
    trainer = trainer_on(url, folder, tmp_path / "run", **options)
    with pytest.raises(ServerError, match="has been out of reach or failing for 2 seconds"):
        trainer.train()
    process.join(10)
    assert process.exitcode == 9
    assert sorted(ledger(tmp_path / "run")) == ["iteration_00000.parquet", "iteration_00001.parquet"]
    with serving(folder, port=int(url.rsplit(":", 1)[1])) as server:
        resumed = trainer_on(server.url, folder, tmp_path / "run", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert ledger(tmp_path / "run") == ledger(tmp_path / "straight")  # the same 48 turns, each once
    assert not list((tmp_path / "run" / "rollouts").glob("abandoned_*"))


# ---- what is checked before training ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runtime_lora": False}, "loads no adapters while it runs.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"max_lora_rank": 2}, "LoRA rank 4 is greater than max_lora_rank 2.*--max-lora-rank 4 or more"),
        (
            {"max_model_len": 60},
            "takes 60 tokens, but a prompt and its completion may have 512: .*--max-model-len 512",
        ),
        (
            {"logprobs_mode": "raw_logits"},
            "differ from those of the model in training by .*--logprobs-mode raw_logprobs",
        ),
        ({"api_key": "secret"}, "refused .HTTP 401.: Unauthorized"),
        ({"token_ids": False}, "is no vLLM server"),
    ],
)
def test_a_server_that_cannot_serve_rollouts(folder, tmp_path, options, message):
    with serving(folder, **options) as server, pytest.raises(ValueError, match=message):
        trainer_on(server.url, folder, tmp_path)


@pytest.mark.parametrize(
    ("seed", "words", "message"),
    [
        (1, "", "differ from those of the model in training by"),  # other weights
        (0, "<section>", "tokenises '<section>.* the tokenizer here as"),
    ],
)
def test_a_server_of_another_model(folder, tmp_path, seed, words, message):
    other = save_model(tmp_path / "other", seed, words)
    with serving(other) as server, pytest.raises(ValueError, match=message):
        trainer_on(server.url, folder, tmp_path)


def test_a_server_of_a_smaller_vocabulary(folder, tmp_path):
    tokenizer = word_tokenizer("many more words")
    model = sharpen(tiny_model(len(tokenizer)))
    with serving(folder) as server, pytest.raises(ValueError, match="does not take token 34, the largest"):
        make_trainer(
            tmp_path,
            model=model,
            tokenizer=tokenizer,
            peft_config=LORA,
            rollout_engine="vllm",
            vllm_base_url=[server.url],
        )


def test_no_server_at_all(folder, tmp_path):
    started = time.monotonic()
    with pytest.raises(ServerError, match="127.0.0.1:9/v1/models has been out of reach .* 2 seconds: ConnectError"):
        trainer_on("http://127.0.0.1:9/v1/", folder, tmp_path)
    assert 2 <= time.monotonic() - started < 10


def test_the_key_of_the_environment_is_sent(folder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serving(folder, api_key="secret") as server:
        assert len(engine_on(server).generate(requests(1))) == 1
    assert "secret" not in repr(Server("http://localhost:8000"))


def test_a_prompt_that_is_too_long(folder):
    with (
        serving(folder) as server,
        pytest.raises(ValueError, match="row 0, turn 0: the prompt has 4 tokens, expected 1 to 3"),
    ):
        engine_on(server, prompt_limit=3).generate(requests())


def test_full_training_has_no_adapter_to_push(folder, tmp_path):
    with pytest.raises(ValueError, match="rollout_engine='vllm' needs a PEFT adapter.*--use_peft"):
        trainer_on("http://localhost:1", folder, tmp_path, peft_config=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected one of them"),
        ({"vllm_base_url": ["http://a"], "vllm_server_base_url": "http://a"}, "expected one of them"),
        ({"vllm_base_url": ["http://a"], "temperature": 0.9}, "temperature=0.9 is not honoured with rollout_engine"),
        ({"vllm_base_url": ["http://a"], "vllm_server_port": 9000}, "vllm_server_port=9000 is not honoured"),
        (
            {"vllm_base_url": ["http://a"], "use_vllm": True},
            "use_vllm=True is not honoured .*set rollout_engine='vllm'",
        ),
    ],
)
def test_options_that_say_nothing_together(tmp_path, options, message):
    config = TurnGRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to="none", rollout_engine="vllm", **options
    )
    with pytest.raises(ValueError, match=message):
        config.check_workflow_options()


def test_the_options_of_trl_that_mean_the_same(tmp_path):
    config = TurnGRPOConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to="none",
        rollout_engine="vllm",
        vllm_server_base_url="http://a:8000/v1",
        vllm_server_timeout=7.0,
        vllm_request_timeout=9.0,
        vllm_concurrent_requests=3,
    )
    config.check_workflow_options()
    (server,) = vllm_servers(config)
    assert (server.base_url, server.patience, server.answer_timeout, server.connections) == ("http://a:8000", 7, 9, 3)
    config.vllm_server_base_url = "localhost:8000"
    with pytest.raises(ValueError, match="'localhost:8000': expected a URL as in http://localhost:8000"):
        vllm_servers(config)


def test_without_a_workflow_trl_has_its_own_vllm(folder, tmp_path):
    options = {"rollout_engine": "vllm", "vllm_base_url": ["http://a"]}
    config = TurnGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    with pytest.raises(ValueError, match="rollout_engine='vllm' needs a workflow; without one set TRL's use_vllm"):
        TurnGRPOTrainer(str(folder), lambda **columns: [0.0], config)
