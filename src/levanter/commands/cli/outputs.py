"""Whether a run can write its outputs, and what becomes of its results if it cannot after all.

A plan inspects folders without touching them (`output_checks`). A run tries them before it reads a weight
(`try_outputs`): an entry point lists its outputs, so none is forgotten.
"""

import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from levanter.io import Output, OutputError, atomic_write, is_remote, local_path, probe
from levanter.io.paths import base_name
from levanter.io.write_errors import output_error
from levanter.runplan import Check


def output_checks(key: str, path: str | Path) -> list[Check]:
    """Whether a path is writable, as far as can be told without writing.

    Args:
        key: its config key.
        path: a file or folder that may not exist yet.
    """
    if is_remote(str(path)):
        message = f"{key}: {path}: can only be checked where the run is"
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
    # Another machine may have it: an error when running, not when planning.
    return [Check(name="output", status="unchecked", message=problem, error=ValueError(problem))]


def try_outputs(outputs: Iterable[Output], *, process: int) -> None:
    """Creates the folders of a run's outputs and writes a small file in each, before there is anything to lose.

    Args:
        outputs: those of the entry point and of its trackers.
        process: this process's index; what only process 0 writes is tried only there.

    Raises:
        OutputError: lists each output that cannot be written, with its key.
    """
    probe([output for output in outputs if output.everywhere or process == 0])


def write_or_show(path: str, text: str) -> None:
    """Writes a text result; if that fails, prints it to standard output, so that nothing is lost.

    Raises:
        OutputError: it could not be written; the text has been printed by then.
    """
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OutputError:
        print(text, flush=True)
        raise


def write_or_keep(path: str, content: bytes) -> None:
    """Writes a result unfit for a terminal; if that fails, it is kept in the folder for temporary files.

    Raises:
        OutputError: it could not be written; the message says where it was kept.
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
        raise OutputError(f"{error}\n  it was kept in {elsewhere}") from error


def write_all(contents: Mapping[str, bytes]) -> list[str]:
    """Writes the files of a result in their order; what cannot be written is kept, and the others are still written.

    Returns:
        The paths.

    Raises:
        OutputError: lists what could not be written, and where it was kept.
    """
    problems = []
    for path, content in contents.items():
        try:
            write_or_keep(path, content)
        except OutputError as error:
            problems.append(str(error))
    if problems:
        raise OutputError("\n".join(problems))
    return list(contents)
