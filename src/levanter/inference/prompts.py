"""`PromptReader`: from texts, token ids and conversations to engine requests.

Texts and conversations are tokenized. A request that the model or the cache cannot serve is refused with a list of its
problems. Besides the vocabulary, the tokenizer's files define the chat template, every id that ends a text, and the
special tokens, which a stop string may name.

`parse_constraint` reads the constraint of a request as a `ConstraintSpec`. `json_object`, `json_schema`, `regex` and
`grammar` are fields of this project, `response_format` is OpenAI's. Only their types are checked here;
`inference.constraint` reports an invalid schema, expression or grammar.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from levanter.base.bounded_json import lone_surrogate
from levanter.compat.hf.tokenizer import FastTokenizer
from levanter.config.errors import unknown_names
from levanter.data import Tokenizer
from levanter.data.chat import ChatTemplate, select_template
from levanter.data.tokenizer import EMPTY_PROMPT_NOTE, empty_text_ids
from levanter.inference.constraint import Constraints
from levanter.inference.requests import (
    ConstraintKind,
    ConstraintSpec,
    PromptTooLongError,
    Request,
    SamplingParams,
    merge_stop_ids,
)
from levanter.inference.scheduler import Schedule

logger = logging.getLogger(__name__)

CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = ("json_object", "json_schema", "regex", "grammar")
RESPONSE_FORMAT = "response_format"
CONSTRAINT_FIELDS = (*CONSTRAINT_KINDS, RESPONSE_FORMAT)
"""The fields of a request that constrain its text."""
_TYPES = ("text", "json_object", "json_schema")


def parse_constraint(value: Mapping[str, object], problems: list[str]) -> ConstraintSpec | None:
    """The constraint in the fields of a request; None if they have none.

    Args:
        value: the request's fields.
        problems: problems of the fields are added to this list.
    """
    # Clients send null or false for a field that they do not use.
    kinds: list[str] = [kind for kind in CONSTRAINT_FIELDS if value.get(kind) not in (None, False)]
    if len(kinds) > 1:
        problems.append(f"{' and '.join(kinds)}: a request may have only one of these constraints")
    if len(kinds) != 1:
        return None
    if kinds[0] == RESPONSE_FORMAT:
        return _response_format(value[RESPONSE_FORMAT], problems)
    kind: ConstraintKind = next(name for name in CONSTRAINT_KINDS if name == kinds[0])
    field_value = value[kind]
    if kind == "json_object":
        if field_value is not True:
            problems.append("json_object: expected true or false")
        return ConstraintSpec(kind="json_object")
    if kind == "json_schema":
        return _schema_constraint(field_value, "json_schema", problems)
    if not isinstance(field_value, str) or not field_value:
        problems.append(f"{kind}: expected a string that is not empty")
        return None
    return ConstraintSpec(kind=kind, text=field_value)


def _response_format(response_format: object, problems: list[str]) -> ConstraintSpec | None:
    """OpenAI's `{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}`, or one of the simpler types."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if not isinstance(response_format, dict) or kind not in _TYPES:
        problems.append(f"response_format: expected an object with `type`, one of {', '.join(_TYPES)}")
        return None
    known = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    unknown = unknown_names(response_format.keys() - known, known, "not known")
    problems += [f"response_format.{line}" for line in unknown]
    if kind == "text":
        return None
    if kind == "json_object":
        return ConstraintSpec(kind="json_object")
    inner = response_format.get("json_schema")
    if not isinstance(inner, dict):
        problems.append("response_format.json_schema: expected an object with `schema`")
        return None
    unknown = unknown_names(inner.keys() - _SCHEMA_FIELDS, _SCHEMA_FIELDS, "not known")
    problems += [f"response_format.json_schema.{line}" for line in unknown]
    for name, kind in _SCHEMA_OPTIONS.items():
        if not isinstance(inner.get(name), kind | None):
            expected = "a string" if kind is str else "true or false"
            problems.append(f"response_format.json_schema.{name}: expected {expected}")
    return _schema_constraint(inner.get("schema"), "response_format.json_schema.schema", problems)


