"""lm_eval's model: its requests become tables and prompts, what comes of them its answers.

Only process 0 has one. What it asks of the devices it tells the others first.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from levanter.data.chat import ChatTemplate
from levanter.eval.harness.broadcast import tell_table, tell_texts
from levanter.eval.harness.encoding import HarnessError, Query, QueryEncoder
from levanter.eval.harness.generation import Continuation, GenerationKeys, Generator
from levanter.eval.harness.scoring import QueryScores, Scorer, answers
from levanter.runplan import NonFiniteResultError

logger = logging.getLogger(__name__)

Watch = Callable[[str, int], Callable[[int], None]]
"""Hears what begins and how much of it there is; gives what is called with how much is done."""


@dataclass(kw_only=True)
class RequestLog:
    """What a run asked of the model.

    Attributes:
        requests: how many of each kind.
        tokens: that the Programs took, padding included.
        alone: tokens that there would have been, were every question asked by itself.
        seconds: on the devices, compilation included.
        cut: questions of which the beginning was dropped, for want of room.
        digest: hex SHA-256 of all tables and prompts.
        first: of each kind the ids of the first request.
    """

    requests: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    alone: int = 0
    seconds: float = 0.0
    cut: int = 0
    digest: str = ""
    first: dict[str, list[int]] = field(default_factory=dict)

    def note(self, kind: str, requests: int, parts: Sequence[np.ndarray], digest: str) -> None:
        """Notes a list of requests."""
        self.requests[kind] = self.requests.get(kind, 0) + requests
        self.digest = hashlib.sha256(f"{self.digest}|{kind}|{digest}".encode()).hexdigest()
        if parts:
            self.first.setdefault(kind, parts[0].tolist())


class HarnessLM(TemplateLM):
    """A model of ours as lm_eval asks it.

    Args:
        encoder: makes tokens of texts.
        scorer: the model on its devices; None where it is not asked.
        generate: writes texts; None where no task wants that.
        template: writes conversations; None where there is none.
        generation: keys of generation where a task does not say.
        stops: strings that end texts of a task besides its own, by its name.
        watch: hears how far it is.
    """

    def __init__(
        self,
        *,
        encoder: QueryEncoder,
        scorer: Scorer | None,
        generate: Generator | None = None,
        template: ChatTemplate | None = None,
        generation: Mapping[str, Any],
        stops: Mapping[str, tuple[str, ...]],
        watch: Watch,
    ):
        super().__init__()
        self.encoder, self.scorer, self.generate, self.template = encoder, scorer, generate, template
        self.generation, self.stops, self.watch = generation, stops, watch
        self.asked = RequestLog()

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        eos = self.encoder.tokenizer.eos_id
        return self.encoder.prefix if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The id before a text that nothing else stands before."""
        return self.encoder.prefix

    @property
    def max_length(self) -> int:
        """Tokens that the model sees at once."""
        return self.encoder.max_length

    @property
    def tokenizer_name(self) -> str:
        """What the tokenizer is called."""
        return self.encoder.tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the template that is used."""
        return self.template.text if self.template is not None and chat_template is not False else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, up to where the model goes on."""
        if self.template is None:
            raise HarnessError(
                "eval_harness.apply_chat_template: this model's tokenizer has no chat template\n"
                "  → leave it out, or name a tokenizer that has one"
            )
        more = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        text, _ = self.template.render(chat_history, more, "eval_harness")
        # A template ends the last turn, which is to be continued here.
        if not add_generation_prompt and chat_history:
            last = chat_history[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)] if last and last in text else text
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """The ids of a text."""
        del kwargs
        return self.encoder.encode([string], bare=add_special_tokens is False)[0].tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """How likely each continuation is behind its context, and whether it is what a greedy model writes."""
        del disable_tqdm
        names = [_named(each) for each in requests]
        questions = self.encoder.questions(pairs_of(requests), names)
        found = self._answer("loglikelihood", len(requests), questions, names)
        return [(float(a), bool(b)) for a, b in zip(found.logprobs, found.is_greedy, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """How likely each text is as a whole."""
        del disable_tqdm
        windows = [self.encoder.windows(each.args[0]) for each in requests]
        names = [_named(each) for each, mine in zip(requests, windows, strict=True) for _ in mine]
        found = self._answer("loglikelihood_rolling", len(requests), [one for mine in windows for one in mine], names)
        ends = np.cumsum([len(mine) for mine in windows])
        return [float(part.sum()) for part in np.split(found.logprobs, ends[:-1])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        del kwargs
        pairs = [(np.asarray(before, np.int32), np.asarray(after, np.int32)) for _, before, after in requests]
        questions = [self.encoder.question(*pair) for pair in pairs]
        found = self._answer("loglikelihood", len(requests), questions, [repr(each[0]) for each in requests])
        return [(float(a), bool(b)) for a, b in zip(found.logprobs, found.is_greedy, strict=True)]

    def _answer(self, kind: str, requests: int, questions: Sequence[Query], names: Sequence[str]) -> QueryScores:
        if not questions:
            return QueryScores(logprobs=np.zeros(0), is_greedy=np.zeros(0, bool))
        assert self.scorer is not None, "a plan asks nothing"
        table = self.scorer.table(questions)
        self.asked.note(kind, requests, [np.append(each.inputs, each.targets[-1:]) for each in questions], table.digest)
        self.asked.cut += sum(each.cut > 0 for each in questions)
        self.asked.tokens += table.computed_tokens
        self.asked.alone += table.tokens
        began = time.perf_counter()
        tell_table(table)
        found = answers(table, len(questions), self.scorer.run(table, self.watch(kind, table.computed_tokens)))
        self.asked.seconds += time.perf_counter() - began
        if len(bad := found.not_finite):
            raise NonFiniteResultError(
                f"log-probabilities are not finite: the first is of {names[bad[0]]}, of {len(bad):,} such requests"
            )
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text behind each context, up to the first of its stop strings."""
        del disable_tqdm
        if self.generate is None:
            raise HarnessError(
                f"{_named(requests[0])}: a text is to be written, and this run has no Programs for that\n"
                "  → `eval_harness` as a command of its own has them"
            )
        asked, cut = continuations(requests, self.encoder, self.generation, self.stops)
        self.asked.cut += cut
        parts = [each.tokens for each in asked]
        digest = hashlib.sha256(b"|".join(part.astype("<i8").tobytes() for part in parts)).hexdigest()
        self.asked.note("generate_until", len(requests), parts, digest)
        began = time.perf_counter()
        tell_texts()
        texts = self.generate(asked)
        self.asked.seconds += time.perf_counter() - began
        return [_before(text, each.until) for text, each in zip(texts, asked, strict=True)]


def continuations(
    requests: Sequence[Instance],
    encoder: QueryEncoder,
    generation: Mapping[str, Any],
    stops: Mapping[str, tuple[str, ...]],
) -> tuple[list[Continuation], int]:
    """Requests of texts as prompts, and of how many the beginning was dropped.

    Args:
        requests: what is asked.
        encoder: makes tokens of texts.
        generation: keys of generation where a task does not say.
        stops: strings that end texts of a task besides its own, by its name.

    Raises:
        HarnessError: lists keys that are wrong, and texts that leave no room for a prompt.
    """
    keys = [
        GenerationKeys.of(each.arguments[1], generation, stops.get(str(each.task_name), ()), _named(each))
        for each in requests
    ]
    contexts = encoder.encode([each.args[0] for each in requests])
    asked, wrong, cut = [], [], 0
    for ids, key, request in zip(contexts, keys, requests, strict=True):
        room = encoder.max_length - key.max_tokens
        if room < 1:
            wrong.append(
                f"{_named(request)}: max_gen_toks: {key.max_tokens:,} leave no room for a prompt in the "
                f"{encoder.max_length:,} tokens that the model sees (eval_harness.max_length)"
            )
        ids = ids if len(ids) else np.asarray([encoder.prefix], np.int32)
        cut += len(ids) > room
        asked.append(
            Continuation(
                tokens=ids[-max(room, 1) :],
                until=key.until,
                max_tokens=key.max_tokens,
                sampling=key.sampling,
                seed=key.seed,
            )
        )
    if wrong:
        more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise HarnessError("\n".join([*wrong[:_SHOWN], *more]))
    return asked, cut


_SHOWN = 5


def pairs_of(requests: Sequence[Instance]) -> list[tuple[str, str]]:
    """Contexts and continuations of requests."""
    return [(str(each.arguments[0]), str(each.arguments[1])) for each in requests]


def _before(text: str, stops: Sequence[str]) -> str:
    """A text up to each of the strings: lm_eval's own rule, should an engine give more."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def _named(request: Instance) -> str:
    return f"{request.task_name}, document {request.doc_id}"
