"""What a process tells those who started it."""

OK, INTERNAL_ERROR, BAD_INPUT, DOES_NOT_FIT, COMPILER_CRASH, PEER_LOST, NOT_DECIDED, PREEMPTED, INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    75,
    130,
)
"""Exit codes of every entry point."""


class DoesNotFitError(ValueError):
    """A run takes more memory than its devices have."""

    exit_code = DOES_NOT_FIT
