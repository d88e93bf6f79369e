"""An interactive session with a model, with the keys and commands of upstream's `inference_repl`.

    python -m levanter.main.inference_repl --checkpoint HuggingFaceTB/SmolLM2-135M-Instruct
    python -m levanter.main.inference_repl --checkpoint … --command complete --args "The chicken liked to eat"

It is `generate` with `interactive: true` and has the same plan. The plan lists upstream's keys that have no effect.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from jax.sharding import Mesh

from levanter.base.exit_codes import BAD_INPUT, INTERNAL_ERROR, OK
from levanter.checkpoint.discovery import checkpoint_at
from levanter.checkpoint.errors import MissingCheckpointError
from levanter.commands.cli.runner import run_config
from levanter.commands.generate import plan as generation
from levanter.commands.generate.chat_session import Dialogue
from levanter.commands.generate.engine_setup import running
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.generate.prompts import prompt_reader
from levanter.commands.generate.repl_config import ELSEWHERE, InferenceReplConfig
from levanter.commands.generate.terminal import SessionStats, Terminal, at_terminal
from levanter.config import ExplicitKeys
from levanter.config.errors import did_you_mean
from levanter.distributed.agreement import agreed
from levanter.inference.engine import make_schedule
from levanter.io import Output
from levanter.runplan import Check, EntryPoint, RunPlan, Session, Target

NAME = "inference_repl"
HELP = """\
chat [MESSAGE]   sends a message; without one, starts a conversation until `exit`
complete TEXT    continues a text
batch REQUESTS   answers a list of requests, as JSON or a file of it: objects with `prompt` or `messages`
help             shows this
exit, Ctrl-D     ends the session; Ctrl-C ends an answer"""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplWork:
    """The resolved inputs of `execute` besides the Programs.

    Attributes:
        config: as the user wrote it.
        generate: the model, its cache and its Programs.
    """

    config: InferenceReplConfig
    generate: GenerateWork


def describe(config: InferenceReplConfig, target: Target, *, written: ExplicitKeys | None = None) -> RunPlan[ReplWork]:
    """Describes the run for `target`; reads metadata, no weights.

    Args:
        config: the run.
        target: the devices.
        written: the keys that the user wrote; None for a config made in Python.

    Raises:
        ValueError: the model is broken or unknown, the mesh cannot be resolved, or the rows cannot be cut over it.
    """
    written = ExplicitKeys.in_python(config) if written is None else written
    # Upstream's `checkpoint` names either kind of model; ours are recognized by their files.
    ours = _is_ours(config.checkpoint)
    planned = generation.describe(config.generating(written, ours=ours), target, written=written)
    checks = [
        *planned.checks,
        *(Check(name="keys", status="note", message=message) for message in config.notes(written)),
    ]
    work = ReplWork(config=config, generate=planned.work)
    # `replace` changes the type parameter of the plan, which a type checker cannot follow.
    return cast("RunPlan[ReplWork]", replace(cast(Any, planned), entry_point=NAME, checks=tuple(checks), work=work))


def _is_ours(path: str) -> bool:
    """Whether a path is a checkpoint of our own runs, or a folder of them."""
    try:
        checkpoint_at(path)
    except MissingCheckpointError:
        return False
    return True


def execute(plan: RunPlan[ReplWork], mesh: Mesh | None, session: Session | None = None) -> SessionStats:
    """Answers at the terminal, or runs the one command; nothing runs that is not in `plan`."""
    assert mesh is not None, "a model runs on devices"
    work, config = plan.work.generate, plan.work.config
    schedule = make_schedule(work.programs, share_prefixes=work.config.inference.share_prefixes)
    reader = prompt_reader(work, schedule)
    show, stats = session is not None and session.show, SessionStats()
    with running(work, mesh, schedule=schedule, reader=reader, show=show) as ready:
        if ready.engine is not None:
            repl = Repl(Terminal(Dialogue(ready.engine, reader, reader.defaults)))
            stats = repl.run(config.command, config.args)
    # Every process exits with the code of process 0, the only one that reads the terminal.
    stats.exit_code = int(agreed("the exit code", str(stats.exit_code)))
    return stats


class Repl:
    """The commands of upstream's `inference_repl`.

    Args:
        terminal: reads the commands and shows the answers.
    """

    def __init__(self, terminal: Terminal):
        self._terminal = terminal
        # The first word of a line → its handler, which receives the rest of the line.
        self._words: Mapping[str, Callable[[str], object]] = {
            "chat": self._chat,
            "complete": self._complete,
            "batch": self._batch,
            "help": lambda _: terminal.show(HELP),
        }

    def run(self, command: str | None, args: str) -> SessionStats:
        """Runs one command, or reads commands until the input ends.

        Returns:
            The statistics; refused lines affect the exit code only if they were not typed at a terminal.
        """
        if command is None:
            self._terminal.show("`help` lists the commands")
            self._terminal.read_lines(self._take)
        else:
            self._terminal.once(lambda: self._words[command](args))
        stats = self._terminal.session
        # At a terminal the user saw the refusal.
        refused = stats.refused and (command is not None or not at_terminal())
        stats.exit_code = INTERNAL_ERROR if stats.failed else BAD_INPUT if refused else OK
        return stats

    def _take(self, line: str) -> bool:
        word, _, rest = line.strip().partition(" ")
        if word in ("exit", "quit"):
            return False
        if word in self._words:
            self._words[word](rest.strip())
        elif word in ELSEWHERE:
            self._terminal.refuse(f"{word}: {ELSEWHERE[word]}")
        else:
            self._terminal.refuse(f"{word}: no such command{did_you_mean(word, [*self._words, 'exit'])}")
        return True

    def _complete(self, text: str) -> None:
        if text:
            self._terminal.complete(text)
        else:
            self._terminal.refuse("complete: needs a text to continue")

    def _chat(self, message: str) -> None:
        if message:
            # A single message starts a conversation of its own.
            self._terminal.forget()
            self._terminal.chat(message)
            return
        self._terminal.forget()

        def say(line: str) -> bool:
            if line.strip() in ("exit", "quit"):
                return False
            self._terminal.chat(line)
            return True

        self._terminal.read_lines(say, "chat> ")

    def _batch(self, text: str) -> None:
        for number, request in enumerate(self._requests(text)):
            self._terminal.show(f"--- {number + 1}")
            messages, prompt = request.get("messages"), request.get("prompt")
            if isinstance(messages, list):
                # The default binds this iteration's messages.
                self._terminal.ask(lambda dialogue, m=messages: dialogue.chat(m))
            elif isinstance(prompt, str):
                self._terminal.complete(prompt)
            else:
                self._terminal.refuse("batch: a request needs `prompt`, a text, or `messages`, a list")

    def _requests(self, text: str) -> list[dict[str, Any]]:
        try:
            is_file = Path(text).is_file()
        # A JSON document as a path: too long a name, or a NUL in it.
        except (OSError, ValueError):
            is_file = False
        try:
            document = json.loads(Path(text).read_text(encoding="utf-8") if is_file else text)
        # RecursionError: deeply nested JSON.
        except (OSError, ValueError, RecursionError) as error:
            self._terminal.refuse(f"batch: neither a file nor JSON ({error})")
            return []
        listed = document if isinstance(document, list) else [document]
        if not all(isinstance(request, dict) for request in listed):
            self._terminal.refuse("batch: expected a list of objects")
            return []
        return listed


def finish(plan: RunPlan[ReplWork], done: SessionStats, session: Session) -> int:
    """Prints the number of answers and the speed."""
    del plan
    if session.show:
        print(f"{done.answers} answers, {done.tokens:,} tokens in {done.seconds:.1f} s")
    return done.exit_code


def outputs(plan: RunPlan[ReplWork], session: Session) -> tuple[Output, ...]:
    """Nothing is written."""
    del plan, session
    return ()


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=InferenceReplConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
    tracked=False,
)


def main(config: InferenceReplConfig, *, written: ExplicitKeys | None = None) -> int:
    """Talks on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
