"""Generates text for a file of prompts: JSON lines in, JSON lines out.

    python -m levanter.main.generate --config_path config/generate/demo.yaml --input_path prompts.jsonl \\
        --output_path answers.jsonl

What a line may hold says `levanter.inference.jsonl`. Lines are answered in their order, whatever order they end in. A
run that is killed goes on where its answers end when it is started again, and what the two write is, byte for byte,
what one would have written. A line that is no request gets its error for an answer, all others theirs, and the run ends
with exit code 2.
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
from levanter.distributed.barrier import agreed
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
    """How a run went.

    Attributes:
        loading: how loading went; None where every line had its answer before.
        lines: answers in the output.
        kept: of these, from earlier runs.
        tokens: generated here.
        seconds: from the first prompt to the last token, compilation included.
        refused: what is wrong with the lines that are no requests, by number.
        failed: what happened to requests that could not be finished, by number.
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
    """A request that is being answered."""

    index: int
    line: int
    request: Request
    texts: dict[ChoiceId, "_Text"]
    echo: Echo | None = None
    done: list[Choice] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class _Text:
    """A choice as it grows."""

    text: ChoiceText
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


class _Run:
    """The requests of a file on their way through the engine."""

    def __init__(
        self,
        work: GenerateWork,
        schedule: Schedule,
        found: GenerateResult,
        reader: PromptReader,
        score: ScorePromptFn | None,
    ):
        self.work, self.schedule, self.found, self.reader, self.score = work, schedule, found, reader, score
        self.pending: dict[str, _Pending] = {}
        self.answered: list[tuple[int, bytes]] = []

    def requests(self, first: int) -> Iterator[Request]:
        """The requests of the input; lines that are none are answered with what is wrong with them.

        Args:
            first: the index of the first line that has no answer yet.
        """
        config = self.work.config
        assert config.input_path is not None
        with open_read(config.input_path) as file:
            for index, asked in enumerate(request_lines(file, defaults=params_to_json(config.sampling))):
                if index < first:
                    continue
                if isinstance(asked, PromptRequest):
                    asked = self._request(index, asked)
                if isinstance(asked, InvalidLine):
                    self.found.refused[asked.line] = asked.error
                    self.answered.append((index, error_line(asked)))
                elif asked is not None:
                    yield asked

    def _request(self, index: int, asked: PromptRequest) -> Request | InvalidLine | None:
        """A line as a request; None where there is nothing to generate."""
        try:
            request = self.reader.request(asked)
        except ValueError as error:
            return InvalidLine(line=asked.line, id=asked.id, error=str(error))
        tokenizer = self.reader.tokenizer
        limit = request.new_tokens(self.schedule.context)
        texts = {
            ChoiceId(request.id, n): _Text(text=ChoiceText.for_request(request, tokenizer.stream(), limit=limit))
            for n in range(request.params.n)
        }
        pending = _Pending(index=index, line=asked.line, request=request, texts=texts)
        self.pending[request.id] = pending
        if request.params.echo and not self._echo(pending):
            return None
        if request.params.max_tokens == 0:
            empty = [Choice(of=of, text="", tokens=(), reason="length") for of in texts]
            self._answer(pending, answer_line(request, empty, echo=pending.echo))
            return None
        return request

    def _echo(self, pending: _Pending) -> bool:
        """Makes the prompt part of the answer; whether its tokens have probabilities, where those are asked for."""
        request, scores = pending.request, None
        if request.params.logprobs is not None:
            assert self.score is not None, "a prompt is to be scored, and the plan has no Program for that"
            scores = self.score(request.tokens, request.params.logprobs)
            if not all(map(math.isfinite, scores.logprobs)):
                self._fail(pending, NOT_FINITE)
                return False
        pending.echo = Echo(text=self.reader.tokenizer.decode(request.tokens), scores=scores)
        return True

    def _fail(self, pending: _Pending, error: str) -> None:
        self.found.failed[pending.line] = error
        self._answer(pending, error_line(InvalidLine(line=pending.line, id=pending.request.id, error=error)))

    def take(self, event: Event, engine: Engine) -> None:
        """What an event does to its request."""
        pending = self.pending.get(event.of.request)
        if pending is None or event.of not in pending.texts:
            return
        if isinstance(event, Failed):
            for of in pending.texts:
                engine.cancel(of)
            self._fail(pending, event.error)
            return
        if isinstance(event, Token):
            self.found.tokens += 1
            own = pending.texts[event.of]
            piece = own.text.push(event.id)
            own.tokens.append(event)
            own.pieces.append(piece.text)
            if piece.reason is not None:
                engine.cancel(event.of)
                pending.done.append(_choice(event.of, own, piece.reason))
                del pending.texts[event.of]
        if not pending.texts:
            self._answer(pending, answer_line(pending.request, pending.done, echo=pending.echo))

    def _answer(self, pending: _Pending, line: bytes) -> None:
        del self.pending[pending.request.id]
        self.answered.append((pending.index, line))


