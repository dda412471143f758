"""VllmEngine against a real vLLM server: skipped where there is no vLLM.

    TURNGRPO_VLLM=path/to/bin/vllm TURNGRPO_VLLM_MODEL=path/to/model python -m pytest tests/sampling/test_vllm.py -v -s

TURNGRPO_VLLM names the executable (else `vllm` on PATH), TURNGRPO_VLLM_MODEL a model folder (else a tiny Llama)
and TURNGRPO_VLLM_DTYPE the precision of the server (float32). The trainer computes in float32.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import word_tokenizer
from training import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from turngrpo.rewards import answer_reward, exit_reward, update_reward
from turngrpo.trainer import GatedMemory
from turngrpo.trainer.forward.policy import evaluating
from turngrpo.trainer.sampling.server import ServerError

VLLM = os.environ.get("TURNGRPO_VLLM") or shutil.which("vllm")
DTYPE = os.environ.get("TURNGRPO_VLLM_DTYPE", "float32")
TOLERANCE = 2e-3 if DTYPE == "float32" else 1.0
START_SECONDS = 600
LENGTH = 1024

pytestmark = pytest.mark.skipif(VLLM is None, reason="no vLLM: set TURNGRPO_VLLM, or put vllm on PATH")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if "TURNGRPO_VLLM_MODEL" in os.environ:
        return Path(os.environ["TURNGRPO_VLLM_MODEL"])
    folder, tokenizer = tmp_path_factory.mktemp("model"), word_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 64
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def vllm_server(model, port, log):
    """Run `vllm serve` in a process group of its own; yields (URL, process)."""
    command = [VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", DTYPE]
    command += ["--max-model-len", str(LENGTH), "--enable-lora", "--max-lora-rank", "16", "--max-num-seqs", "16"]
    command += ["--enable-prompt-tokens-details"]
    usual = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment = usual | os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with open(log, "ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    try:
        while True:
            assert process.poll() is None and time.monotonic() - started < START_SECONDS, log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").is_success:
                    break
            time.sleep(0.5)
        print(f"\nvLLM was up after {time.monotonic() - started:.0f} seconds")
        yield url, process
    finally:
        kill(process)


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with vllm_server(model, free_port(), tmp_path_factory.mktemp("log") / "vllm.log") as (url, _):
        yield url


def corpus():
    fillers = ["The red box holds 3 cups.", "Blue is a cold color.", "The code of red is 1."]
    chunks = [
        [{"text": f"{fillers[(i + k) % 3]} " * 6, "evidence": (i + k) % 3 == 2} for k in range(3)] for i in range(4)
    ]
    return Dataset.from_list(
        [
            {"id": f"row-{i}", "question": "What is the code of red?", "answers": ["1"], "chunks": c}
            for i, c in enumerate(chunks)
        ]
    )


def trainer_on(url, model, output, workflow=None, **options):
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    defaults = {
        "model": AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        "tokenizer": tokenizer,
        "dataset": corpus(),
        "workflow": workflow or GatedMemory(strict_format=False),
        "reward_funcs": [answer_reward, exit_reward, spread_reward],
        "turn_reward_funcs": update_reward,
        "peft_config": LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
        "rollout_engine": "vllm",
        "vllm_base_url": [url],
        "vllm_server_timeout": 5.0,
        "max_completion_length": 24,
        "max_prompt_length": 900,
        "behavior_check": "all",
        "behavior_tolerance": TOLERANCE,
        "learning_rate": 2e-3,
    }
    return make_trainer(output, **(defaults | options))


def spread_reward(completion_ids, **columns):
    """Rewards that differ within a group, whatever the model writes."""
    return [sum(ids) % 10 / 10 for ids in completion_ids]


def served_logprobs(url, name, ids):
    """Log-probabilities of a fixed text's tokens after the first, as the server has them."""
    body = {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    return torch.tensor([entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)])


