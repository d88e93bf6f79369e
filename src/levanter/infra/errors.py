"""Errors of launching, and the exit codes a script sees (those of every entry point)."""

OK, INTERNAL_ERROR, BAD_INPUT, DOES_NOT_FIT, COMPILER_CRASH, PEER_LOST, PREEMPTED, INTERRUPTED = (
    0,
    1,
    2,
    3,
    4,
    5,
    75,
    130,
)


class LaunchError(ValueError):
    """A launch cannot continue; the message is for the user.

    Attributes:
        exit_code: the launcher's exit code.
    """

    def __init__(self, message: str, *, exit_code: int = BAD_INPUT):
        super().__init__(message)
        self.exit_code = exit_code


class UsageError(LaunchError):
    """The command line is wrong; the message lists everything that is."""