def _choice(of: ChoiceId, own: _Text, reason: str) -> Choice:
    asked = own.tokens[0].logprob is not None
    return Choice(
        of=of,
        text="".join(own.pieces),
        tokens=tuple(token.id for token in own.tokens),
        reason=reason,
        logprobs=tuple(token.logprob for token in own.tokens if token.logprob is not None) if asked else None,
        top=tuple(token.top for token in own.tokens) if own.tokens[0].top else (),
    )


def identity(work: GenerateWork, reader: PromptReader) -> Mapping[str, Json]:
    """Everything that the answers depend on."""
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
        "chat_template": None if reader.template is None else sha256(reader.template.text.encode()).hexdigest(),
        "enforce_bos": config.enforce_bos,
        "sampling": str(plain(config.sampling)),
        "seed": config.trainer.seed,
        "precision": str(work.pretrained.precision),
        "quantize": config.quantize,
        "tied_head": config.tied_head if config.quantize else None,
        "cache_dtype": str(work.programs.cache.abstract.pages[0].dtype),
        "max_seq_len": work.programs.cache.max_seq_len,
        # Absent where there is none: answers of before go on.
        **({} if adapter is None else {"adapter": f"{adapter.config} {weights_digest(adapter.source)}"}),
    }


def execute(plan: RunPlan[GenerateWork], mesh: Mesh | None, session: Session | None = None) -> GenerateResult:
    """Answers every line of the input, or of the terminal; nothing runs that is not in `plan`."""
    assert mesh is not None, "generation runs on devices"
    work, show = plan.work, session is not None and session.show
    schedule = make_schedule(work.programs, share_prefixes=work.config.inference.share_prefixes)
    reader = prompt_reader(work, schedule)
    with ExitStack() as held:
        answers = None
        if jax.process_index() == 0 and not work.config.interactive:
            path = work.config.output_path
            assert path is not None, "a plan without an output must not run: RunPlan.check() comes first"
            lease = held.enter_context(
                leased(f"{path}.parts", what="a generation run", advice="give another output_path")
            )
            answers = OutputWriter(path, identity(work, reader), lease=lease)
        found = GenerateResult(kept=int(agreed("answers", str(0 if answers is None else answers.begin()))))
        with running(work, mesh, schedule=schedule, reader=reader, show=show) as ready:
            found.loading = ready.loading
            if ready.engine is not None and work.config.interactive:
                _converse(ready.engine, reader, found)
            elif ready.engine is not None:
                assert answers is not None
                # What is ready when the run is interrupted is stored too.
                held.callback(answers.store)
                _answer_all(_Run(work, schedule, found, reader, ready.score), ready.engine, answers, show=show)
        found.exit_code = int(agreed("how it went", str(_exit_code(found))))
        if answers is not None:
            found.lines = answers.finish()
    return found


def _converse(engine: Engine, reader: PromptReader, found: GenerateResult) -> None:
    """A session at the terminal."""
    terminal = Terminal(Dialogue(engine, reader, reader.defaults))
    session = terminal.run()
    found.tokens, found.seconds, found.lines = session.tokens, session.seconds, session.answers
    # Who sits at the terminal has seen what was refused, and went on.
    found.refused, found.failed = ({} if at_terminal() else session.refused), session.failed


def _answer_all(run: "_Run", engine: Engine, answers: OutputWriter, *, show: bool) -> None:
    """Answers every line of the input that has no answer yet."""
    began, found = time.perf_counter(), run.found
    with Progress("generating", total=None, unit="tokens", show=show) as progress:
        for event in engine.run(run.requests(found.kept)):
            run.take(event, engine)
            _hand_over(run, answers)
            progress.advance_to(found.tokens)
    _hand_over(run, answers)
    found.seconds = time.perf_counter() - began


def _exit_code(found: GenerateResult) -> int:
    return INTERNAL_ERROR if found.failed else BAD_INPUT if found.refused else OK


def _hand_over(run: _Run, answers: OutputWriter) -> None:
    """Gives the answers that are ready to whoever writes them."""
    for index, line in run.answered:
        answers.add(index, line)
    run.answered.clear()


def finish(plan: RunPlan[GenerateWork], done: GenerateResult, session: Session) -> int:
    """Says how it went; which lines are no requests, and which requests could not be finished."""
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
    """Where an interrupted run goes on."""
    del session
    if plan.work.config.interactive:
        return "the session ended"
    return f"answers so far are kept beside {plan.work.config.output_path}; the same command goes on behind them"


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
