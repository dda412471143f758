"""VllmEngine: turns sampled from the CURRENT adapter by running vLLM servers, with their log-probabilities."""

import asyncio
import contextlib
import copy
import hashlib
import math
import os
import shutil
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from .adapters import TRAINED
from .engines import TokenCounts, check_prompts, probe_requests, recorded_gaps
from .policy import Policy
from .rollout import Completion, NoiseKey, Request
from .scoring import tensors_digest
from .server import RefusedRequest, Server, ServerError, Session, gather_all, run_async

# Sent with every request: what is left out is taken from the model's generation_config.json.
FULL_SUPPORT = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# In the mean a 135M model differs by 1e-5 in float32 and 0.05 in bfloat16 (single tokens by 0.6), other weights or raw
# logits by far more.
PROBE_TOLERANCE = 0.2
PROBE_TEXT = "<section>\nThe 3 codes of <b>Zürich</b>: 42, 7 and 1999.\n</section>\n"
CLEAN_UP_TIMEOUT = 5.0


def request_seed(key: NoiseKey) -> int:
    """Return 63 bits that depend on a turn's noise key alone, so that a resumed run asks the same."""
    digest = hashlib.sha256(repr(tuple(int(part) for part in key)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class ServedAdapter:
    """The trained adapter of a PEFT model, as it is now, on every server.

    Each state is saved whole into a folder of its own under `folder`, which the servers must be able to read, and
    loaded under a name of its own: a server that is given a used name or path may go on with the old weights.
    """

    def __init__(self, model: Any, servers: Sequence[Server], folder: str | os.PathLike[str]):
        self.model, self.servers, self.folder = model, servers, Path(folder).resolve()
        self.run, self.count = f"turngrpo-{uuid.uuid4().hex[:12]}", 0
        self.name: str | None = None  # what is served now, and the digest of its weights
        self._digest = ""
        self._loaded: list[tuple[str, Path]] = []  # on the servers and on disk, process 0
        weakref.finalize(self, _clean_up, self.servers, self._loaded)

    def push(self) -> str:
        """Serve the adapter as it is now and return its name; all processes call it, process 0 saves and loads."""
        outcome: list[Any] = [None, None]
        if PartialState().is_main_process:
            try:
                outcome = [self._push(), None]
            except (ValueError, OSError) as error:
                broadcast_object_list([None, str(error)])
                raise
        name, fault = broadcast_object_list(outcome)
        if fault is not None:
            raise ServerError(f"process 0 could not push the adapter: {fault}")
        self.name = name
        return name

    def _push(self) -> str:
        trained = [(name, p) for name, p in self.model.named_parameters() if f".{TRAINED}." in name]
        digest = tensors_digest(trained)
        if self.name is not None and digest == self._digest:
            return self.name
        self.count += 1
        name = f"{self.run}-{self.count:05d}"
        path, partial = self.folder / name, self.folder / f".partial-{name}"
        partial.mkdir(parents=True)
        self.model.save_pretrained(
            str(partial), selected_adapters=[TRAINED], safe_serialization=True, save_embedding_layers=False
        )
        os.rename(partial, path)
        self._loaded.append((name, path))
        for server in self.servers:
            self.load(server, name)
        for old in self._loaded[:-1]:
            for server in self.servers:
                with contextlib.suppress(RefusedRequest):  # a server that started again has lost it
                    server.ask("/v1/unload_lora_adapter", {"lora_name": old[0]}, retry=False)
            shutil.rmtree(old[1])
            self._loaded.remove(old)
        self._digest = digest
        return name

    def load(self, server: Server, name: str) -> None:
        """Load an adapter under its name into one server, where it may be already; ValueError where that refuses."""
        body = {"lora_name": name, "lora_path": str(self.folder / name)}
        try:
            server.ask("/v1/load_lora_adapter", body, retry=False)
        except RefusedRequest as error:
            if "already been loaded" in str(error):
                return
            rank = self.model.peft_config[TRAINED].r
            raise ValueError(
                f"{server.base_url} does not load the adapter: {error}; expected a server that was started with "
                f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora --max-lora-rank {rank} or more, and that "
                f"reads {self.folder} (vllm_adapter_dir)"
            ) from error


def _clean_up(servers: Sequence[Server], loaded: list[tuple[str, Path]]) -> None:
    """Unload and remove what a run left at its end; a server that is gone is left alone."""
    for name, path in loaded:
        for server in servers:
            headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
            with contextlib.suppress(httpx.HTTPError):
                url = f"{server.base_url}/v1/unload_lora_adapter"
                httpx.post(url, json={"lora_name": name}, headers=headers, timeout=CLEAN_UP_TIMEOUT)
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class VllmEngine:
    """Samples on vLLM servers from token-id prompts, and records the sampled ids with their log-probabilities.

    It asks for the model `model`, or with `adapter` for the CURRENT adapter, which `refresh` pushes. The requests of a
    group go together to one server, whose prefix cache holds what they share. A request's seed is a
    function of its noise key.
    """

    servers: Sequence[Server]
    eos_ids: Sequence[int]
    max_new_tokens: int
    prompt_limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    model: str = ""
    adapter: ServedAdapter | None = None
    counts: TokenCounts = field(default_factory=TokenCounts)

    def refresh(self) -> None:
        """Sample from the policy as it is now: called by all processes before each rollout."""
        if self.adapter is not None:
            self.model = self.adapter.push()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete every request, in order, or none.

        Raises ServerError when a server is gone or does not answer (see Server), ValueError for a prompt that is too
        long or what a server refuses.
        """
        check_prompts(requests, self.prompt_limit, f"with {self.max_new_tokens} new tokens they must fit the server")
        return run_async(self._generate(requests))

    async def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        async with contextlib.AsyncExitStack() as stack:
            sessions = [await stack.enter_async_context(server.session()) for server in self.servers]
            return await gather_all([self._complete(sessions[r.key.group % len(sessions)], r) for r in requests])

    async def _complete(self, session: Session, request: Request) -> Completion:
        body = {
            "model": self.model,
            "prompt": request.prompt_ids,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            **FULL_SUPPORT,
            "seed": request_seed(request.key),
            "ignore_eos": True,  # the trainer's ends of a completion, and no other of the server's
            "stop_token_ids": list(self.eos_ids),
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
        }
        try:
            answer = await session.ask("/v1/completions", body)
        except RefusedRequest as refusal:
            if refusal.status != 404 or self.adapter is None:
                raise
            # The server was started again and has lost it.
            await asyncio.to_thread(self.adapter.load, session.server, self.model)
            answer = await session.ask("/v1/completions", body)
        return self._read(answer, request, session.server)

    def _read(self, answer: Any, request: Request, server: Server) -> Completion:
        """Check an answer and return it as what the trainer's own sampler would have recorded."""
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        place = f"{request.label}, turn {request.key.turn}, {server.base_url}"
        if ids is None or logprobs is None or len(ids) != len(logprobs):
            raise ValueError(
                f"{place}: expected the sampled token ids with a log-probability each, found choices with "
                f"{sorted(choice)}; use vLLM 0.11 or later"
            )
        if not all(value is not None and math.isfinite(value) for value in logprobs):
            raise FloatingPointError(f"{place}: the log-probabilities are not finite")
        ended = bool(ids) and ids[-1] in self.eos_ids
        if not ended and len(ids) != self.max_new_tokens:
            raise RuntimeError(
                f"{place}: the completion ends after {len(ids)} of {self.max_new_tokens} tokens without one of "
                f"{list(self.eos_ids)} (finish_reason {choice.get('finish_reason')!r})"
            )
        usage = answer.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        self.counts.suffix += len(request.prompt_ids) - cached
        self.counts.decode += len(ids)
        return Completion(ids, logprobs, "eos" if ended else "length")

    def verify(self, policy: Policy) -> None:
        """Sample a few tokens of the adapter and compare their log-probabilities with the model's own.

        Raises ValueError where they differ by more than low precision explains.
        """
        self.refresh()
        probe = copy.copy(self)
        probe.max_new_tokens, probe.temperature, probe.top_p, probe.eos_ids = 3, 1.0, 1.0, []
        probe.counts = TokenCounts()
        gap = float(recorded_gaps(probe, policy, probe_requests(policy.head().weight.shape[0])).mean())
        if not gap <= PROBE_TOLERANCE:
            served = [card["id"] for server in self.servers for card in base_models(server)]
            raise ValueError(
                f"log-probabilities of the served model ({served}) differ from those of the model in training by "
                f"{gap:.3g} in the mean, expected at most {PROBE_TOLERANCE}: serve the same base weights, with "
                "--logprobs-mode raw_logprobs (vLLM's default)"
            )


def base_models(server: Server) -> list[dict[str, Any]]:
    """Return the cards of a server's models that are no adapters; waits for a server that is starting."""
    return [card for card in server.ask("/v1/models")["data"] if not card.get("parent")]


def check_server(server: Server, tokenizer: Any, needed_tokens: int) -> int:
    """Return the context length of a vLLM server after checking all that rollouts need but the adapter itself.

    Raises ServerError where it cannot be reached, ValueError where it serves no base model, no runtime adapters,
    another vocabulary, or fewer than `needed_tokens` tokens.
    """
    url, cards = server.base_url, base_models(server)
    if not cards:
        raise ValueError(f"{url} serves no base model: expected `vllm serve BASE_MODEL --enable-lora`")
    model, length = cards[0]["id"], cards[0].get("max_model_len")
    if length is None:
        raise ValueError(
            f"{url} is no vLLM server (its models state no max_model_len): use rollout_engine='transformers'"
        )
    if length < needed_tokens:
        raise ValueError(
            f"{url} takes {length} tokens, but a prompt and its completion may have {needed_tokens}: start it with "
            f"--max-model-len {needed_tokens}, or lower max_prompt_length or max_completion_length"
        )
    try:
        server.ask("/v1/unload_lora_adapter", {"lora_name": "turngrpo-check"})
    except RefusedRequest as refusal:
        if "turngrpo-check" not in refusal.reason:  # the route itself is missing
            raise ValueError(
                f"{url} loads no adapters while it runs (HTTP {refusal.status}: {refusal.reason}): start it with "
                "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            ) from refusal
    _check_vocabulary(server, model, tokenizer)
    return length


def _check_vocabulary(server: Server, model: str, tokenizer: Any) -> None:
    """Raise ValueError unless the server has this tokenizer's ids."""
    largest = max(tokenizer.get_vocab().values())
    probe = {"model": model, "prompt": [largest], "max_tokens": 1, "temperature": 0.0}
    try:
        server.ask("/v1/completions", probe)
        text = {"model": model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        found = server.ask("/tokenize", text)["tokens"]
    except RefusedRequest as refusal:
        raise ValueError(
            f"{server.base_url} does not take token {largest}, the largest of the tokenizer here ({refusal.reason}): "
            f"expected the model in training, found {model!r}"
        ) from refusal
    expected = tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
    if found != expected:
        raise ValueError(
            f"{server.base_url} tokenises {PROBE_TEXT!r} as {found}, the tokenizer here as {expected}: serve the "
            f"model in training with its own tokenizer, found {model!r}"
        )


def make_vllm_engine(config: Any, policy: Policy, tokenizer: Any, eos_ids: Sequence[int]) -> VllmEngine:
    """Return an engine on the config's servers after every check, the adapter of `policy` pushed to them."""
    servers = config.vllm_servers()
    positions = getattr(policy.causal.config.get_text_config(), "max_position_embeddings", None)
    prompt_limit = check_servers(config, tokenizer, positions)
    folder = config.vllm_adapter_dir or Path(config.output_dir, "vllm_adapters")
    engine = VllmEngine(
        servers=servers,
        eos_ids=eos_ids,
        max_new_tokens=config.max_completion_length,
        prompt_limit=prompt_limit,
        temperature=config.temperature,
        adapter=ServedAdapter(policy.model, servers, folder),
    )
    engine.verify(policy)
    return engine


def check_servers(config: Any, tokenizer: Any, positions: int | None) -> int:
    """Check every server of the config and return how long a prompt may be; see check_server."""
    longest = config.max_prompt_length + config.max_completion_length
    needed = longest if positions is None else min(longest, positions)
    for server in config.vllm_servers():
        check_server(server, tokenizer, needed)
    return needed - config.max_completion_length