_SCHEMA_OPTIONS: Mapping[str, type] = {"name": str, "description": str, "strict": bool}
"""The fields of OpenAI's `json_schema` besides the schema. A text always conforms to its schema, so `strict` has no
effect."""
_SCHEMA_FIELDS = frozenset({"schema", *_SCHEMA_OPTIONS})


def _schema_constraint(schema: object, where: str, problems: list[str]) -> ConstraintSpec | None:
    if not isinstance(schema, dict):
        problems.append(f"{where}: expected an object")
        return None
    try:
        return ConstraintSpec(kind="json_schema", text=json.dumps(schema, allow_nan=False))
    except ValueError:
        problems.append(f"{where}: NaN and infinity are not valid JSON")
        return None


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """A request before its prompt is tokenized.

    Attributes:
        line: its number in the file, from 1.
        id: its id, or the number of its line.
        prompt: a text or ids; None if there are messages.
        messages: a conversation.
        template: further variables of the chat template, such as `tools`.
        params: sampling parameters.
        constraint: a constraint of the text, or None.
    """

    line: int
    id: str
    prompt: str | tuple[int, ...] | None
    messages: tuple[Mapping[str, object], ...] = ()
    template: Mapping[str, object] = field(default_factory=dict[str, object])
    params: SamplingParams
    constraint: ConstraintSpec | None = None


def engine_request(
    prompt: PromptRequest,
    *,
    encode: Callable[[str], Sequence[int]],
    chat: Callable[[Sequence[Mapping[str, object]]], Sequence[int]] | None,
    vocab_size: int,
    model_ends: Sequence[int],
    seed: int,
    special_tokens: Mapping[str, int] | None = None,
) -> Request:
    """Tokenizes a request and checks it for one model.

    Args:
        prompt: the request.
        encode: tokenizes a text, with its special tokens.
        chat: tokenizes a conversation; the template writes its beginning. None for a model without a template.
        vocab_size: number of ids of the model.
        model_ends: ids of the model that end a text.
        seed: seed of the run; a request without a seed gets one that is derived from this and its id.
        special_tokens: ids of the special tokens, by text, which a stop string may name.

    Raises:
        ValueError: lists the problems of the request for this model.
    """
    problems: list[str] = []
    if prompt.prompt is None:
        if chat is None:
            raise ValueError("messages: this model has no chat template; write the text as `prompt`")
        tokens = tuple(int(i) for i in chat(prompt.messages))
    elif isinstance(prompt.prompt, str):
        tokens = tuple(int(i) for i in encode(prompt.prompt))
    else:
        tokens = prompt.prompt
    if not tokens:
        problems.append("prompt: empty, and there is no BOS to begin with; at least one token is required")
    wrong = [n for n, i in enumerate(tokens) if not 0 <= i < vocab_size]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        first = f"prompt[{wrong[0]}]: id {tokens[wrong[0]]}"
        problems.append(f"{first} is not one of the model's {vocab_size} ids (0 to {vocab_size - 1}){more}")
    stop_ids: tuple[int, ...] = ()
    try:
        prompt.params.check_ids(vocab_size)
        stop_ids = merge_stop_ids(prompt.params, model_ends, special_tokens=special_tokens or {})
    except ValueError as error:
        problems.append(str(error))
    if prompt.constraint is not None:
        problems += _constraint_conflicts(prompt.params)
    if problems:
        raise ValueError("\n".join(problems))
    seed_given = prompt.params.seed
    return Request(
        id=prompt.id,
        tokens=tokens,
        params=prompt.params,
        seed=derive_seed(seed, prompt.id) if seed_given is None else seed_given,
        stop_ids=stop_ids,
        constraint=prompt.constraint,
        continued=() if prompt.prompt is None else tokens,
    )


def _constraint_conflicts(params: SamplingParams) -> list[str]:
    """Parameters that contradict a constraint, which determines where a text may end."""
    problems = []
    if params.ignore_eos:
        problems.append("ignore_eos: a constrained text ends where it is complete")
    if params.min_tokens:
        problems.append("min_tokens: a constrained text may be complete before that")
    return problems


