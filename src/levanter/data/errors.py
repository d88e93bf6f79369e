"""Errors in data: `ValueError`s that name the file and the position in it."""

from collections.abc import Sequence

from levanter.base.input_limits import bounded_message, capped


class DataError(ValueError):
    """Data that cannot be used as configured: the message has the file, the position and the expectation."""

    def __init__(self, message: object = ""):
        super().__init__(bounded_message(str(message)))


class ManyDataErrors(DataError):
    """Several problems, numbered in one message."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = [f"[{i}] {problem}" for i, problem in enumerate(problems, 1)]
        super().__init__("\n".join([f"{len(problems)} problems with the data:", *capped(lines)]))


class AbsentTextError(ManyDataErrors):
    """The configuration of the data is valid, but files do not exist or cannot be reached from here."""

    def __init__(self, problems: Sequence[str]):
        super().__init__(problems)
        # A single problem needs no number and no heading; the type stays, because planning handles absent files
        # differently.
        if len(problems) == 1:
            self.args = (problems[0],)


def raise_problems(problems: Sequence[str]) -> None:
    """Raises a `DataError` for one problem, `ManyDataErrors` for several; returns if there is none."""
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        raise ManyDataErrors(problems)
