"""Train agents that read long documents turn by turn, on top of trl.GRPOTrainer; names are loaded when first used."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turngrpo.trainer.config import TurnGRPOConfig
    from turngrpo.trainer.reading.rollout import Trajectory, Turn
    from turngrpo.trainer.reading.workflows import GatedMemory, MemAgent, SingleTurn, Workflow
    from turngrpo.trainer.turn_grpo_trainer import TurnGRPOTrainer

_ROOMS = {
    "GatedMemory": "reading.workflows",
    "MemAgent": "reading.workflows",
    "SingleTurn": "reading.workflows",
    "Trajectory": "reading.rollout",
    "Turn": "reading.rollout",
    "TurnGRPOConfig": "config",
    "TurnGRPOTrainer": "turn_grpo_trainer",
    "Workflow": "reading.workflows",
}

__all__ = [
    "GatedMemory",
    "MemAgent",
    "SingleTurn",
    "Trajectory",
    "Turn",
    "TurnGRPOConfig",
    "TurnGRPOTrainer",
    "Workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ROOMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