def derive_seed(seed: int, id: str) -> int:
    """The seed of a request without one: the same in every run of the same file, including a resumed one."""
    # 63 bits, because a seed is a nonnegative int64. A hash of the id, so that the seed does not depend on other
    # requests.
    digest = hashlib.blake2b(f"{seed} {id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def end_of_text_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a text, according to the tokenizer's files and the model's files beside them."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.end_ids
    return () if tokenizer.eos_id is None else (tokenizer.eos_id,)


@dataclass(frozen=True, kw_only=True)
class PromptRules:
    """How a run reads its prompts.

    Attributes:
        vocab_size: number of ids of the model.
        seed: seed of the run; a request without a seed gets one that is derived from this and its id.
        sampling: default sampling parameters.
        chat_template: a chat template; None for the tokenizer's own.
        enforce_bos: whether a prompt that is a text begins with BOS; None for what the tokenizer's files decide.
        prompt_logprobs: whether there are Programs that score prompts.
        penalties: whether rows count their tokens, which penalties need.
    """

    vocab_size: int
    seed: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str | None = None
    enforce_bos: bool | None = None
    prompt_logprobs: bool = False
    penalties: bool = True


MIN_TEXT_BYTES = 1 << 20
"""Size of a text that is tokenized whatever the context is."""
PART_CHARACTERS = 1 << 16
"""Characters of a text that are tokenized at a time to see whether all of it may fit."""
CUT_TOKENS = 16
"""Tokens by which a cut may lengthen a text."""


class PromptReader:
    """Makes engine requests, for one model and one cache.

    Args:
        tokenizer: the tokenizer of the model.
        schedule: the schedule of the engine, which knows the sizes of the cache.
        rules: the rules of the run.
    """

    def __init__(self, tokenizer: Tokenizer, schedule: Schedule, rules: PromptRules):
        self.tokenizer, self.schedule, self.rules = tokenizer, schedule, rules
        files = tokenizer if isinstance(tokenizer, FastTokenizer) else None
        self.frame = tokenizer.frame.with_bos(tokenizer.bos_id, enforce=rules.enforce_bos)
        self.ends = end_of_text_ids(tokenizer)
        self._special = {} if files is None else files.special_tokens
        self.constraints = None
        if files is not None:
            self.constraints = Constraints(files.definition, vocab_size=rules.vocab_size, ends=self.ends)

    @property
    def defaults(self) -> SamplingParams:
        """The default sampling parameters."""
        return self.rules.sampling

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template; None if the model has none."""
        return select_template(self.tokenizer, self.rules.chat_template)

    def request(self, prompt: PromptRequest, *, shorten: bool = False) -> Request:
        """Makes an engine request.

        Args:
            prompt: the request before tokenization.
            shorten: whether `max_tokens` is lowered to the rest of the context, instead of refusing the request.

        Raises:
            ValueError: lists the problems of the request for this model and this cache.
        """
        request = engine_request(
            prompt,
            encode=self._prompt_ids,
            chat=None if self.template is None else lambda messages: self._chat_ids(messages, prompt.template),
            vocab_size=self.rules.vocab_size,
            model_ends=self.ends,
            seed=self.rules.seed,
            special_tokens=self._special,
        )
        headroom = self.schedule.context - len(request.tokens)
        # Interactive sessions shorten a request to the context; otherwise it is refused.
        if shorten and 0 < headroom < request.new_tokens(self.schedule.context):
            request = replace(request, params=replace(request.params, max_tokens=headroom))
        problems = self._problems(request)
        if problems:
            raise ValueError("\n".join(problems))
        if request.constraint is not None:
            assert self.constraints is not None
            # Compiled here, because all texts wait for the thread of the engine.
            request = replace(request, compiled=self.constraints.start(request.constraint))
        # A request for no tokens is only scored: it needs no pages of the cache, but has to fit a Program that scores.
        if request.params.max_tokens != 0:
            self.schedule.check(request)
        elif len(request.tokens) > self.schedule.context:
            raise PromptTooLongError(
                f"a prompt of {len(request.tokens)} tokens is more than the context of {self.schedule.context} tokens"
            )
        return request

    def _problems(self, request: Request) -> list[str]:
        params, problems = request.params, []
        if params.echo and params.logprobs is not None and not self.rules.prompt_logprobs:
            problems.append("echo with logprobs: needs Programs that score prompts (inference.prompt_logprobs: true)")
        if request.constraint is not None and self.constraints is None:
            problems.append(f"{request.constraint.kind}: a constraint needs a tokenizer, and this model has none")
        if params.counts_tokens and not self.rules.penalties:
            problems.append("presence_penalty, frequency_penalty, repetition_penalty: inference.penalties is false")
        return problems

    def encode(self, text: str) -> list[int]:
        """The ids of a text.

        Raises:
            ValueError: the string is not valid Unicode text.
        """
        if (at := lone_surrogate(text)) is not None:
            raise ValueError(f"character {at} is half of a surrogate pair, or was not UTF-8: not valid Unicode text")
        return self.tokenizer.encode_batch([text])[0].tolist()

    def encode_with_special_tokens(self, text: str) -> list[int]:
        """The ids of a text with the special tokens of the tokenizer's files; `enforce_bos` decides about BOS."""
        return self.frame.around(self.encode(text))

    def conversation(
        self, messages: Sequence[Mapping[str, object]], more: Mapping[str, object] | None = None
    ) -> list[int]:
        """The ids of a conversation as the template writes it, up to the beginning of the assistant's message.

        Args:
            messages: the conversation.
            more: further variables of the template, such as `tools`.

        Raises:
            ValueError: the template refuses the conversation, or there is no template.
        """
        return self.encode(self._render(messages, more))

    def _render(self, messages: Sequence[Mapping[str, object]], more: Mapping[str, object] | None) -> str:
        if self.template is None:
            raise ValueError("messages: this model has no chat template; write the text as `prompt`")
        text, _ = self.template.render(messages, {"add_generation_prompt": True, **(more or {})}, "messages")
        if len(text) > self.max_text_bytes:
            message = f"messages: their text has more than {self.max_text_bytes:,} characters, the limit"
            raise PromptTooLongError(message)
        return text

    def _prompt_ids(self, text: str) -> Sequence[int]:
        self._check_length(text)
        ids = self.encode_with_special_tokens(text)
        # An explicit key decides: without BOS there is nothing to begin with.
        if ids or self.rules.enforce_bos is False:
            return ids
        return self._empty_text_ids

    @cached_property
    def _empty_text_ids(self) -> tuple[int, ...]:
        ids = empty_text_ids(self.tokenizer, self.frame)
        if ids:
            # Logged once: a server may have thousands of such prompts.
            logger.info("%s", EMPTY_PROMPT_NOTE)
        return ids

    def _chat_ids(self, messages: Sequence[Mapping[str, object]], more: Mapping[str, object]) -> list[int]:
        text = self._render(messages, more)
        self._check_length(text)
        return self.encode(text)

    @cached_property
    def max_text_bytes(self) -> int:
        """Largest size of a text that is tokenized; a longer one is refused unread.

        No text that fits into the context is longer, unless the tokenizer removes a part of it.
        """
        longest = int(self.tokenizer.byte_lengths().max(initial=1))
        return max(MIN_TEXT_BYTES, self.schedule.context * longest)

    def _check_length(self, text: str) -> None:
        """Refuses a text that has far more tokens than the context, in time that the context bounds.

        The parts of a long text are tokenized one after another, until they have too many tokens. Cutting the text may
        add tokens (a word becomes two), which `CUT_TOKENS` allows for; so what passes is not sure to fit.

        Raises:
            PromptTooLongError: it has.
        """
        context = self.schedule.context
        if len(text) > self.max_text_bytes:
            raise PromptTooLongError(
                f"a text of {len(text):,} characters is more than the context of {context} tokens has room for"
            )
        if len(text) <= PART_CHARACTERS:
            return
        tokens = 0
        for start in range(0, len(text), PART_CHARACTERS):
            tokens += len(self.encode(text[start : start + PART_CHARACTERS])) - CUT_TOKENS
            if tokens > context:
                raise PromptTooLongError(
                    f"a prompt of more than {tokens} tokens is more than the context of {context} tokens"
                )
