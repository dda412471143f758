"""Sampling through any OpenAI-compatible server, for evaluation and use: by token ids where it takes them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turngrpo.trainer.awaiting import gather_all, run_async
from turngrpo.trainer.reading.rollout import Completion, Request, TokenCounts, check_prompts
from turngrpo.trainer.sampling.server import RefusedRequest, Server, ServerError, Session, in_short, served_models
from turngrpo.trainer.sampling.vllm_engine import FULL_SUPPORT, VllmEngine, counted, first_choice, naming, request_seed

APIS = ("auto", "completions", "chat")


@dataclass
class ChatEngine:
    """Sends prompts as messages to /v1/chat/completions: the server's chat template and tokenizer are at work there.

    What comes back is text without log-probabilities: enough to evaluate and to use, not to train. Only fields that
    every such server knows are sent; top_k and the like are the server's.
    """

    server: Server
    model: str
    tokenizer: Any
    max_new_tokens: int
    prompt_limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    share_prefix: bool = False  # what the server computes once is its own business
    counts: TokenCounts = field(default_factory=TokenCounts)

    def refresh(self) -> None:
        """Do nothing: the served model is what it is."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Complete every request, in order, or none; raises as VllmEngine does."""
        check_prompts(requests, self.prompt_limit, f"with {self.max_new_tokens} new tokens they must fit the server")
        return run_async(self._generate(requests))

    async def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        async with self.server.session() as session:
            return await gather_all([self._complete(session, request) for request in requests])

    async def _complete(self, session: Session, request: Request) -> Completion:
        messages = request.messages
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": request_seed(request.key) % 2**31,  # servers differ in how many bits they take
        }
        with naming(request):
            answer = await session.ask("/v1/chat/completions", body)
            choice, usage = first_choice(answer, session.server), counted(answer.get("usage"))
            text = counted(choice.get("message")).get("content") or ""
            if not isinstance(text, str):
                raise ServerError(f"{session.server.base_url} answered {in_short(text)}, expected a message of text")
        ended = choice.get("finish_reason") == "stop"
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id] if ended else ids
        tokens = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        self.counts.suffix += tokens[0] if isinstance(tokens[0], int) else 0
        self.counts.decode += tokens[1] if isinstance(tokens[1], int) else len(ids)
        return Completion(ids, [], "eos" if ended else "length", text)


def connect(server: Server, model: str, tokenizer: Any, config: Any, eos_ids: Sequence[int], api: str = "auto") -> Any:
    """Return an engine that samples from a served model with the config's evaluation sampling.

    "completions" sends the very token ids that training sends, which vLLM takes; "chat" sends messages; "auto" tries
    them in this order. Raises ServerError for a server that is gone, ValueError for an unknown model, naming those
    served, and for a context that is too small.
    """
    if api not in APIS:
        raise ValueError(f"api is {api!r}: expected one of {', '.join(APIS)}")
    cards = served_models(server)
    length = _context_length(cards, model)
    needed = config.max_prompt_length + config.max_completion_length
    if length is not None and length <= config.max_completion_length:
        raise ValueError(
            f"{server.base_url} takes {length} tokens and a completion may have {config.max_completion_length}: no "
            "room is left for a prompt; lower max_completion_length, or serve a longer context"
        )
    sampling: dict[str, Any] = {
        "model": model,
        "max_new_tokens": config.max_completion_length,
        "prompt_limit": min(needed, length or needed) - config.max_completion_length,
        "temperature": config.eval_temperature,
        "top_p": config.eval_top_p,
    }
    refusals = []
    if api != "chat":
        trial = {"model": model, "prompt": [tokenizer.eos_token_id], "max_tokens": 1, "logprobs": 0}
        try:
            answer = server.ask("/v1/completions", trial | FULL_SUPPORT | {"return_token_ids": True})
            if first_choice(answer, server).get("token_ids"):
                return VllmEngine(servers=[server], eos_ids=eos_ids, **sampling)
            refusals.append("/v1/completions returns no token ids")
        except RefusedRequest as refusal:
            refusals.append(str(refusal))
    if api != "completions":
        try:
            messages = [{"role": "user", "content": "Hi"}]
            server.ask("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 1})
            return ChatEngine(server=server, tokenizer=tokenizer, **sampling)
        except RefusedRequest as refusal:
            refusals.append(str(refusal))
    served = ", ".join(repr(card["id"]) for card in cards) or "none"
    raise ValueError(f"{server.base_url} does not serve {model!r} (it lists {served}): {'; '.join(refusals)}")


def _context_length(cards: Sequence[dict[str, Any]], model: str) -> int | None:
    """Return the context length of a served model or of an adapter's base, None where the server does not say."""
    known = {card["id"]: card for card in cards}
    card = known.get(model, {})
    return (card if card.get("max_model_len") else known.get(card.get("parent") or "", {})).get("max_model_len")
