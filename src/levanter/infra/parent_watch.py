"""Runs a command that must not outlive its parent: `python -m levanter.infra.parent_watch COMMAND …`.

The parent holds the other end of standard input. When that closes, because the parent closed it or was killed, the
command and everything it started are terminated: SIGTERM first, SIGKILL some seconds later. A leftover process
would occupy the chips of its host. Otherwise the command behaves as if it had been started directly: the same output
and exit code.
"""

import os
import signal
import subprocess
import sys
import threading
import time

GRACE = "LEVANTER_GUARD_GRACE"
"""Seconds from SIGTERM to SIGKILL."""


def main() -> int:
    """Runs the command line's command and returns its exit code."""
    # Removed from the environment, which the command inherits.
    grace = float(os.environ.pop(GRACE, "10"))
    try:
        # A session of its own, so that `killpg` reaches all descendants. Standard input is the watched pipe, which the
        # command must not read.
        process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"error: {sys.argv[1]}: {error.strerror or error}\n")
        return 127

    def signalled(number: int) -> None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return

    def watch() -> None:
        # Nobody writes to the pipe. `read` returns an empty result when the last writer has closed it, even by
        # SIGKILL.
        while os.read(0, 4096):
            pass
        signalled(signal.SIGTERM)
        time.sleep(grace)
        signalled(signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Signals for this process are passed on to the whole group, which is in another session.
        signal.signal(number, lambda received, _: signalled(received))
    code = process.wait()
    # Its children, such as data workers, end with it.
    signalled(signal.SIGKILL)
    # Popen reports a signal as −n; a shell reports 128 + n.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
