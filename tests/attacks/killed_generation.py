"""`generate` as a process that dies, or waits, at a point of its work: killed_generation.py POINT WORD…

Points: `begun` (nothing is answered yet), `token N` (N tokens are there), `before PART`, `within PART`, `behind PART`
(around the writing of a part or of the output, by the beginning of its name), and `wait FOLDER`, which puts a file
`holding` there at the first token and goes on when there is a file `go`.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from levanter.commands.cli.main import run_command
from levanter.commands.generate import generate
from levanter.inference import output_writer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(what: str, which: str) -> None:
    """Sees to it that the process dies there."""
    output_writer.PART_LINES = 1
    write, take, begin = output_writer.atomic_write, generate._Run.take, output_writer.OutputWriter.begin
    taken = []

    @contextlib.contextmanager
    def writing(path):
        meant = Path(path).name.startswith(which)
        if meant and what == "before":
            die()
        with write(path) as file:
            yield file
            if meant and what == "within":
                die()
        if meant and what == "behind":
            die()

    def taking(self, event, engine):
        take(self, event, engine)
        taken.append(event)
        if what == "token" and len(taken) == int(which):
            die()
        if what == "wait" and len(taken) == 1:
            Path(which, "holding").touch()
            while not Path(which, "go").exists():
                time.sleep(0.05)

    def beginning(self):
        found = begin(self)
        if what == "begun":
            die()
        return found

    output_writer.atomic_write, generate._Run.take, output_writer.OutputWriter.begin = writing, taking, beginning


if __name__ == "__main__":
    point, *words = sys.argv[1:]
    arm(*(*point.split(" ", 1), "-")[:2])
    sys.exit(run_command("generate", words))
