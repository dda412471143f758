"""Train agents that read long documents turn by turn, on top of trl.GRPOTrainer."""

from .config import TurnGRPOConfig
from .rollout import Trajectory, Turn
from .turn_grpo_trainer import TurnGRPOTrainer
from .workflows import GatedMemory, MemAgent, SingleTurn, Workflow

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
