"""A small OpenAI-compatible server that computes with a real model, in the ways of vLLM that the clients depend on.

Prompts are token ids, text or messages; adapters are loaded and unloaded while it runs; error
bodies and statuses are those of vLLM 0.32, or with `token_ids=False` those of `transformers serve`.
"""

import contextlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from turngrpo.trainer.sampling.noise import nucleus


class Refusal(Exception):
    """An error answer: its status and body."""

    def __init__(self, status, message, kind="BadRequestError"):
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


class ModelServer(ThreadingHTTPServer):
    """Serves one base model and its adapters; `asked` keeps the bodies of completion requests.

    `delay` seconds pass before each completion, `failures` completions get HTTP 503, and the process dies at
    completion number `die_after` (from 1) while its request waits.
    """

    daemon_threads = True

    def __init__(self, folder, port=0, **options):
        super().__init__(("127.0.0.1", port), Handler)
        defaults = {
            "runtime_lora": True,
            "max_lora_rank": 16,
            "max_model_len": 512,
            "logprobs_mode": "raw_logprobs",
            "token_ids": True,
            "lists_models": True,
            "api_key": None,
            "delay": 0.0,
            "failures": 0,
            "die_after": None,
        }
        self.options = SimpleNamespace(**(defaults | options))
        self.base = str(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.adapters, self.asked, self.completions, self.lock = {}, [], 0, threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def served(self, name):
        if name != self.base and name not in self.adapters:
            raise Refusal(404, f"The model `{name}` does not exist.", "NotFoundError")
        return name

    # ---- adapters ----

    def load(self, body):
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not os.path.isdir(path):
            raise Refusal(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        rank = PeftConfig.from_pretrained(path).r
        if rank > self.options.max_lora_rank:
            limit = self.options.max_lora_rank
            raise Refusal(500, f"LoRA rank {rank} is greater than max_lora_rank {limit}.", "InternalServerError")
        with self.lock:
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(path, name)
            else:
                self.model = PeftModel.from_pretrained(self.model, path, name).eval()
        self.adapters[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body):
        name = body["lora_name"]
        if name not in self.adapters:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self.adapters[name]  # what stands in memory is out of reach
        return f"Success: LoRA adapter '{name}' removed successfully."

    # ---- sampling ----

    def complete(self, ids, body, ends):
        """Sample up to max_tokens after `ids`; returns (ids, log-probabilities, finish_reason)."""
        if max(ids) >= self.model.get_input_embeddings().num_embeddings:
            raise Refusal(400, f"Token id {max(ids)} is out of vocabulary")
        if len(ids) >= self.options.max_model_len:
            raise Refusal(400, f"This model's maximum context length is {self.options.max_model_len} tokens.")
        limit = min(body.get("max_tokens", 16), self.options.max_model_len - len(ids))
        generator = torch.Generator().manual_seed(body.get("seed", 0))
        adapter = body["model"] if body["model"] in self.adapters else None
        sampled, values = [], []
        with self.lock, torch.no_grad(), contextlib.ExitStack() as stack:
            if adapter is not None:
                self.model.set_adapter(adapter)
            elif isinstance(self.model, PeftModel):
                stack.enter_context(self.model.disable_adapter())
            inputs, cache = torch.tensor([ids]), None
            while len(sampled) < limit:
                output = self.model(input_ids=inputs, cache=cache, use_cache=True)
                logits, cache = output.logits[0, -1:].float(), output.past_key_values
                token = self._sample(logits, body, generator)
                raw = logits if self.options.logprobs_mode == "raw_logits" else logits.log_softmax(-1)
                sampled.append(token)
                values.append(float(raw[0, token]))
                if token in ends:
                    return sampled, values, "stop"
                inputs = torch.tensor([[token]])
        return sampled, values, "length"

    def _sample(self, logits, body, generator):
        temperature = body.get("temperature", 1.0)
        if temperature == 0:
            return int(logits.argmax())
        probabilities = nucleus((logits / temperature).double().softmax(-1), body.get("top_p", 1.0))
        return int(torch.multinomial(probabilities, 1, generator=generator))

    def ends(self, body):
        own = [] if body.get("ignore_eos") else [self.tokenizer.eos_token_id]
        return {*own, *(body.get("stop_token_ids") or [])}

    def count(self, body):
        """Note one request for a completion, and be as slow or as broken as asked."""
        with self.lock:
            self.completions += 1
            number, fails = self.completions, self.options.failures > 0
            self.options.failures -= fails
            self.asked.append(body)
        time.sleep(self.options.delay)
        if number == self.options.die_after:
            os._exit(9)
        if fails:
            raise Refusal(503, "The server is overloaded", "ServiceUnavailable")

    # ---- routes ----

    def models(self, body):
        if not self.options.lists_models:
            raise Refusal(500, "Internal Server Error")  # as transformers serve without a cache folder
        cards = [{"id": self.base, "object": "model", "root": self.base, "parent": None}]
        if self.options.token_ids:
            cards[0]["max_model_len"] = self.options.max_model_len
        cards += [{"id": n, "object": "model", "root": p, "parent": self.base} for n, p in self.adapters.items()]
        return {"object": "list", "data": cards}

    def tokenize(self, body):
        ids = self.tokenizer(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))["input_ids"]
        return {"count": len(ids), "max_model_len": self.options.max_model_len, "tokens": ids}

    def text_completion(self, body):
        self.served(body["model"])
        prompt = body["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt)["input_ids"]
        elif not self.options.token_ids:
            refusal = Refusal(400, "")
            refusal.body = {"detail": "prompt must be a string."}
            raise refusal
        self.count(body)
        ids, values, reason = self.complete(prompt, body, self.ends(body))
        choice = {"index": 0, "text": self.tokenizer.decode(ids, skip_special_tokens=True), "finish_reason": reason}
        if body.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": values, "tokens": self.tokenizer.convert_ids_to_tokens(ids)}
        if body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        return self._answer(choice, prompt, ids)

    def chat_completion(self, body):
        self.served(body["model"])
        self.count(body)
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=True)
        ids, _, reason = self.complete(prompt["input_ids"], body, self.ends(body))
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
        return self._answer(choice, prompt["input_ids"], ids)

    def _answer(self, choice, prompt, ids):
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return {"object": "completion", "choices": [choice], "usage": usage}

    def route(self, path, body):
        routes = {
            "/health": lambda body: "",
            "/v1/models": self.models,
            "/v1/completions": self.text_completion,
            "/v1/chat/completions": self.chat_completion,
        }
        if self.options.token_ids:
            routes["/tokenize"] = self.tokenize
        if self.options.runtime_lora:
            routes |= {"/v1/load_lora_adapter": self.load, "/v1/unload_lora_adapter": self.unload}
        if path not in routes:
            refusal = Refusal(404, "")
            refusal.body = {"detail": "Not Found"}
            raise refusal
        return routes[path](body)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body):
        key = self.server.options.api_key
        try:
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                raise Refusal(401, "Unauthorized")
            status, content = 200, self.server.route(self.path, body)
        except Refusal as refusal:
            status, content = refusal.status, refusal.body
        is_text = isinstance(content, str)
        data = content.encode() if is_text else json.dumps(content).encode()
        with contextlib.suppress(ConnectionError):  # the client may have given up
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serving(folder, **options):
    """Serve from a thread of this process while the context lasts."""
    server = ModelServer(folder, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
