"""Checks that a run can write its outputs, and writes results so that a failed write does not lose them.

A plan inspects folders without writing (`output_checks`). A run tests them before it reads a weight (`try_outputs`); an
entry point lists all of its outputs.
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
    """Checks whether a path is writable, as far as that can be determined without writing.

    Args:
        key: config key of the path.
        path: a file or folder that may not exist yet.
    """
    # A URL needs a network and credentials, which a plan must not use.
    if is_remote(str(path)):
        message = f"{key}: {path}: can only be checked on the machine of the run"
        return [Check(name="output", status="unchecked", message=message)]
    at = Path(local_path(str(path))).absolute()
    try:
        existing = next(parent for parent in (at, *at.parents) if parent.exists())
    except OSError as error:
        problem = ValueError(f"{key}: {output_error(str(path), error)}")
        return [Check(name="output", status="unchecked", message=str(problem), error=problem)]
    if existing != at and not existing.is_dir():
        problem = f"{key}: {path}: {existing} is a file, not a folder"
    elif not os.access(existing, os.W_OK):
        problem = f"{key}: {path}: no permission to write in {existing}"
    else:
        return []
    # The run may use another machine, so this is an error when running, not when planning.
    return [Check(name="output", status="unchecked", message=problem, error=ValueError(problem))]


def try_outputs(outputs: Iterable[Output], *, process: int) -> None:
    """Creates the folders of a run's outputs and writes a small file in each, before any work is done.

    Args:
        outputs: the outputs of the entry point and of its trackers.
        process: this process's index; outputs that only process 0 writes are tested only there.

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
            # Names of files may have bytes that are not UTF-8; a backslash and the number is JSON's form of them.
            file.write(text.encode(errors="backslashreplace"))
    except OutputError:
        print(text, flush=True)
        raise


def write_or_keep(path: str, content: bytes) -> None:
    """Writes a binary result; if that fails, writes it to the folder for temporary files instead.

    Raises:
        OutputError: it could not be written; the message names the temporary file.
    """
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OutputError as error:
        # The random prefix keeps the results of parallel runs apart.
        fallback = os.path.join(tempfile.gettempdir(), f"{secrets.token_hex(4)}-{base_name(path)}")
        try:
            with atomic_write(fallback) as file:
                file.write(content)
        except OutputError:
            raise error from None
        raise OutputError(f"{error}\n  it was kept in {fallback}") from error


def write_all(contents: Mapping[str, bytes]) -> list[str]:
    """Writes the files of a result in order; a file that fails goes to the folder for temporary files.

    Returns:
        The paths.

    Raises:
        OutputError: lists the files that could not be written, and their temporary files.
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
