"""User text inside a chat template, tokenised segment by segment. Plain Python, no torch."""

import functools
from typing import Any

# A private-use character that no chat template trims, to find where the user text goes.
_SLOT = "\ue000"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"


class ChatFormat:
    """Tokenises user text inside the tokenizer's chat template, segment by segment, so that boundaries stay put.

    Documents, questions and memories are never parsed for control tokens; only the template's own are. Without a chat
    template the prompt is the user text alone, after the tokenizer's BOS where it adds one.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.control_tokens = frozenset(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special and str(token).strip()
        )
        self.opens_think = False  # whether a prompt ends inside a think block, which the completion then closes
        self.has_template = getattr(tokenizer, "chat_template", None) is not None
        if not self.has_template:
            self.head, self.tail = tokenizer("")["input_ids"], []
            eos = tokenizer.eos_token_id
            self.head = self.head[:-1] if self.head and self.head[-1] == eos else self.head
            return
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": _SLOT}],
            tokenize=False,
            add_generation_prompt=True,
            **(chat_template_kwargs or {}),
        )
        if rendered.count(_SLOT) != 1:
            raise ValueError(
                f"the chat template shows the user's text {rendered.count(_SLOT)} times, expected once: turn prompts "
                "are joined from separately tokenised segments; use a template that shows each message once"
            )
        head, tail = rendered.split(_SLOT)
        self.opens_think = tail.rstrip().endswith(OPEN_THINK)
        self.head, self.tail = self._encode(head), self._encode(tail)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    @functools.lru_cache(maxsize=1024)  # noqa: B019  all members of a group read the same chunk
    def encode_text(self, text: str) -> list[int]:
        """Tokenise plain text: "<|im_end|>" in a document is text, not a control token."""
        if not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def encode(self, segments: list[str]) -> list[list[int]]:
        """Return token-id segments of one prompt: template head, each text segment apart, template tail.

        Raises ValueError for a bare string, of which every character would be a segment.
        """
        if isinstance(segments, str):
            raise ValueError(f"encode got the text {segments[:60]!r}, expected a list of texts: encode([text])")
        return [self.head, *(self.encode_text(text) for text in segments), self.tail]

    def prompt_form(self, segments: list[str]) -> str | list[dict[str, str]]:
        """Return the prompt in TRL's form: messages under a chat template, else text."""
        text = "".join(segments)
        return [{"role": "user", "content": text}] if self.has_template else text

    def cut(self, text: str, max_tokens: int) -> tuple[str, int, bool]:
        """Return (text of at most `max_tokens` tokens, how many, whether it was cut), never cut inside a character."""
        ids, was_cut = self.encode_text(text), False
        limit = max_tokens
        while len(ids) > max_tokens:
            start = self._offset(text, limit) if self.tokenizer.is_fast else len(text) * max_tokens // len(ids)
            text, was_cut = text[: min(start, len(text) - 1)].rstrip(), True
            ids, limit = self.encode_text(text), max_tokens
        return text, len(ids), was_cut

    def _offset(self, text: str, token: int) -> int:
        """Return where a token of the text begins, in characters; its length for one beyond the last."""
        options = {"add_special_tokens": False, "split_special_tokens": True, "return_offsets_mapping": True}
        offsets = self.tokenizer(text, **options)["offset_mapping"]
        return offsets[token][0] if token < len(offsets) else len(text)


def eos_ids(tokenizer: Any, generation_config: Any = None) -> list[int]:
    """Return every id that ends a completion: the tokenizer's EOS and those the model declares."""
    declared = getattr(generation_config, "eos_token_id", None)
    declared = [] if declared is None else [declared] if isinstance(declared, int) else list(declared)
    ids = list(dict.fromkeys(token for token in (tokenizer.eos_token_id, *declared) if token is not None))
    if not ids:
        raise ValueError("neither tokenizer nor model has an EOS token, which ends a turn: set tokenizer.eos_token")
    return ids
