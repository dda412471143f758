"""An OpenAI-compatible server over HTTP: a bounded pool, retries with a limit, errors that say what to do."""

import asyncio
import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from turngrpo.trainer.awaiting import run_async
from turngrpo.trainer.showing import visible

RETRIED = (408, 429, 500, 502, 503, 504)  # a server that is busy, starting or dying; anything else is an answer
FIRST_DELAY, LONGEST_DELAY = 0.25, 5.0  # seconds between attempts, doubled every time
CONNECT_TIMEOUT = 10.0
LARGEST_ANSWER = 2**26  # bytes: a completion of 32,768 tokens with its log-probabilities is a few MB
SHOWN = 300  # characters of a server's own words in a message


class ServerError(ConnectionError):
    """A server that cannot be reached, does not answer, or goes on failing."""


class RefusedRequest(ValueError):
    """What a server answered instead of doing what it was asked; `reason` is its own words."""

    def __init__(self, url: str, status: int, reason: str):
        super().__init__(f"{url} refused (HTTP {status}): {reason}")
        self.status, self.reason = status, reason


@dataclass(frozen=True)
class Server:
    """Where a server is, and how long to wait for it.

    A server that cannot be reached or fails is asked again for `patience` seconds, one that has taken a request may
    take `answer_timeout` seconds for the whole answer; after that ServerError. At most `connections` requests are open
    at once. The key in OPENAI_API_KEY, where there is one, is sent along.
    """

    base_url: str
    patience: float = 240.0
    answer_timeout: float = 600.0
    connections: int = 64
    api_key: str | None = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY"), repr=False)

    def __post_init__(self) -> None:
        url = httpx.URL(self.base_url)
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"the server is {self.base_url!r}: expected a URL as in http://localhost:8000")
        root = self.base_url.rstrip("/").removesuffix("/v1")  # both ways to write it are in use
        object.__setattr__(self, "base_url", root)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator["Session"]:
        """Open a pool of connections inside an event loop."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(self.answer_timeout, connect=min(CONNECT_TIMEOUT, max(self.patience, 1.0)), pool=None)
        limits = httpx.Limits(max_connections=self.connections)
        async with httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=timeout, limits=limits
        ) as client:
            yield Session(self, client, asyncio.Semaphore(self.connections))

    def ask(
        self, path: str, body: dict[str, Any] | None = None, retry: bool = True, expected: type | None = dict
    ) -> Any:
        """Return the answer to one request outside of any event loop; see Session.ask."""

        async def once() -> Any:
            async with self.session() as session:
                return await session.ask(path, body, retry, expected)

        return run_async(once())


@dataclass
class Session:
    """Open connections to one server."""

    server: Server
    client: httpx.AsyncClient
    pool: asyncio.Semaphore

    async def ask(
        self, path: str, body: dict[str, Any] | None = None, retry: bool = True, expected: type | None = dict
    ) -> Any:
        """Return the JSON that the server answers to a GET, or with a body to a POST; text where it is no JSON.

        Raises RefusedRequest for a status that asking again does not change (with `retry` False for any that is no
        success), and ServerError as `Server` says and for an answer that is no `expected` (None: anything will do).
        """
        url, deadline = self.server.base_url + path, None
        for attempt in itertools.count():
            try:
                async with self.pool:
                    response, content = await self._fetch(path, body)
            except (httpx.ReadTimeout, TimeoutError) as error:
                raise ServerError(f"{url} did not answer within {self.server.answer_timeout:g} seconds") from error
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
            else:
                if response.is_success:
                    return _answer(url, content, expected)
                if response.status_code not in RETRIED or not retry:
                    raise RefusedRequest(url, response.status_code, _reason(response, content))
                problem = f"HTTP {response.status_code}: {_reason(response, content)}"
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.server.patience
                warnings.warn(f"{url}: {problem}; asking again for {self.server.patience:g} seconds", stacklevel=2)
            if now >= deadline:
                raise ServerError(
                    f"{url} has been out of reach or failing for {self.server.patience:g} seconds: {problem}"
                )
            await asyncio.sleep(min(FIRST_DELAY * 2**attempt, LONGEST_DELAY, deadline - now))

    async def _fetch(self, path: str, body: dict[str, Any] | None) -> tuple[httpx.Response, bytes]:
        """Return a response and its content: all of it within the time and the size that one answer may take."""
        content = bytearray()
        async with (
            asyncio.timeout(self.server.answer_timeout),
            self.client.stream("GET" if body is None else "POST", path, json=body) as response,
        ):
            async for part in response.aiter_bytes():
                content += part
                if len(content) > LARGEST_ANSWER:
                    raise ServerError(
                        f"{self.server.base_url + path} answers without end: more than {LARGEST_ANSWER >> 20} MiB, "
                        "expected one completion"
                    )
        return response, bytes(content)


def _answer(url: str, content: bytes, expected: type | None) -> Any:
    """Return what a successful answer holds; ServerError where it is no `expected`."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = content.decode("utf-8", "replace")
    if expected is not None and not isinstance(found, expected):
        raise ServerError(f"{url} answered {in_short(found)}, expected a JSON object: is it a server for completions?")
    return found


def in_short(value: Any) -> str:
    """Return a value as one line of text of a sane length, which steers no terminal."""
    text = value if isinstance(value, str) else repr(value)
    line = visible(" ".join(text[: 4 * SHOWN].split()))
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


def _reason(response: httpx.Response, content: bytes) -> str:
    """Return the server's own words: vLLM and OpenAI have error.message, transformers serve has detail."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return in_short(content.decode("utf-8", "replace")) or response.reason_phrase
    error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
    return in_short(error.get("message", error) if isinstance(error, dict) else error)


def served_models(server: Server) -> list[dict[str, Any]]:
    """Return the cards of all models that a server lists; none where it has no such list or fails to make it."""
    with contextlib.suppress(RefusedRequest):
        return listed(server.ask("/v1/models", retry=False, expected=None))
    return []


def listed(answer: Any) -> list[dict[str, Any]]:
    """Return the cards of an answer to /v1/models that name a model."""
    cards = answer.get("data") if isinstance(answer, dict) else None
    found = cards if isinstance(cards, list) else []
    return [card for card in found if isinstance(card, dict) and isinstance(card.get("id"), str)]
