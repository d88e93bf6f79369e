"""lm_eval's model interface: its requests become tables and prompts, and their scores and texts its answers.

It exists on process 0 only, which sends every table and every request for text to the other processes before it
executes it.
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
from levanter.data.tokenizer import EMPTY_PROMPT_NOTE
from levanter.eval.harness.broadcast import send_generation, send_table
from levanter.eval.harness.encoding import HarnessError, Query, QueryEncoder
from levanter.eval.harness.generation import Continuation, GenerationKeys, Generator
from levanter.eval.harness.scoring import QueryScores, Scorer, query_scores
from levanter.runplan import NonFiniteResultError

logger = logging.getLogger(__name__)

Watch = Callable[[str, int], Callable[[int], None]]
"""(kind of request, total tokens) → a function that is called with the number of tokens done."""


@dataclass(kw_only=True)
class RequestLog:
    """Statistics of the requests of a run.

    Attributes:
        requests: number of requests of each kind.
        tokens: tokens that the Programs processed, padding included.
        unshared_tokens: inputs of all queries together, if none were shared.
        seconds: seconds of execution, compilation included.
        truncated: number of queries whose beginning was dropped because they exceed the context.
        digest: hex SHA-256 of all tables and prompts.
        first_ids: the token ids of the first request of each kind.
        lost_texts: task → names of its scored texts that their ids do not keep.
    """

    requests: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    unshared_tokens: int = 0
    seconds: float = 0.0
    truncated: int = 0
    digest: str = ""
    first_ids: dict[str, list[int]] = field(default_factory=dict)
    lost_texts: dict[str, list[str]] = field(default_factory=dict)

    def note(self, kind: str, requests: int, token_ids: Sequence[np.ndarray], digest: str) -> None:
        """Records a list of requests of one kind."""
        self.requests[kind] = self.requests.get(kind, 0) + requests
        # A chain: the digest of a run covers all lists of requests and their order.
        self.digest = hashlib.sha256(f"{self.digest}|{kind}|{digest}".encode()).hexdigest()
        if token_ids:
            self.first_ids.setdefault(kind, token_ids[0].tolist())


class HarnessLM(TemplateLM):
    """A model with lm_eval's interface.

    Args:
        encoder: texts to tokens.
        scorer: the model on its devices; None while requests are only counted.
        generate: generates text; None if no task requests any.
        template: renders conversations; None if the tokenizer has no chat template.
        generation: generation keys for tasks that do not set them.
        stops: task name → stop strings in addition to the task's.
        watch: reports progress.
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
        self.log = RequestLog()

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        # lm_eval requires an id, even of a tokenizer without EOS.
        eos = self.encoder.tokenizer.eos_id
        return self.encoder.prefix if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without a context."""
        return self.encoder.prefix

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of an input."""
        return self.encoder.max_length

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name."""
        return self.encoder.tokenizer.name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the chat template."""
        return self.template.text if self.template is not None and chat_template is not False else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation up to the point where the model continues it."""
        if self.template is None:
            raise HarnessError(
                "eval_harness.apply_chat_template: this model's tokenizer has no chat template\n"
                "  → remove the key, or set tokenizer to one that has a template"
            )
        more = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        text, _ = self.template.render(chat_history, more, "eval_harness")
        # A template closes the last turn, which the model continues here: cut the text after that turn's content.
        if not add_generation_prompt and chat_history:
            last = chat_history[-1]["content"].strip()
            text = text[: text.rindex(last) + len(last)] if last and last in text else text
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """The ids of a text."""
        del kwargs
        return self.encoder.encode([string], bare=add_special_tokens is False)[0].tolist()

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation given its context, and whether it is the greedy continuation."""
        del disable_tqdm
        names = [_request_name(request) for request in requests]
        queries = self.encoder.encode_pairs(context_pairs(requests), names)
        scores = self._answer("loglikelihood", len(requests), queries, names)
        return [(float(a), bool(b)) for a, b in zip(scores.logprobs, scores.is_greedy, strict=True)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text."""
        del disable_tqdm
        windows = [self.encoder.rolling_windows(request.args[0]) for request in requests]
        for request in requests:
            if not self.encoder.keeps(request.args[0]):
                self.log.lost_texts.setdefault(str(request.task_name), []).append(_request_name(request))
        # A text has several windows, and errors name the text of each.
        names = [
            _request_name(request)
            for request, text_windows in zip(requests, windows, strict=True)
            for _ in text_windows
        ]
        scores = self._answer(
            "loglikelihood_rolling", len(requests), [one for text_windows in windows for one in text_windows], names
        )
        # The sum over the windows of a text, whose targets are disjoint.
        ends = np.cumsum([len(text_windows) for text_windows in windows])
        return [float(part.sum()) for part in np.split(scores.logprobs, ends[:-1])]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        del kwargs
        pairs = [(np.asarray(before, np.int32), np.asarray(after, np.int32)) for _, before, after in requests]
        queries = [self.encoder.make_query(*pair) for pair in pairs]
        scores = self._answer("loglikelihood", len(requests), queries, [repr(request[0]) for request in requests])
        return [(float(a), bool(b)) for a, b in zip(scores.logprobs, scores.is_greedy, strict=True)]

    def _answer(self, kind: str, requests: int, queries: Sequence[Query], names: Sequence[str]) -> QueryScores:
        if not queries:
            return QueryScores(logprobs=np.zeros(0), is_greedy=np.zeros(0, bool))
        assert self.scorer is not None, "planning must not execute requests"
        table = self.scorer.table(queries)
        self.log.note(kind, requests, [np.append(query.inputs, query.targets[-1:]) for query in queries], table.digest)
        self.log.truncated += sum(query.truncated > 0 for query in queries)
        self.log.tokens += table.computed_tokens
        self.log.unshared_tokens += table.tokens
        began = time.perf_counter()
        # Before this process executes it: the Programs have collectives, which wait for all processes.
        send_table(table)
        scores = query_scores(table, len(queries), self.scorer.run(table, self.watch(kind, table.computed_tokens)))
        self.log.seconds += time.perf_counter() - began
        # lm_eval would compare NaN with other answers, and count the document as wrong without an error.
        if len(not_finite := scores.not_finite):
            raise NonFiniteResultError(
                f"log-probabilities are not finite: the first is of {names[not_finite[0]]}, of {len(not_finite):,} "
                "such requests"
            )
        return scores

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The generated text for each context, up to the first of its stop strings."""
        del disable_tqdm
        if self.generate is None:
            raise HarnessError(
                f"{_request_name(requests[0])}: the task requests generated text, for which this run has no Programs\n"
                "  → run it with the command `eval_harness`"
            )
        prompts, cut = continuations(requests, self.encoder, self.generation, self.stops)
        self.log.truncated += cut
        token_ids = [prompt.tokens for prompt in prompts]
        digest = hashlib.sha256(b"|".join(ids.astype("<i8").tobytes() for ids in token_ids)).hexdigest()
        self.log.note("generate_until", len(requests), token_ids, digest)
        began = time.perf_counter()
        # The other processes now follow the engine, which broadcasts its own calls.
        send_generation()
        texts = self.generate(prompts)
        self.log.seconds += time.perf_counter() - began
        return [_truncate_at_stop(text, prompt.until) for text, prompt in zip(texts, prompts, strict=True)]


def continuations(
    requests: Sequence[Instance],
    encoder: QueryEncoder,
    generation: Mapping[str, Any],
    stops: Mapping[str, tuple[str, ...]],
) -> tuple[list[Continuation], int]:
    """Prompts for requests of generated text, and the number of prompts whose beginning was dropped.

    Args:
        requests: the requests.
        encoder: texts to tokens.
        generation: generation keys for tasks that do not set them.
        stops: task name → stop strings in addition to the task's.

    Raises:
        HarnessError: lists invalid keys, and generated lengths that leave no tokens for the prompt.
    """
    keys = [
        GenerationKeys.of(
            request.arguments[1], generation, stops.get(str(request.task_name), ()), _request_name(request)
        )
        for request in requests
    ]
    contexts = encoder.encode([request.args[0] for request in requests])
    if not all(map(len, contexts)):
        logger.info("%s", EMPTY_PROMPT_NOTE if encoder.tokenizer.bos_id == encoder.prefix else EOS_PROMPT_NOTE)
    prompts, errors, cut = [], [], 0
    for ids, key, request in zip(contexts, keys, requests, strict=True):
        # The whole generated text must fit after the prompt, so a long prompt loses its beginning (lm_eval's rule).
        max_prompt = encoder.max_length - key.max_tokens
        if max_prompt < 1:
            errors.append(
                f"{_request_name(request)}: max_gen_toks: {key.max_tokens:,} leave no tokens for a prompt in the "
                "context of "
                f"{encoder.max_length:,} tokens (eval_harness.max_length)"
            )
        # An empty context has no token from which the first one could be predicted.
        ids = ids if len(ids) else np.asarray([encoder.prefix], np.int32)
        cut += len(ids) > max_prompt
        prompts.append(
            Continuation(
                tokens=ids[-max(max_prompt, 1) :],
                until=key.until,
                max_tokens=key.max_tokens,
                sampling=key.sampling,
                seed=key.seed,
            )
        )
    if errors:
        more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
        raise HarnessError("\n".join([*errors[:_MAX_ERRORS], *more]))
    return prompts, cut


_MAX_ERRORS = 5
EOS_PROMPT_NOTE = "a prompt without text begins with EOS, since this tokenizer has no BOS"


def context_pairs(requests: Sequence[Instance]) -> list[tuple[str, str]]:
    """The contexts and continuations of requests."""
    return [(str(request.arguments[0]), str(request.arguments[1])) for request in requests]


def _truncate_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first occurrence of each stop string: lm_eval's rule, for engines that return more."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def _request_name(request: Instance) -> str:
    return f"{request.task_name}, document {request.doc_id}"
