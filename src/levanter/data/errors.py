"""Errors in data: `ValueError`s that name the file and the position in it."""

from collections.abc import Sequence


class DataError(ValueError):
    """Data that cannot be used as configured: which file, where in it, what was expected."""


class ManyDataErrors(DataError):
    """Everything that is wrong, listed together."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = [f"{len(problems)} problems with the data:"]
        super().__init__("\n".join(lines + [f"[{i}] {problem}" for i, problem in enumerate(problems, 1)]))


class AbsentTextError(ManyDataErrors):
    """Nothing is wrong with the configuration of the data, but files are absent or out of reach from here."""

    def __init__(self, problems: Sequence[str]):
        super().__init__(problems)
        if len(problems) == 1:
            self.args = (problems[0],)


def raise_problems(problems: Sequence[str]) -> None:
    """Raises nothing, the one problem, or all of them together."""
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        raise ManyDataErrors(problems)
