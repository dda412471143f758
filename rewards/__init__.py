"""Reward functions with TRL's signature; trajectory rewards give one number per trajectory, turn rewards a list."""

from .answers import answer_contains, answer_f1, answer_reward, normalize_answer
from .gates import exit_reward, format_reward, update_reward
from .stock import stock_reward

__all__ = [
    "answer_contains",
    "answer_f1",
    "answer_reward",
    "exit_reward",
    "format_reward",
    "normalize_answer",
    "stock_reward",
    "update_reward",
]
