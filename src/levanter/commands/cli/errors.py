"""Turns exceptions into messages for the user and exit codes for scripts; used by every entry point.

0 done or fits; 1 internal error; 2 bad input or config; 3 does not fit; 4 compiler crash; 5 a peer is missing;
75 preempted, saved, resumable; 130 Ctrl-C. `LEVANTER_TRACEBACK=1` shows where a user error was raised.
"""

import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from levanter.base.exit_codes import BAD_INPUT, INTERNAL_ERROR, INTERRUPTED, OK, DoesNotFitError
from levanter.commands.cli.lifecycle import (
    end_alone,
    end_if_lost,
    end_together,
    end_with_traceback,
    is_reported_by_leader,
)
from levanter.commands.cli.signals import Interrupts, interrupts_retained
from levanter.config import HelpRequested, arguments_for, load_written
from levanter.distributed.agreement import current_peers
from levanter.io import OutputError, output_is_lost, prepare_streams, setup_logging, store_error
from levanter.io.stdout import for_errors, printable
from levanter.io.write_errors import NO_SPACE, output_error

C = TypeVar("C")
OUR_PACKAGES = ("levanter", "haliax_ext")
OUTPUT_CLOSED = "its output was not read"


def run_entry_point(config_class: type[C], main: Callable[..., int | None], argv: Sequence[str] | None = None) -> int:
    """Parses the command line into `config_class`, runs `main`, and turns the outcome into an exit code.

    Args:
        config_class: the entry point's config.
        main: takes the config, and the keyword `written` if it has that parameter; may return an exit code.
        argv: the command line without the program's name.
    """

    def run() -> int | None:
        setup_logging()
        words = list(sys.argv[1:] if argv is None else argv)
        config, keywords = arguments_for(main, load_written(config_class, words, program=_program()))
        return main(config, **keywords)

    return shell(run)


def _program() -> str | None:
    """What a user types to run this module of ours; None for a script, whose help names the config's module."""
    # `python -m` leaves the module's name here; the config's module would be a name that is no command.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return f"python -m {spec.name}" if spec is not None and spec.name.startswith("levanter.main.") else None


def shell(run: Callable[[], int | None]) -> int:
    """Calls `run` and turns the outcome into an exit code; user errors are shown without a traceback.

    One of several processes ends together with the others if it succeeded, and notifies them if it failed. If its
    output is no longer read (`… | head`), it ends silently.
    """
    prepare_streams()
    try:
        with interrupts_retained() as interrupts:
            code = _raise_swallowed_interrupts(run, interrupts)
        # Flushes standard output: a reader that has closed the pipe shows only here.
        if output_is_lost():
            return end_alone(INTERNAL_ERROR, OUTPUT_CLOSED)
        return end_together(code or OK)
    except HelpRequested as help_text:
        try:
            print(help_text)
        except BrokenPipeError as error:
            output_is_lost(error)
        output_is_lost()
        return OK
    except SystemExit:
        # argparse ends the process this way.
        output_is_lost()
        raise
    except KeyboardInterrupt as stop:
        print(f"\ninterrupted{f': {stop}' if str(stop) else ''}", file=for_errors())
        return end_alone(INTERRUPTED, "interrupted")
    except Exception as error:
        if isinstance(error, BrokenPipeError) and output_is_lost(error):
            return end_alone(INTERNAL_ERROR, OUTPUT_CLOSED)
        if type(error).__module__ == "builtins" and isinstance(error, OSError) and (reworded := _system_error(error)):
            output_is_lost()
            error = reworded
        if isinstance(error, MemoryError):
            # Exit code 3, as for a plan that does not fit.
            error = DoesNotFitError(f"it does not fit in this machine's memory: {str(error) or 'allocation failed'}")
            error.__cause__ = sys.exc_info()[1]
        elif reworded := store_error("a remote path", error):
            # Where a path is opened, its name is in the message already.
            error = reworded
        elif not (isinstance(error, (ValueError, OSError)) and is_user_error(error)):
            # A bug of ours: Python prints the traceback and exits with code 1.
            if current_peers() is None:
                raise
            return end_with_traceback(error)
        end_if_lost(error)
        if not is_reported_by_leader(str(error)):
            _print_error(error)
        return end_alone(getattr(error, "exit_code", BAD_INPUT), str(error))


def _raise_swallowed_interrupts(run: Callable[[], int | None], interrupts: Interrupts) -> int | None:
    """Calls `run`; an error caused by an interrupt is raised as an interrupt.

    A library that swallows an interrupt (`except BaseException` around an import) leaves a half-imported module, and
    the error that follows means nothing to the user who pressed Ctrl-C.
    """
    try:
        code = run()
    except Exception as error:
        if not interrupts.received:
            raise
        raise KeyboardInterrupt from error
    return code


def is_user_error(error: BaseException) -> bool:
    """Whether `error` is about the user's input: it was raised by our own code, not by a library below it.

    A `ValueError` that JAX raises during a run is a bug of ours and keeps its traceback.
    """
    if _is_ours(type(error).__module__):
        return True
    # The innermost frame is the one that raised the error.
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and _is_ours(frame.tb_frame.f_globals.get("__name__", ""))


def _is_ours(module: str) -> bool:
    if module == "__main__":
        # In `python -m levanter.main.x`, only the spec keeps the module's own name.
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec is not None else ""
    return module.split(".")[0] in OUR_PACKAGES


def _print_error(error: BaseException) -> None:
    if os.environ.get("LEVANTER_TRACEBACK"):
        traceback.print_exception(error)
    print(f"error: {printable(str(error))}", file=for_errors())


def _system_error(error: OSError) -> OutputError | None:
    """A library's disk error in the words of our own; None if the user cannot fix it."""
    if error.errno == errno.ENOENT and not _has_working_folder():
        return OutputError(
            "the working folder of this process does not exist any more: it was removed or moved\n"
            "  → start in another folder; with absolute paths (trainer.log_dir, outputs) a run does not need it"
        )
    if error.errno not in (*NO_SPACE, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.ENOTDIR):
        return None
    name = error.filename2 or error.filename
    if isinstance(name, (str, os.PathLike)):
        return output_error(os.fspath(name), error, doing="read or written")
    if error.errno not in NO_SPACE:
        return None
    return OutputError(
        f"standard output, or a temporary file in {tempfile.gettempdir()}, cannot be written ({error.strerror})\n"
        "  → free some space there, or where standard output is redirected to"
    )


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
