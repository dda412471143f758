"""How a script ends: its status, and what is the user's fault without a traceback."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from turngrpo.trainer.faults import UserFault
from turngrpo.trainer.sampling.server import ServerError
from turngrpo.trainer.showing import visible
from turngrpo.trainer.writing import FULL, WriteError, write_fault

INTERRUPTED, BROKEN_PIPE = 130, 141  # the shell's status of a program that SIGINT, or SIGPIPE, ended
GOING_ON = (
    "What was written before is whole: a training goes on from its newest checkpoint with --resume_from_checkpoint "
    "true, anything else with the same command"
)


def run_script(main: Callable[[], int]) -> None:
    """Exit with main's status; a fault of the user's input, a server or a disk is one line without a traceback, 1.

    Ctrl-C ends with status 130, and a reader of the output that has enough of it, as `head`, with 141 and no word.
    """
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing.* is deprecated", FutureWarning)  # trl's, peft's
    try:
        try:
            status: Any = main()
        except SystemExit as ended:  # of argparse, whose page may not be written yet
            status = ended.code
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:
        let_go_of_output()
        sys.exit(BROKEN_PIPE)
    except (SetupError, ServerError, UserFault, WriteError) as error:
        fail(str(error))
    except Exception as error:
        reason = write_fault(error, FULL)
        if reason is None:
            raise
        fail(f"something was not written: {reason}. {GOING_ON}")
    except KeyboardInterrupt:
        print(
            "interrupted: a training that has a checkpoint goes on with --resume_from_checkpoint true", file=sys.stderr
        )
        sys.exit(INTERRUPTED)


def fail(text: str) -> NoReturn:
    """Print an error, and exit with status 1."""
    print(visible(f"error: {text}"), file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        let_go_of_output()
    sys.exit(1)


def let_go_of_output() -> None:
    """Drop what cannot be written to stdout: it would be tried again at the end of the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class SetupError(Exception):
    """Something the user gave is wrong; found before any training or sampling."""


class setting_up:
    """Context in which ValueError and OSError are the user's: they become SetupError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError | OSError) and not isinstance(error, BrokenPipeError):
            raise SetupError(str(error)) from error
