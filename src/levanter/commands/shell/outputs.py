"""Whether a run can write where it is to, and what becomes of its results where it cannot after all.

A plan looks at folders without touching them (`output_checks`). A run tries them before it reads a weight
(`try_outputs`): an entry point lists its outputs, so none is forgotten.
"""

import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from levanter.io import Output, OutputError, atomic_write, is_remote, local_path, probe
from levanter.io.paths import base_name
from levanter.io.write_errors import output_error
from levanter.run import Check


def output_checks(key: str, path: str | Path) -> list[Check]:
    """Whether something can be written at a path, as far as that shows without writing.

    Args:
        key: what the config calls it.
        path: a file or folder that may not exist yet.
    """
    if is_remote(str(path)):
        message = f"{key}: {path}: whether it can be written is known where the run is"
        return [Check(name="output", status="unchecked", message=message)]
    at = Path(local_path(str(path))).absolute()
    try:
        there = next(each for each in (at, *at.parents) if each.exists())
    except OSError as error:
        problem = ValueError(f"{key}: {output_error(str(path), error)}")
        return [Check(name="output", status="unchecked", message=str(problem), error=problem)]
    if there != at and not there.is_dir():
        problem = f"{key}: {path}: {there} is a file, not a folder"
    elif not os.access(there, os.W_OK):
        problem = f"{key}: {path}: no permission to write in {there}"
    else:
        return []
    # Another machine may have it: an error where it runs, not where it is planned.
    return [Check(name="output", status="unchecked", message=problem, error=ValueError(problem))]


def try_outputs(outputs: Iterable[Output], *, process: int) -> None:
    """Makes the folders of a run's outputs and writes a small file in each, before there is anything to lose.

    Args:
        outputs: of the entry point and of its trackers.
        process: this process's number; what process 0 alone writes is tried there alone.

    Raises:
        OutputError: naming each one that cannot be written, with the key that says it.
    """
    probe([output for output in outputs if output.everywhere or process == 0])


def write_or_show(path: str, text: str) -> None:
    """Writes a result that is text; where that fails, the text goes to standard output, so that nothing is lost.

    Raises:
        OutputError: it could not be written; the text has been shown by then.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OutputError:
        print(text, flush=True)
        raise


def write_or_keep(path: str, content: bytes) -> None:
    """Writes a result that nobody wants on a terminal; where that fails, it is kept in the folder for temporary files.

    Raises:
        OutputError: it could not be written; the message says where it is kept.
    """
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OutputError as error:
        elsewhere = os.path.join(tempfile.gettempdir(), f"{secrets.token_hex(4)}-{base_name(path)}")
        try:
            with atomic_write(elsewhere) as file:
                file.write(content)
        except OutputError:
            raise error from None
        raise OutputError(f"{error}\n  it is kept in {elsewhere}") from error
