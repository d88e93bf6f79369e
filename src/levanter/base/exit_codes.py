"""Exit codes of every command."""

OK = 0
"""The run is done, or the plan fits."""
INTERNAL_ERROR = 1
"""An error in our code, or a result that is not finite."""
BAD_INPUT = 2
"""A bad input or configuration; the same command fails again."""
DOES_NOT_FIT = 3
"""The run takes more memory than its devices have."""
COMPILER_CRASH = 4
"""The compiler crashed."""
PEER_LOST = 5
"""Another process of the run was lost; the same command resumes."""
NOT_DECIDED = 6
"""A plan without a verdict."""
PREEMPTED = 75
"""Ended by a signal after saving; the same command resumes."""
INTERRUPTED = 130
"""Ctrl-C."""


class DoesNotFitError(ValueError):
    """A run takes more memory than its devices have."""

    exit_code = DOES_NOT_FIT