def local_logprobs(model, ids):
    with evaluating(model):
        logprobs = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def test_a_gated_iteration_and_the_adapter_after_it(server, model, tmp_path):
    trainer = trainer_on(server, model, tmp_path, max_steps=2)
    ids = trainer.processing_class("The code of red is 1. Blue is a cold color, red is not.")["input_ids"]
    before = trainer.engine.model
    old = served_logprobs(server, before, ids)
    assert (old - local_logprobs(trainer.model, ids)).abs().max() <= TOLERANCE
    trainer.train()
    logs = [log for log in trainer.state.log_history if "behavior_gap/max" in log]
    for log in logs:
        print({name: log[name] for name in ("behavior_gap/mean", "behavior_gap/max", "turns/mean", "time/generation")})
    assert len(logs) == 2 and max(log["behavior_gap/max"] for log in logs) <= TOLERANCE
    rows = [row for path in sorted((tmp_path / "rollouts").iterdir()) for row in pq.read_table(path).to_pylist()]
    ends = trainer.eos_token_ids
    for row in rows:
        assert (row["completion_ids"][-1] in ends) == (row["finish_reason"] == "eos")
        assert not set(row["completion_ids"][:-1]) & set(ends)
    trainer.engine.refresh()
    new = served_logprobs(server, trainer.engine.model, ids)
    moved, gap = float((new - old).abs().max()), float((new - local_logprobs(trainer.model, ids)).abs().max())
    print(f"the update moved a fixed text by {moved:.4f}; served and local differ by {gap:.2e}")
    assert gap <= TOLERANCE and moved > (5 if DTYPE == "float32" else 1) * gap
    served = [card["id"] for card in httpx.get(f"{server}/v1/models").json()["data"]]
    assert trainer.engine.model in served and before not in served
    prompt_tokens = sum(len(row["prompt_ids"]) for row in rows)
    computed = trainer.engine.counts.suffix
    print(f"{prompt_tokens} prompt tokens, {computed} computed, the rest from the prefix cache")
    assert computed < 0.7 * prompt_tokens  # 4 members share their chunk prompts up to the memory


def test_the_same_request_gets_the_same_tokens(server, model, tmp_path):
    trainer = trainer_on(server, model, tmp_path)
    rollouts = [trainer._roll_out(list(corpus()), trainer.engine, 4, 3, 0) for _ in range(2)]
    ids = [[turn.completion_ids for turn in rollout.turns] for rollout in rollouts]
    assert ids[0] == ids[1]


class Fatal(GatedMemory):
    """Kills the server in the middle of the second iteration."""

    def __init__(self, process):
        super().__init__(strict_format=False)
        self.process, self.armed, self.killed = process, False, 0.0

    def advance(self, state, turn):
        goes_on = super().advance(state, turn)
        if turn.step == 1 and self.armed:
            kill(self.process)
            self.killed = time.monotonic()
            self.armed = False
        return goes_on


def test_a_server_killed_in_mid_iteration_and_the_resume(model, tmp_path):
    port, log = free_port(), tmp_path / "vllm.log"
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    with vllm_server(model, port, log) as (url, process):
        workflow = Fatal(process)
        trainer = trainer_on(url, model, tmp_path / "run", workflow, **options)
        collected = trainer._roll_out

        def roll_out(*arguments, **named):
            workflow.armed = trainer.state.global_step == 1
            return collected(*arguments, **named)

        trainer._roll_out = roll_out
        with pytest.raises(ServerError, match="has been out of reach or failing for 5 seconds"):
            trainer.train()
        assert time.monotonic() - workflow.killed < 5 + 3
    assert [path.name for path in (tmp_path / "run" / "rollouts").iterdir()] == ["iteration_00000.parquet"]
    with vllm_server(model, port, log) as (url, _):
        resumed = trainer_on(url, model, tmp_path / "run", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    files = sorted((tmp_path / "run" / "rollouts").glob("*.parquet"))
    assert [path.name for path in files] == [f"iteration_0000{i}.parquet" for i in range(3)]
    places = [row["id"] for path in files for row in pq.read_table(path).to_pylist()]
    assert len(places) == len(set(places))
