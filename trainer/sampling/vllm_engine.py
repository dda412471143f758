"""VllmEngine: turns sampled from the CURRENT adapter by running vLLM servers, with their log-probabilities."""

import asyncio
import contextlib
import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turngrpo.trainer.awaiting import gather_all, run_async
from turngrpo.trainer.reading.rollout import Completion, NoiseKey, Request, TokenCounts, check_prompts
from turngrpo.trainer.sampling.server import RefusedRequest, Server, ServerError, Session, in_short, listed

if TYPE_CHECKING:
    from turngrpo.trainer.forward.policy import Policy
    from turngrpo.trainer.sampling.served_adapter import ServedAdapter

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


def request_seed(key: NoiseKey) -> int:
    """Return 63 bits that depend on a turn's noise key alone, so that a resumed run asks the same."""
    digest = hashlib.sha256(repr(tuple(int(part) for part in key)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextlib.contextmanager
def naming(request: Request) -> Iterator[None]:
    """Add row and turn to what a server's error says."""
    try:
        yield
    except (ServerError, RefusedRequest) as error:
        error.args = (f"{request.label}, turn {request.key.turn}: {error}",)
        raise


def first_choice(answer: dict[str, Any], server: Server) -> dict[str, Any]:
    """Return the one choice of a completion; ServerError where there is none."""
    choices = answer.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise ServerError(f"{server.base_url} answered {in_short(answer)}, expected choices with one completion")
    return choices[0]


def counted(value: Any) -> dict[str, Any]:
    """Return an optional object of an answer, empty where it is none."""
    return value if isinstance(value, dict) else {}


def numbers(values: Any, *kinds: type) -> list[Any]:
    """Return a list of numbers of these kinds as it is; an empty one for anything else."""
    if not isinstance(values, list) or any(isinstance(value, bool) for value in values):
        return []
    return values if all(isinstance(value, kinds) for value in values) else []


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
    adapter: "ServedAdapter | None" = None
    share_prefix: bool = False  # what the servers compute once is their own business
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
        with naming(request):
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
        choice = first_choice(answer, server)
        ids = numbers(choice.get("token_ids"), int)
        logprobs = numbers(counted(choice.get("logprobs")).get("token_logprobs"), float, int)
        if not ids or len(ids) != len(logprobs):
            raise ServerError(
                f"{server.base_url}: expected the sampled token ids with a log-probability each, found a choice with "
                f"{in_short(sorted(choice))}; use vLLM 0.11 or later"
            )
        if not all(map(math.isfinite, logprobs)):
            place = f"{request.label}, turn {request.key.turn}, {server.base_url}"
            raise FloatingPointError(f"{place}: the log-probabilities are not finite")
        ended = bool(ids) and ids[-1] in self.eos_ids
        if not ended and len(ids) != self.max_new_tokens:
            raise ServerError(
                f"{server.base_url}: the completion ends after {len(ids)} of {self.max_new_tokens} tokens without one "
                f"of {list(self.eos_ids)} (finish_reason {choice.get('finish_reason')!r})"
            )
        details = counted(answer.get("usage")).get("prompt_tokens_details")
        cached = counted(details).get("cached_tokens")
        cached = cached if isinstance(cached, int) else 0
        self.counts.suffix += len(request.prompt_ids) - cached
        self.counts.decode += len(ids)
        return Completion(ids, logprobs, "eos" if ended else "length")

    def verify(self, policy: "Policy") -> None:
        """Sample a few tokens of the adapter and compare their log-probabilities with the model's own.

        Raises ValueError where they differ by more than low precision explains.
        """

        from turngrpo.trainer.sampling.engine_check import probe_requests, recorded_gaps  # which need torch

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
    answer = server.ask("/v1/models")
    if not isinstance(answer.get("data"), list):
        raise ServerError(f"{server.base_url}/v1/models lists no models ({in_short(answer)}): expected a vLLM server")
    return [card for card in listed(answer) if not card.get("parent")]


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
        server.ask("/v1/unload_lora_adapter", {"lora_name": "turngrpo-check"}, expected=None)
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
        found = server.ask("/tokenize", text).get("tokens")
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


def vllm_servers(config: Any) -> list[Server]:
    """Return the servers of a config with rollout_engine='vllm'; ValueError for what is no URL."""
    urls = config.vllm_base_url or [config.vllm_server_base_url or ""]
    waits = config.vllm_server_timeout, config.vllm_request_timeout
    return [Server(url, *waits, connections=config.vllm_concurrent_requests) for url in urls]


def make_vllm_engine(config: Any, policy: "Policy", tokenizer: Any, eos_ids: Sequence[int]) -> VllmEngine:
    """Return an engine on the config's servers after every check, the adapter of `policy` pushed to them."""

    from turngrpo.trainer.sampling.served_adapter import ServedAdapter  # which needs torch

    servers = vllm_servers(config)
    positions = getattr(policy.causal.config.get_text_config(), "max_position_embeddings", None)
    prompt_limit = check_servers(config, tokenizer, positions)
    folder = config.vllm_adapter_dir or Path(config.output_dir, "vllm_adapters")
    engine = VllmEngine(
        servers=servers,
        eos_ids=eos_ids,
        max_new_tokens=config.max_completion_length,
        prompt_limit=prompt_limit,
        temperature=config.temperature,
        adapter=ServedAdapter(policy.model, servers, folder, str(Path(config.output_dir).resolve())),
    )
    engine.verify(policy)
    return engine


def check_servers(config: Any, tokenizer: Any, positions: int | None) -> int:
    """Check every server of the config and return how long a prompt may be; see check_server."""
    longest = config.max_prompt_length + config.max_completion_length
    needed = longest if positions is None else min(longest, positions)
    for server in vllm_servers(config):
        check_server(server, tokenizer, needed)
    return needed - config.max_completion_length
