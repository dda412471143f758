"""How a document is read: its limits and how it is sampled, with their ranges. Plain Python, no torch."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class ReadingConfig:
    """What reading needs of a config; a TurnGRPOConfig has these fields too. The defaults are the paper's."""

    chunk_size: int = 5000
    max_prompt_length: int = 8192
    max_completion_length: int = 2048
    max_memory_tokens: int = 1024
    chat_template_kwargs: dict[str, Any] | None = None
    eval_temperature: float = 1.0
    eval_top_p: float = 0.7
    eval_seed: int = 0

    def __post_init__(self) -> None:
        check_limits(self)
        require(self, "max_completion_length", self.max_completion_length >= 1, "a whole number >= 1")


def check_limits(config: Any) -> None:
    """Raise ValueError for a limit or a sampling value of a config that is out of its range."""
    require(config, "eval_temperature", 0 <= config.eval_temperature < math.inf, "a number >= 0 (0 is greedy)")
    require(config, "eval_top_p", 0 < config.eval_top_p <= 1, "a number in (0, 1]")
    for name in ("chunk_size", "max_prompt_length", "max_memory_tokens"):
        value = getattr(config, name)
        require(config, name, isinstance(value, int) and value >= 1, "a whole number >= 1")


def require(config: Any, name: str, fits: bool, expected: str) -> None:
    """Raise ValueError, which shows a field's value and what was expected, where it does not fit."""
    if not fits:
        raise ValueError(f"{name} is {getattr(config, name)!r}, expected {expected}")
