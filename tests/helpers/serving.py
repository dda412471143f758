"""Real servers on an exported adapter, started by the commands of its model card, and what they should answer."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request

import torch
from jobs import quickstart
from peft import PeftModel
from tiny import adapted_model, sharpen
from training import make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "reader"
MESSAGES = [{"role": "user", "content": "what is the code of lamp ?"}]
NEW_TOKENS = 12


def trained_adapter(folder):
    """Train the LoRA of a tiny model for one update and export it; returns the folders of base and version."""
    tokenizer = quickstart.train_tokenizer(["what is the code of lamp ?"])
    base = folder / "base"
    sharpen(quickstart.tiny_model(tokenizer, seed=0)).save_pretrained(base)  # heads of size 32, as vLLM wants them
    tokenizer.save_pretrained(base)
    model = adapted_model(tokenizer, AutoModelForCausalLM.from_pretrained(base))
    model.delete_adapter("ref")
    trainer = make_trainer(folder / "run", model=model, tokenizer=tokenizer, max_steps=1, max_prompt_length=64)
    trainer.train()
    return base, trainer.export_adapter(NAME)


def greedy(base, version=None):
    """Return (token ids, text) of the local model's greedy reply, with the adapter of `version` if it is given."""
    tokenizer = AutoTokenizer.from_pretrained(version or base)
    model = AutoModelForCausalLM.from_pretrained(base)
    model = model if version is None else PeftModel.from_pretrained(model, version)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    ids = output[0, prompt["input_ids"].shape[1] :].tolist()
    return ids, tokenizer.decode(ids, skip_special_tokens=True)


def card_commands(version, server):
    """Return the block of shell commands of a version's card that starts `server`."""
    blocks = re.findall(r"```bash\n(.*?)```", (version / "README.md").read_text(), re.DOTALL)
    (block,) = [block for block in blocks if server in block]
    return block.strip()


@contextlib.contextmanager
def served(version, server, folder, executables, options="", environment=None, seconds=120):
    """Run the card's commands for `server` with `options` added; yields the address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"set -e\n{card_commands(version, server)} --host 127.0.0.1 --port {port} {options}"
    path = f"{executables}{os.pathsep}{os.environ['PATH']}"
    base = json.loads((version / "adapter_config.json").read_text())["base_model_name_or_path"]
    given = {"ADAPTER": str(version), "BASE": base, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with open(folder / f"{port}.log", "w+") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=os.environ | given | (environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + seconds
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                log.seek(0)
                assert process.poll() is None and time.monotonic() < end, log.read()[-4000:]
                time.sleep(0.2)
            yield address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def complete(address, model, **options):
    """Ask for a greedy chat completion; returns (status, the choice)."""
    body = {"model": model, "messages": MESSAGES, "max_tokens": NEW_TOKENS, "temperature": 0, **options}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return response.status, json.load(response)["choices"][0]
