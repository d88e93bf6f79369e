"""Errors for broken or unsupported checkpoints; all are `ValueError`s that name the file and suggest a fix.

A check collects all problems and raises once: a checkpoint with three broken shards gives one error with three lines.
These errors are raised before any weight is read, unless a file changes or breaks during reading.
"""

from collections.abc import Iterable

from levanter.base.input_limits import bounded_message


class CheckpointError(ValueError):
    """A checkpoint cannot be used as it is.

    Attributes:
        where: the checkpoint, or the file of it, that has the problems.
        problems: all problems, one sentence each.
    """

    def __init__(self, where: object, problems: str | Iterable[str], *, suggestion: str | None = None):
        self.where = str(where)
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        self.suggestion = suggestion
        # One problem reads as a sentence; several are numbered, so that a user can count what is left.
        if len(self.problems) == 1:
            message = f"{self.where}: {self.problems[0]}"
        else:
            lines = [f"{self.where}: {len(self.problems)} problems:"]
            lines += [f"  [{i}] {problem}" for i, problem in enumerate(self.problems, 1)]
            message = "\n".join(lines)
        super().__init__(bounded_message(message) + (f"\n  → {suggestion}" if suggestion else ""))


class MissingCheckpointFileError(CheckpointError):
    """A required file of the checkpoint is missing."""


class UnreachableError(CheckpointError):
    """The source of a checkpoint cannot be reached, and there is no local copy."""


class CorruptFileError(CheckpointError):
    """A file is damaged, truncated, or not in the format its name says."""


class UnsafeCheckpointError(CheckpointError):
    """Reading the checkpoint could run code or leave its folder."""


class UnknownModelError(CheckpointError):
    """The model type, or a part of its arithmetic, is not one this project implements."""


class ConfigMismatchError(CheckpointError):
    """Two descriptions of the same model (config.json, tensor shapes, YAML, tokenizer) disagree."""


def raise_if(error: type[CheckpointError], where: object, problems: Iterable[str], *, suggestion: str | None = None):
    """Raises `error` with all `problems`, or nothing when there are none."""
    if collected := tuple(problems):
        raise error(where, collected, suggestion=suggestion)
