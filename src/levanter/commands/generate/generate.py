"""Goes on with prompts: a file with a line of JSON for each goes in, a file with a line of JSON for each comes out.

    python -m levanter.main.generate --config_path config/generate/demo.yaml --input_path prompts.jsonl \\
        --output_path answers.jsonl

What a line may hold says `levanter.inference.jsonl`. Lines are answered in their order, whatever order they end in. A
run that is killed goes on where its answers end when it is started again, and what the two write is, byte for byte,
what one would have written. A line that is no request gets its error for an answer, all others theirs, and the run ends
with exit code 2.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import jax
from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from levanter.commands.generate.config import GenerateConfig
from levanter.commands.generate.plan import NAME, GenerateWork, describe
from levanter.commands.model.pretrained import load_pretrained
from levanter.commands.shell.perform import perform
from levanter.config import Written, plain
from levanter.inference.answers import Answers, Choice, answer_line, error_line
from levanter.inference.device import DeviceRows
from levanter.inference.engine import Engine, schedule_of
from levanter.inference.jsonl import AskedLine, BrokenLine, request_lines, request_of
from levanter.inference.requests import ChoiceId, Event, Failed, Request, Token
from levanter.inference.schedule import Schedule
from levanter.inference.text import ChoiceText
from levanter.io import Output, Progress, leased, open_read
from levanter.io.exit_codes import BAD_INPUT, INTERNAL_ERROR, OK
from levanter.io.values import Json
from levanter.processes.barrier import agreed
from levanter.processes.together import jit_together
from levanter.run import EntryPoint, RunPlan, Session


@dataclass(kw_only=True)
class Generated:
    """How a run went.

    Attributes:
        loading: how loading went; None where every line had its answer before.
        lines: answers in the output.
        kept: of these, from earlier runs.
        tokens: generated here.
        seconds: from the first prompt to the last token, compilation included.
        refused: what is wrong with the lines that are no requests, by number.
        failed: what happened to requests that could not be finished, by number.
    """

    loading: LoadReport | None = None
    lines: int = 0
    kept: int = 0
    tokens: int = 0
    seconds: float = 0.0
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class _Pending:
    """A request that is being answered."""

    index: int
    line: int
    request: Request
    texts: dict[ChoiceId, "_Text"]
    done: list[Choice] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class _Text:
    """A choice as it grows."""

    text: ChoiceText
    pieces: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


class _Run:
    """The requests of a file on their way through the engine."""

    def __init__(self, work: GenerateWork, schedule: Schedule, found: Generated):
        self.work, self.schedule, self.found = work, schedule, found
        self.pending: dict[str, _Pending] = {}
        self.answered: list[tuple[int, bytes]] = []
        ends = work.pretrained.tokenizer.eos_id
        self._ends = () if ends is None else (ends,)

    def requests(self, first: int) -> Iterator[Request]:
        """The requests of the input; lines that are none are answered with what is wrong with them.

        Args:
            first: the index of the first line that has no answer yet.
        """
        config = self.work.config
        assert config.input_path is not None
        with open_read(config.input_path) as file:
            for index, asked in enumerate(request_lines(file, defaults=_defaults(config))):
                if index < first:
                    continue
                if isinstance(asked, AskedLine):
                    asked = self._request(index, asked)
                if isinstance(asked, BrokenLine):
                    self.found.refused[asked.line] = asked.error
                    self.answered.append((index, error_line(asked)))
                else:
                    yield asked

    def _request(self, index: int, asked: AskedLine) -> Request | BrokenLine:
        tokenizer, model = self.work.pretrained.tokenizer, self.work.pretrained.config
        begin = tokenizer.bos_id if self.work.config.enforce_bos else None
        assert model.vocab_size is not None

        def encode(text: str) -> list[int]:
            ids = tokenizer.encode_batch([text])[0].tolist()
            return ids if begin is None else [begin, *ids]

        try:
            request = request_of(
                asked,
                encode=encode,
                chat=None,
                vocab_size=model.vocab_size,
                model_ends=self._ends,
                seed=self.work.config.trainer.seed,
            )
            _check_known(request, self.work.config)
            self.schedule.check(request)
        except ValueError as error:
            return BrokenLine(line=asked.line, id=asked.id, error=str(error))
        limit = request.new_tokens(self.schedule.context)
        texts = {
            ChoiceId(request.id, n): _Text(text=ChoiceText.of(request, tokenizer.stream(), limit=limit))
            for n in range(request.params.n)
        }
        self.pending[request.id] = _Pending(index=index, line=asked.line, request=request, texts=texts)
        return request

    def take(self, event: Event, engine: Engine) -> None:
        """What an event does to its request."""
        pending = self.pending.get(event.of.request)
        if pending is None or event.of not in pending.texts:
            return
        if isinstance(event, Failed):
            for of in pending.texts:
                engine.give_up(of)
            self.found.failed[pending.line] = event.error
            broken = BrokenLine(line=pending.line, id=pending.request.id, error=event.error)
            self._answer(pending, error_line(broken))
        elif isinstance(event, Token):
            self.found.tokens += 1
            own = pending.texts[event.of]
            piece = own.text.push(event.id)
            own.tokens.append(event)
            own.pieces.append(piece.text)
            if piece.reason is not None:
                engine.give_up(event.of)
                pending.done.append(_choice(event.of, own, piece.reason))
                del pending.texts[event.of]
        if not pending.texts:
            self._answer(pending, answer_line(pending.request, pending.done))

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


def _check_known(request: Request, config: GenerateConfig) -> None:
    """Refuses what the engine does not do yet.

    Raises:
        ValueError: by its name.
    """
    problems = []
    if request.params.echo:
        problems.append("echo: prompts are not scored here yet; eval_lm and viz_logprobs do")
    if request.constraint is not None:
        problems.append(f"{request.constraint.kind}: texts that conform to something are not generated yet")
    if request.params.counts_tokens and not config.inference.penalties:
        problems.append("presence_penalty, frequency_penalty, repetition_penalty: inference.penalties is false")
    if problems:
        raise ValueError("\n".join(problems))


def _defaults(config: GenerateConfig) -> dict[str, object]:
    """The parameters of `sampling:` as a line has them."""
    values: dict[str, object] = asdict(config.sampling)
    values["logit_bias"] = {str(id): bias for id, bias in config.sampling.logit_bias.items()}
    return values


def identity(work: GenerateWork) -> Mapping[str, Json]:
    """Everything that the answers depend on."""
    config, digest = work.config, hashlib.sha256()
    assert config.input_path is not None
    with open_read(config.input_path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {
        "input": digest.hexdigest(),
        "model": work.pretrained.checkpoint.description,
        "architecture": str(plain(work.pretrained.config)),
        "tokenizer": work.pretrained.tokenizer.hash,
        "enforce_bos": config.enforce_bos,
        "sampling": str(plain(config.sampling)),
        "seed": config.trainer.seed,
        "precision": str(work.pretrained.precision),
        "quantize": config.quantize,
        "tied_head": config.tied_head if config.quantize else None,
        "cache_dtype": str(work.programs.cache.abstract.pages[0].dtype),
        "max_seq_len": work.programs.cache.max_seq_len,
    }


def execute(plan: RunPlan[GenerateWork], mesh: Mesh | None, session: Session | None = None) -> Generated:
    """Answers every line of the input; nothing runs that is not in `plan`."""
    assert mesh is not None, "generation runs on devices"
    work, show = plan.work, session is not None and session.show
    path = work.config.output_path
    assert path is not None, "a plan without an output must not run: RunPlan.check() comes first"
    with ExitStack() as held:
        answers = None
        if jax.process_index() == 0:
            lease = held.enter_context(
                leased(f"{path}.parts", what="a generation run", advice="give another output_path")
            )
            answers = Answers(path, identity(work), lease=lease)
        found = Generated(kept=int(agreed("answers", str(0 if answers is None else answers.begin()))))
        schedule = schedule_of(work.programs, share_prefixes=work.config.inference.share_prefixes)
        run = _Run(work, schedule, found)
        loaded = load_pretrained(work.pretrained, mesh, show=show)
        found.loading = loaded.report
        model = with_arrays(work.pretrained.abstract, loaded.arrays)
        engine = Engine(DeviceRows(work.programs, mesh, model, jit=jit_together), schedule)
        began = time.perf_counter()
        if answers is not None:
            # What is ready when the run is interrupted is stored too.
            held.callback(answers.store)
        with Progress("generating", total=None, unit="tokens", show=show) as progress:
            for event in engine.run(run.requests(found.kept)):
                run.take(event, engine)
                _hand_over(run, answers)
                progress.advance_to(found.tokens)
        _hand_over(run, answers)
        found.seconds = time.perf_counter() - began
        found.lines = 0 if answers is None else answers.finish()
    return found


def _hand_over(run: _Run, answers: Answers | None) -> None:
    """Gives the answers that are ready to whoever writes them."""
    for index, line in run.answered:
        if answers is not None:
            answers.add(index, line)
    run.answered.clear()


def conclude(plan: RunPlan[GenerateWork], done: Generated, session: Session) -> int:
    """Says how it went; which lines are no requests, and which requests could not be finished."""
    rate = done.tokens / max(done.seconds, 1e-9)
    metrics = {"tokens": done.tokens, "seconds": done.seconds, "tokens_per_second": rate, "lines": done.lines}
    session.tracker.log_summary(metrics)
    if session.show:
        kept = f", {done.kept} of them kept from an earlier run" if done.kept else ""
        print(f"{done.lines} answers in {plan.work.config.output_path}{kept}")
        print(f"{done.tokens:,} tokens in {done.seconds:.1f} s = {rate:,.1f} tokens/s, compilation included")
        for what, lines in (("no request", done.refused), ("not finished", done.failed)):
            for number, said in list(lines.items())[:SHOWN]:
                print(f"line {number} is {what}: {said}")
            if len(lines) > SHOWN:
                print(f"and {len(lines) - SHOWN} more lines are {what}")
    return INTERNAL_ERROR if done.failed else BAD_INPUT if done.refused else OK


SHOWN = 10
"""Lines whose errors are printed; all are in the output."""


def outputs(plan: RunPlan[GenerateWork], session: Session) -> tuple[Output, ...]:
    """The file of the answers."""
    del session
    path = plan.work.config.output_path
    return () if path is None else (Output(key="output_path", path=path, kind="file"),)


def left(plan: RunPlan[GenerateWork], session: Session) -> str:
    """Where an interrupted run goes on."""
    del session
    return f"answers so far are kept beside {plan.work.config.output_path}; the same command goes on behind them"


ENTRY_POINT = EntryPoint(
    name=NAME,
    config=GenerateConfig,
    describe=describe,
    execute=execute,
    outputs=outputs,
    conclude=conclude,
    left=left,
)


def main(config: GenerateConfig, *, written: Written | None = None) -> int:
    """Generates on the devices of this run."""
    return perform(ENTRY_POINT, config, written=written).exit_code
