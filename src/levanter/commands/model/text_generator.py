"""The engine on all processes of a run, and texts for lists of prompts.

`process_engine` gives the engine to process 0; the others execute its calls meanwhile. `TextGenerator` answers lists of
prompts with it: those of tasks that lm_eval evaluates, after loading and between training steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from levanter.data import Tokenizer
from levanter.distributed.agreement import current_peers
from levanter.distributed.broadcast import WAIT_SECONDS
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.generation import Continuation
from levanter.inference.constraint import Constraints
from levanter.inference.detokenizer import ChoiceText
from levanter.inference.engine import DeviceRunner, Engine
from levanter.inference.multihost import LeaderRunner, run_follower
from levanter.inference.programs import ScorePromptFn
from levanter.inference.prompts import end_of_text_ids
from levanter.inference.requests import (
    ChoiceId,
    Failed,
    FinishReason,
    Request,
    SamplingParams,
    Token,
    merge_stop_ids,
)
from levanter.inference.scheduler import Schedule
from levanter.io import Progress

_CALLS = "the next call"


@dataclass(frozen=True, kw_only=True, eq=False)
class ProcessEngine:
    """The engine of process 0.

    Attributes:
        engine: the engine; None on other processes, which have executed all of its calls by then.
        score: scores prompts; None if there are no Programs for it.
    """

    engine: Engine | None
    score: ScorePromptFn | None = None


@contextmanager
def process_engine(
    rows: DeviceRunner,
    schedule: Schedule,
    *,
    constraints: Constraints | None = None,
    scorer: ScorePromptFn | None = None,
    following: AbstractContextManager[object] | None = None,
) -> Iterator[ProcessEngine]:
    """Yields the engine on process 0; other processes follow its calls first, and yield when it has finished.

    Args:
        rows: the runner of this process's devices.
        schedule: of the rows.
        constraints: makes masks for constrained texts; None if no request has a constraint.
        scorer: scores prompts; None if none is scored.
        following: a context around the calls of other processes.
    """
    peers = current_peers()
    # A single process: calls go to the devices directly.
    if peers is None:
        yield ProcessEngine(engine=Engine(rows, schedule, constraints=constraints), score=scorer)
    elif peers.process == 0:
        # Each call of process 0 is broadcast as text before it runs, so that all processes execute the same Programs in
        # order.
        leading = LeaderRunner(rows, lambda text: peers.follow(_CALLS, lambda: text), scorer)
        engine = Engine(leading, schedule, constraints=constraints)
        try:
            yield ProcessEngine(engine=engine, score=leading.score if scorer else None)
        # Followers would wait for the next call while this process reports its error.
        except Exception:
            leading.end()
            raise
        # Releases the followers; without it they would wait for another call.
        leading.end()
    else:
        # Returns when process 0 has ended; only then is the body of the `with` statement executed here.
        with following or nullcontext():
            run_follower(rows, lambda: peers.follow(_CALLS, lambda: "", seconds=WAIT_SECONDS), scorer)
        yield ProcessEngine(engine=None)


@dataclass(kw_only=True)
class GeneratedText:
    """One choice of a request.

    Attributes:
        request: its id.
        choice: its number.
        text: the text, without the stop string.
        tokens: its ids, with one that ended it.
        reason: why it ended.
        error: why it could not be finished; None if it was.
    """

    request: str
    choice: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str | None = None


def generate_texts(
    engine: Engine, requests: Sequence[Request], tokenizer: Tokenizer, *, ended: Callable[[], None] = lambda: None
) -> list[GeneratedText]:
    """The texts of all choices, in the order of the requests.

    Args:
        engine: the engine.
        requests: their ids must differ.
        tokenizer: of the model.
        ended: called after each text.
    """
    # In the order of the requests, whatever order the texts end in.
    results: dict[ChoiceId, GeneratedText] = {}
    unfinished: dict[ChoiceId, ChoiceText] = {}
    for request in requests:
        for n in range(request.params.n):
            of = ChoiceId(request.id, n)
            results[of] = GeneratedText(request=request.id, choice=n)
            # One stream of text for each choice; the entry is deleted when its text ends.
            limit = request.new_tokens(engine.schedule.context)
            unfinished[of] = ChoiceText.for_request(request, tokenizer.stream, limit=limit)
    for event in engine.run(requests):
        # The engine may deliver tokens of a text whose stop string was found already.
        if (text := unfinished.get(event.of)) is None:
            continue
        result = results[event.of]
        # A failed choice has no further events; its other choices go on.
        if isinstance(event, Failed):
            result.error = event.error
        elif isinstance(event, Token):
            piece = text.push(event.id)
            result.text += piece.text
            result.tokens.append(event.id)
            if (reason := piece.reason) is None:
                continue
            result.reason = reason
            # Stop strings are known on the host only; the slot is freed for the next request.
            engine.cancel(event.of)
        else:
            continue
        del unfinished[event.of]
        ended()
    assert not unfinished, f"{len(unfinished)} texts are unfinished"
    return list(results.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class TextGenerator:
    """Answers lists of prompts; the cache exists while a list is answered, and is freed afterwards.

    Attributes:
        engine: makes the engine on every process; see `process_engine`.
        tokenizer: of the model.
        seed: of the run; a prompt without a seed gets one that is derived from this.
        show: whether progress is shown.
    """

    engine: Callable[[], AbstractContextManager[ProcessEngine]]
    tokenizer: Tokenizer
    seed: int
    show: bool

    def __call__(self, prompts: Sequence[Continuation]) -> list[str]:
        """The generated text for each prompt, without the stop string."""
        # Built before the engine starts: a refused request allocates nothing.
        requests = [self._request(n, prompt) for n, prompt in enumerate(prompts)]
        with (
            self.engine() as started,
            Progress("writing texts", total=len(requests), unit="texts", show=self.show) as progress,
        ):
            assert started.engine is not None, "process 0 answers"
            texts = generate_texts(started.engine, requests, self.tokenizer, ended=lambda: progress.advance(1))
        for n, text in enumerate(texts):
            # An answer that is missing would change a metric silently, so one failed text ends the run.
            if text.error is not None:
                raise HarnessError(f"text {n + 1} of {len(requests)}: {text.error}")
        return [text.text for text in texts]

    def follow(self) -> None:
        """Executes the same engine calls as process 0, until it releases the engine."""
        with self.engine():
            pass

    def _request(self, n: int, prompt: Continuation) -> Request:
        # Deterministic, and different for each request.
        seed = prompt.seed if prompt.seed is not None else self.seed + n
        # lm_eval's tasks expect greedy decoding unless they set a temperature.
        sampling: dict[str, Any] = {"temperature": 0.0, **prompt.sampling}
        params = SamplingParams(**sampling, max_tokens=prompt.max_tokens, stop=prompt.until, seed=seed)
        return Request(
            id=str(n),
            tokens=tuple(prompt.tokens.tolist()),
            params=params,
            seed=seed,
            stop_ids=merge_stop_ids(params, end_of_text_ids(self.tokenizer)),
        )
