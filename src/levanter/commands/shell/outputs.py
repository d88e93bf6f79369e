"""Whether a run can write where it is to, as far as that shows before it begins."""

import os
from pathlib import Path

from levanter.io import is_remote, local_path
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
    there = next(each for each in (at, *at.parents) if each.exists())
    if there != at and not there.is_dir():
        problem = f"{key}: {path}: {there} is a file, not a folder"
    elif not os.access(there, os.W_OK):
        problem = f"{key}: {path}: no permission to write in {there}"
    else:
        return []
    # Another machine may have it: an error where it runs, not where it is planned.
    return [Check(name="output", status="unchecked", message=problem, error=ValueError(problem))]
