"""How a script ends: its status, and what is the user's fault without a traceback."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

from turngrpo.trainer.reward_calls import RewardError
from turngrpo.trainer.runs.proof import ResumeError
from turngrpo.trainer.sampling.server import ServerError

INTERRUPTED = 130  # the shell's status of a program that Ctrl-C ended


DISK_FULL = ("No space left on device", "PytorchStreamWriter failed writing")  # torch, tokenizers, safetensors, the OS


def run_script(main: Callable[[], int]) -> None:
    """Exit with main's status; a fault of the user's input or of a server is printed without a traceback, status 1.

    Ctrl-C ends with status 130.
    """
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing.* is deprecated", FutureWarning)  # trl's, peft's
    try:
        sys.exit(main())
    except (SetupError, ServerError, RewardError, ResumeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not any(text in str(error) for text in DISK_FULL):
            raise
        text = "the disk is full: make room, then --resume_from_checkpoint true goes on from the newest checkpoint"
        print(f"error: {text} ({error})", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(
            "interrupted: a training that has a checkpoint goes on with --resume_from_checkpoint true", file=sys.stderr
        )
        sys.exit(INTERRUPTED)


class SetupError(Exception):
    """Something the user gave is wrong; found before any training or sampling."""


class setting_up:
    """Context in which ValueError and OSError are the user's: they become SetupError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | OSError):
            raise SetupError(str(error)) from error
