"""Generates text for a file of prompts: JSON lines in, JSON lines out.

    python -m levanter.main.generate --config_path config/generate/demo.yaml --input_path prompts.jsonl \\
        --output_path answers.jsonl

`levanter.inference.jsonl` documents the keys of a line. The output has the order of the input, whatever order the texts
finish in. A run that was killed continues after its last answer when it is started again, and the output is byte for
byte that of an uninterrupted run. An invalid line is answered with its error, all others are generated, and the run
ends with exit code 2.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256

import jax
from jax.sharding import Mesh

from haliax_ext.load_progress import LoadReport
from levanter.base.bounded_json import Json
from levanter.base.exit_codes import BAD_INPUT, INTERNAL_ERROR, OK
from levanter.commands.cli.runner import run_config
from levanter.commands.generate.chat_session import Dialogue
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.engine_setup import running
from levanter.commands.generate.plan import NAME, GenerateWork, describe
from levanter.commands.generate.prompts import prompt_reader
from levanter.commands.generate.terminal import Terminal, at_terminal
from levanter.config import ExplicitKeys, plain
from levanter.data.incremental_detokenizer import REPLACEMENT
from levanter.distributed.agreement import agreed
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import NOT_FINITE, Engine, make_schedule
from levanter.inference.jsonl import InvalidLine, request_lines
from levanter.inference.output_writer import Choice, Echo, OutputWriter, answer_line, error_line
from levanter.inference.programs import ScorePromptFn
from levanter.inference.prompts import PromptReader, PromptRequest
from levanter.inference.requests import ChoiceId, Event, Failed, Request, Token, params_to_json
from levanter.inference.scheduler import Schedule
from levanter.io import Output, Progress, leased, open_read
from levanter.memorization.books import weights_digest
from levanter.runplan import EntryPoint, RunPlan, Session


@dataclass(kw_only=True)
class GenerateResult:
    """The result of a run.

    Attributes:
        loading: report of the loading; None if nothing was loaded.
        lines: answers in the output.
        kept: of these, from earlier runs.
        tokens: generated here.
        seconds: from the first prompt to the last token, compilation included.
        refused: errors of invalid lines, by line number.
        failed: errors of requests that could not be finished, by line number.
        exit_code: of all processes.
    """

    loading: LoadReport | None = None
    lines: int = 0
    kept: int = 0
    tokens: int = 0
    seconds: float = 0.0
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    exit_code: int = OK


@dataclass(kw_only=True, eq=False)
class _Pending:
    """A request in progress."""

    index: int
    line: int
    request: Request
    texts: dict[ChoiceId, "_Text"]
    echo: Echo | None = None
    done: list[Choice] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class _Text:
    """A choice in progress."""

    text: ChoiceText
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


class _Run:
    """The requests of an input file between reader, engine and output."""

    def __init__(
        self,
        work: GenerateWork,
        schedule: Schedule,
        result: GenerateResult,
        reader: PromptReader,
        score: ScorePromptFn | None,
    ):
        self.work, self.schedule, self.result, self.reader, self.score = work, schedule, result, reader, score
        self.pending: dict[str, _Pending] = {}
        self.answered: list[tuple[int, bytes]] = []

    def requests(self, first: int) -> Iterator[Request]:
        """The requests of the input; an invalid line is answered with its error.

        Args:
            first: the index of the first line that has no answer yet.
        """
        config = self.work.config
        assert config.input_path is not None
        with open_read(config.input_path) as file:
            for index, request in enumerate(request_lines(file, defaults=params_to_json(config.sampling))):
                # Answered by an earlier run: counted, but not generated again.
                if index < first:
                    continue
                if isinstance(request, PromptRequest):
                    request = self._request(index, request)
                if isinstance(request, InvalidLine):
                    self.result.refused[request.line] = request.error
                    self.answered.append((index, error_line(request)))
                elif request is not None:
                    yield request

    def _request(self, index: int, prompt: PromptRequest) -> Request | InvalidLine | None:
        """A line as a request; None if nothing is to be generated for it."""
        try:
            request = self.reader.request(prompt)
        except ValueError as error:
            return InvalidLine(line=prompt.line, id=prompt.id, error=str(error))
        tokenizer = self.reader.tokenizer
        limit = request.new_tokens(self.schedule.context)
        # One detokenizer for each choice: a stream has state.
        texts = {
            ChoiceId(request.id, n): _Text(text=ChoiceText.for_request(request, tokenizer.stream, limit=limit))
            for n in range(request.params.n)
        }
        pending = _Pending(index=index, line=prompt.line, request=request, texts=texts)
        self.pending[request.id] = pending
        # The prompt's scores were not finite, so the request is answered already.
        if request.params.echo and not self._echo(pending):
            return None
        # `max_tokens: 0` only echoes and scores the prompt.
        if request.params.max_tokens == 0:
            empty = [Choice(of=of, text="", tokens=(), reason="length") for of in texts]
            self._answer(pending, answer_line(request, empty, echo=pending.echo))
            return None
        return request

    def _echo(self, pending: _Pending) -> bool:
        """Adds the prompt to the answer, scored if `logprobs` is set; False if a score is not finite."""
        request, scores = pending.request, None
        if request.params.logprobs is not None:
            assert self.score is not None, "a prompt is to be scored, and the plan has no Program for that"
            scores = self.score(request.tokens, request.params.logprobs)
            if not all(map(math.isfinite, scores.logprobs)):
                self._fail(pending, NOT_FINITE)
                return False
        text = self.reader.tokenizer.decode(request.tokens)
        # A character that the prompt begins is completed by the choice, which therefore has all of it.
        text = text if request.params.max_tokens == 0 else text.rstrip(REPLACEMENT)
        pending.echo = Echo(text=text, scores=scores)
        return True

    def _fail(self, pending: _Pending, error: str) -> None:
        self.result.failed[pending.line] = error
        self._answer(pending, error_line(InvalidLine(line=pending.line, id=pending.request.id, error=error)))

    def take(self, event: Event, engine: Engine) -> None:
        """Applies an event to its request."""
        pending = self.pending.get(event.of.request)
        # The engine runs ahead of the host: tokens of a choice that has ended may still arrive.
        if pending is None or event.of not in pending.texts:
            return
        if isinstance(event, Failed):
            # One failed choice fails the request; its other choices are stopped.
            for of in pending.texts:
                engine.cancel(of)
            self._fail(pending, event.error)
            return
        if isinstance(event, Token):
            self.result.tokens += 1
            state = pending.texts[event.of]
            piece = state.text.push(event.id)
            state.tokens.append(event)
            state.pieces.append(piece.text)
            # A stop string is known to the host only, so the engine must be told to free the slot.
            if piece.reason is not None:
                engine.cancel(event.of)
                pending.done.append(_choice(event.of, state, piece.reason))
                del pending.texts[event.of]
        if not pending.texts:
            self._answer(pending, answer_line(pending.request, pending.done, echo=pending.echo))

    def _answer(self, pending: _Pending, line: bytes) -> None:
        # Removed before the last events of the request arrive; `take` ignores those.
        del self.pending[pending.request.id]
        self.answered.append((pending.index, line))


def _choice(of: ChoiceId, state: _Text, reason: str) -> Choice:
    # All tokens of a request have probabilities, or none has.
    scored = state.tokens[0].logprob is not None
    return Choice(
        of=of,
        text="".join(state.pieces),
        tokens=tuple(token.id for token in state.tokens),
        reason=reason,
        logprobs=tuple(token.logprob for token in state.tokens if token.logprob is not None) if scored else None,
        top=tuple(token.top for token in state.tokens) if state.tokens[0].top else (),
    )


def identity(work: GenerateWork, reader: PromptReader) -> Mapping[str, Json]:
    """Everything that the answers depend on; stored answers of another identity are not continued."""
    config, digest = work.config, sha256()
    assert config.input_path is not None
    with open_read(config.input_path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    adapter = work.pretrained.adapter
    return {
        "input": digest.hexdigest(),
        "model": work.pretrained.checkpoint.description,
        "architecture": str(plain(work.pretrained.config)),
        "tokenizer": work.pretrained.tokenizer.hash,
        "ends": list(reader.ends),
        "chat_template": None if reader.template is None else reader.template.digest,
        "enforce_bos": config.enforce_bos,
        "sampling": str(plain(config.sampling)),
        "seed": config.trainer.seed,
        "precision": str(work.pretrained.precision),
        "quantize": config.quantize,
        "tied_head": config.tied_head if config.quantize else None,
        "cache_dtype": str(work.programs.cache.dtype),
        "max_seq_len": work.programs.cache.max_seq_len,
        # Only present with an adapter, so that outputs of runs without one keep their identity.
        **({} if adapter is None else {"adapter": f"{adapter.config} {weights_digest(adapter.source)}"}),
    }


def execute(plan: RunPlan[GenerateWork], mesh: Mesh | None, session: Session | None = None) -> GenerateResult:
    """Answers every line of the input, or of the terminal; nothing runs that is not in `plan`."""
    assert mesh is not None, "generation runs on devices"
    work, show = plan.work, session is not None and session.show
    schedule = make_schedule(work.programs, share_prefixes=work.config.inference.share_prefixes)
    reader = prompt_reader(work, schedule)
    with ExitStack() as stack:
        answers = None
        # Only process 0 reads and writes files. The lease keeps a second run from writing the same output.
        if jax.process_index() == 0 and not work.config.interactive:
            path = work.config.output_path
            assert path is not None, "a plan without an output must not run: RunPlan.check() comes first"
            lease = stack.enter_context(
                leased(f"{path}.parts", what="a generation run", advice="give another output_path")
            )
            answers = OutputWriter(path, identity(work, reader), lease=lease)
        # Only process 0 has the stored answers; their number becomes the same on all processes.
        result = GenerateResult(kept=int(agreed("answers", str(0 if answers is None else answers.begin()))))
        with running(work, mesh, schedule=schedule, reader=reader, show=show) as ready:
            result.loading = ready.loading
            if ready.engine is not None and work.config.interactive:
                _converse(ready.engine, reader, result)
            elif ready.engine is not None:
                assert answers is not None
                # Also called on an interrupt, so that finished answers are stored.
                stack.callback(answers.store)
                _answer_all(_Run(work, schedule, result, reader, ready.score), ready.engine, answers, show=show)
        # All processes end with the same exit code.
        result.exit_code = int(agreed("the exit code", str(_exit_code(result))))
        # Assembles the output file from its parts.
        if answers is not None:
            result.lines = answers.finish()
    return result


def _converse(engine: Engine, reader: PromptReader, result: GenerateResult) -> None:
    """A session at the terminal."""
    terminal = Terminal(Dialogue(engine, reader, reader.defaults))
    session = terminal.run()
    result.tokens, result.seconds, result.lines = session.tokens, session.seconds, session.answers
    # At a terminal the user saw the refusal and continued; from a pipe it makes the exit code 2.
    result.refused, result.failed = ({} if at_terminal() else session.refused), session.failed


def _answer_all(run: "_Run", engine: Engine, answers: OutputWriter, *, show: bool) -> None:
    """Answers every line of the input that has no answer yet."""
    began, result = time.perf_counter(), run.result
    with Progress("generating", total=None, unit="tokens", show=show) as progress:
        # `engine.run` draws requests from the iterator as slots become free.
        for event in engine.run(run.requests(result.kept)):
            run.take(event, engine)
            _hand_over(run, answers)
            progress.advance_to(result.tokens)
    # Lines that need no generation may follow the last event.
    _hand_over(run, answers)
    result.seconds = time.perf_counter() - began


def _exit_code(result: GenerateResult) -> int:
    return INTERNAL_ERROR if result.failed else BAD_INPUT if result.refused else OK


def _hand_over(run: _Run, answers: OutputWriter) -> None:
    """Passes finished answers to the writer, which puts them in order."""
    for index, line in run.answered:
        answers.add(index, line)
    run.answered.clear()


def finish(plan: RunPlan[GenerateWork], done: GenerateResult, session: Session) -> int:
    """Prints the result: throughput, invalid lines, and requests that could not be finished."""
    rate = done.tokens / max(done.seconds, 1e-9)
    metrics = {"tokens": done.tokens, "seconds": done.seconds, "tokens_per_second": rate, "lines": done.lines}
    session.tracker.log_summary(metrics)
    if session.show:
        kept = f", {done.kept} of them kept from an earlier run" if done.kept else ""
        where = "" if plan.work.config.interactive else f" in {plan.work.config.output_path}"
        print(f"{done.lines} answers{where}{kept}")
        print(f"{done.tokens:,} tokens in {done.seconds:.1f} s = {rate:,.1f} tokens/s, compilation included")
        for what, lines in (("no request", done.refused), ("not finished", done.failed)):
            for number, message in list(lines.items())[:SHOWN]:
                print(f"line {number} is {what}: {message}")
            if len(lines) > SHOWN:
                print(f"and {len(lines) - SHOWN} more lines are {what}")
    return done.exit_code


SHOWN = 10
"""Lines whose errors are printed; all are in the output."""


def outputs(plan: RunPlan[GenerateWork], session: Session) -> tuple[Output, ...]:
    """The file of the answers."""
    del session
    path = plan.work.config.output_path
    return () if path is None else (Output(key="output_path", path=path, kind="file"),)


def interrupted_message(plan: RunPlan[GenerateWork], session: Session) -> str:
    """Where an interrupted run resumes."""
    del session
    if plan.work.config.interactive:
        return "the session ended"
    return f"the answers so far are stored beside {plan.work.config.output_path}; the same command continues after them"


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=GenerateConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    finish=finish,
    interrupted_message=interrupted_message,
)


def main(config: GenerateConfig, *, written: ExplicitKeys | None = None) -> int:
    """Generates on the devices of this run."""
    return run_config(ENTRY_POINT, config, written=written).exit_code
