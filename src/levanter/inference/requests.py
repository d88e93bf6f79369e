"""`Request`: a tokenized prompt with `SamplingParams`; `Event`: a new token or the end of one of its choices.

`SamplingParams` is the same value for a block of YAML, a line of JSONL and the body of an HTTP request. It is validated
once, in its constructor, and the error lists every problem. Names and defaults are OpenAI's where OpenAI has the
parameter; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos` and `stop_token_ids` are those of vLLM.

Nothing here is text: `inference.prompts` tokenizes prompts, and `inference.detokenizer` makes text of tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np

from levanter.base.bounded_json import lone_surrogate
from levanter.config.errors import unknown_names
from levanter.config.validators import (
    LARGEST_INT32,
    LARGEST_INT64,
    Count,
    Fraction,
    PositiveFraction,
    Range,
    Ranged,
)

MAX_TOP_LOGPROBS = 20
"""Largest value of `logprobs`: the most likely tokens that are returned for each token."""
MAX_BIASES = 300
"""Largest number of ids in `logit_bias`; OpenAI's limit."""
MAX_STOP_IDS = 64
"""Ids that end a choice, the model's own end of text included."""
LEAST_TEMPERATURE = 1e-6
"""Smallest temperature other than 0: below it noise is smaller than the rounding of logits, and division by it may
overflow."""
MAX_STOPS = 64
"""Largest number of stop strings of a request."""
MAX_STOP_CHARACTERS = 1024
"""Largest length of a stop string. Text that may be its beginning is kept back, so a long one delays a stream."""

Temperature: TypeAlias = Annotated[float, Range(0, 100)]
TopK: TypeAlias = Annotated[int, Range(0, LARGEST_INT32, also=(-1,))]
SampleSeed: TypeAlias = Annotated[int, Range(0, LARGEST_INT64)]
Bias: TypeAlias = Annotated[float, Range(-100, 100)]
Penalty: TypeAlias = Annotated[float, Range(-2, 2)]
RepetitionPenalty: TypeAlias = Annotated[float, Range(0.01, 100)]
Choices: TypeAlias = Annotated[int, Range(1, 128)]
TopLogprobs: TypeAlias = Annotated[int, Range(0, MAX_TOP_LOGPROBS)]
TokenId: TypeAlias = Annotated[int, Range(0, LARGEST_INT32)]

NEVER: Mapping[str, str] = {
    "best_of": "sample `n` choices with `logprobs` and choose among them",
    "use_beam_search": "sample `n` choices with `logprobs` and choose among them",
    "num_beams": "sample `n` choices with `logprobs` and choose among them",
    "beam_width": "sample `n` choices with `logprobs` and choose among them",
    "length_penalty": "it belongs to beam search",
    "early_stopping": "it belongs to beam search",
    "suffix": "models here continue a text, they do not fill a gap in one",
}
"""Parameters of other servers that are refused, and what to do instead."""


class PromptTooLongError(ValueError):
    """A prompt, or a prompt and the tokens that should follow it, for which the model or its cache has no room."""


class ParamsError(ValueError):
    """Parameters of a request that cannot be used; the message lists all of them."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(problems))


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Ranged):
    """How a request's tokens are chosen.

    The distribution that is sampled: the model's logits, changed by `logit_bias` and the penalties, divided by the
    temperature; of it the `top_k` likeliest tokens, of those the fewest that hold `top_p` of their probability, and of
    all of them only those with `min_p` of the likeliest one's. Tokens as likely as the last one kept are kept too.

    Attributes:
        temperature: sampling temperature; 0 selects the most likely token (the lowest id on ties).
        top_k: number of most likely tokens that may be sampled; 0 or -1 for all.
        top_p: nucleus sampling: smallest total probability of the tokens that may be sampled.
        min_p: smallest probability of a sampled token, relative to the most likely token's.
        seed: seed of the sampling noise.
        logit_bias: token id → value added to its logit; ±100 practically forces or forbids a token.
        presence_penalty: subtracted from the logit of every token that was already generated.
        frequency_penalty: subtracted from a token's logit once for each time that it was generated.
        repetition_penalty: the logits of tokens in the prompt or the generated text are divided by it if positive and
            multiplied by it if negative.
        n: number of choices, each sampled with its own noise.
        min_tokens: number of tokens before which only `max_tokens` can end a choice.
        max_tokens: largest number of tokens of a choice; None for as many as fit in the context.
        ignore_eos: treats the model's end-of-text token as an ordinary token.
        stop: strings that end the text; they are not included in it.
        stop_token_ids: tokens that end the text, in addition to the model's own.
        logprobs: number of most likely tokens that are returned at each position, in addition to the log-probability of
            the sampled token; None for no log-probabilities. All are those of the model's own distribution: before
            bias, penalties and temperature.
        echo: includes the prompt in the response, with log-probabilities if `logprobs` is set.
    """

    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: PositiveFraction = 1.0
    min_p: Fraction = 0.0
    seed: SampleSeed | None = None
    logit_bias: Mapping[int, Bias] = field(default_factory=dict)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    n: Choices = 1
    min_tokens: Count = 0
    max_tokens: Count | None = 16
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    logprobs: TopLogprobs | None = None
    echo: bool = False

    def __post_init__(self) -> None:
        problems = []
        try:
            super().__post_init__()
        except ValueError as error:
            # Ranges and relations are both checked before an error is raised, so that a client learns of all problems
            # at once.
            problems += str(error).splitlines()
        problems += self._relations()
        if problems:
            raise ParamsError(problems)

    def _relations(self) -> list[str]:
        problems = []
        if 0 < self.temperature < LEAST_TEMPERATURE:
            message = f"must be 0, which takes the likeliest token, or at least {LEAST_TEMPERATURE}"
            problems.append(f"temperature: {message}, got {self.temperature}")
        if self.max_tokens == 0 and not self.echo:
            problems.append("max_tokens: must be positive, got 0 (0 is for `echo`, which scores the prompt)")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens: {self.min_tokens} is more than max_tokens {self.max_tokens}")
        for name, most in (("logit_bias", MAX_BIASES), ("stop_token_ids", MAX_STOP_IDS), ("stop", MAX_STOPS)):
            if (count := len(getattr(self, name))) > most:
                problems.append(f"{name}: at most {most} entries, got {count}")
        # More than these are a problem already.
        for i, stop in enumerate(self.stop[:MAX_STOPS]):
            if not stop:
                problems.append(f"stop[{i}]: an empty string would end every text at its beginning")
            elif len(stop) > MAX_STOP_CHARACTERS:
                problems.append(f"stop[{i}]: at most {MAX_STOP_CHARACTERS} characters, got {len(stop)}")
            elif (at := lone_surrogate(stop)) is not None:
                problems.append(f"stop[{i}]: character {at} is half of a surrogate pair, which no text has")
        return problems

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature == 0

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty needs to know how often each token occurred."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def check_ids(self, vocab_size: int) -> None:
        """Checks that the named ids exist in a model.

        Raises:
            ParamsError: some are not among its `vocab_size` ids.
        """
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}
        problems = [
            f"{name}: id {one} is not one of the model's {vocab_size} ids (0 to {vocab_size - 1})"
            for name, ids in named.items()
            for one in ids
            if not 0 <= one < vocab_size
        ]
        if problems:
            raise ParamsError(problems)


def parse_params(fields: Mapping[str, object], *, ignore: Set[str] = frozenset()) -> SamplingParams:
    """The parameters in the fields of a JSON object.

    `null` stands for the default, a single stop string for a list of one, and keys of `logit_bias` are ids as strings,
    as JSON requires.

    Args:
        fields: name → JSON value.
        ignore: names of fields that are not parameters and are skipped.

    Raises:
        ParamsError: lists every field that is unknown, refused, of another type or out of range.
    """
    unknown = fields.keys() - PARAMETERS - ignore
    problems = unknown_names(unknown, {*_READERS, *ignore}, "not a parameter") if unknown else []
    values = {}
    for name, value in fields.items():
        if name in ignore or name in unknown:
            continue
        if name in NEVER:
            if not _is_neutral(name, value, fields):
                problems.append(f"{name}: refused; {NEVER[name]}")
        elif value is not None:
            try:
                read = _READERS[name](value)
            except _UnreadableError as error:
                problems.append(f"{name}{error}")
                continue
            values[name] = read
    try:
        params = SamplingParams(**values)
    except ParamsError as error:
        problems += error.problems
        params = None
    if problems or params is None:
        raise ParamsError(problems)
    return params


def params_to_json(params: SamplingParams) -> dict[str, object]:
    """Parameters as the fields of a JSON object, which `parse_params` reads."""
    values: dict[str, object] = asdict(params)
    values["logit_bias"] = {str(id): bias for id, bias in params.logit_bias.items()}
    return values


def _is_neutral(name: str, value: object, fields: Mapping[str, object]) -> bool:
    """Whether a refused parameter has a value that changes nothing, which some clients always send."""
    if value is None or value is False:
        return True
    if name == "best_of":
        # Choosing the best n of n is no choice. `True == 1` in Python, so booleans are excluded.
        return value == (fields.get("n") or 1) and not isinstance(value, bool)
    if name == "suffix":
        return value == ""
    return name in ("num_beams", "beam_width") and value == 1 and not isinstance(value, bool)


def merge_stop_ids(
    params: SamplingParams, model_ends: Sequence[int], *, special_tokens: Mapping[str, int] | None = None
) -> tuple[int, ...]:
    """The ids that end a row, each once.

    Args:
        params: of the request.
        model_ends: the model's own ends of text.
        special_tokens: ids of the special tokens, by text: a stop string that is one of them ends a row at its id,
            because special tokens have no text in which it could be found.

    Raises:
        ValueError: there are more than a row has room for.
    """
    ends = () if params.ignore_eos else tuple(model_ends)
    named = [special_tokens[stop] for stop in params.stop if stop in special_tokens] if special_tokens else []
    # `dict.fromkeys` removes duplicates and keeps the order.
    ids = tuple(dict.fromkeys((*ends, *params.stop_token_ids, *named)))
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids: {len(params.stop_token_ids) + len(named)} ids and the model's own {len(ends)} ends of "
            f"text are more than {MAX_STOP_IDS}"
        )
    return ids


class _UnreadableError(ValueError):
    """A JSON value of the wrong type; the message begins with the position in the value."""


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _UnreadableError(f": expected a number, got {_format_value(value)}")
    # Beyond 2⁵³ a float cannot represent every integer, and conversion may overflow.
    if isinstance(value, int) and abs(value) > 2**53:
        raise _UnreadableError(f": must be a finite number, got one of {value.bit_length()} bits")
    return float(value)


def _integer(value: object) -> int:
    # JSON does not distinguish 1 from 1.0, and some clients write every number with a point.
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value) and abs(value) <= 2**53
    if isinstance(value, bool) or not (isinstance(value, int) or whole):
        raise _UnreadableError(f": expected a whole number, got {_format_value(value)}")
    assert isinstance(value, (int, float))
    return int(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _UnreadableError(f": expected true or false, got {_format_value(value)}")
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        raise _UnreadableError(f": expected a string or a list of strings, got {_format_value(value)}")
    for i, one in enumerate(stops):
        if not isinstance(one, str):
            raise _UnreadableError(f"[{i}]: expected a string, got {_format_value(one)}")
    return tuple(stops)


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise _UnreadableError(f": expected a list of ids, got {_format_value(value)}")
    ids = []
    for i, one in enumerate(value):
        try:
            ids.append(_integer(one))
        except _UnreadableError:
            raise _UnreadableError(f"[{i}]: expected an id, got {_format_value(one)}") from None
    return tuple(ids)


def _biases(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise _UnreadableError(f": expected an object from id to bias, got {_format_value(value)}")
    if len(value) > MAX_BIASES:
        raise _UnreadableError(f": at most {MAX_BIASES} entries, got {len(value)}")
    biases = {}
    for key, bias in value.items():
        text = str(key)
        # Keys of JSON objects are strings; YAML has integers.
        if isinstance(key, bool) or not (text.isascii() and text.isdigit()) or len(text) > 10:
            raise _UnreadableError(f'[{_format_value(key)}]: expected an id, such as "50256"')
        if int(text) in biases:
            raise _UnreadableError(f"[{_format_value(key)}]: names id {int(text)} a second time")
        try:
            biases[int(text)] = _number(bias)
        except _UnreadableError as error:
            raise _UnreadableError(f"[{_format_value(key)}]{error}") from None
    return biases


def _format_value(value: object) -> str:
    """A value in a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


_READERS: Mapping[str, Callable[[object], object]] = {
    "logit_bias": _biases,
    "stop": _stops,
    "stop_token_ids": _ids,
    **dict.fromkeys(("ignore_eos", "echo"), _flag),
    **dict.fromkeys(("top_k", "seed", "n", "min_tokens", "max_tokens", "logprobs"), _integer),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), _number
    ),
}
PARAMETERS = frozenset({*_READERS, *NEVER})
"""The names of parameters, those that are refused included."""


FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""Why a choice ended without an error: a stop id or stop string, `max_tokens` or the context, or cancellation."""
MASK_BITS = 32
"""Bits of a word of a mask, one per id."""
ConstraintKind: TypeAlias = Literal["json_object", "json_schema", "regex", "grammar"]


class ChoiceId(NamedTuple):
    """A choice of a request: the request's id and the choice's index."""

    request: str
    choice: int

    def __str__(self) -> str:
        return f"{self.request}[{self.choice}]"


@dataclass(frozen=True, kw_only=True)
class ConstraintSpec:
    """A constraint of a text.

    Attributes:
        kind: what `text` is; it is empty for `json_object`.
        text: a JSON schema, a regular expression, or a grammar in Lark's notation.
    """

    kind: ConstraintKind
    text: str = ""


class TextConstraint(Protocol):
    """A constraint that was compiled; `inference.constraint.Constraint`."""

    def copy(self) -> "TextConstraint":
        """The same constraint for another text."""
        ...

    def mask(self) -> np.ndarray:
        """The ids that may come next, uint32 `[words]`, a bit each, lowest first."""
        ...

    def accept(self, id: int) -> None:
        """Advances the text by one token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for the engine.

    Attributes:
        id: unique among the requests of a run.
        tokens: the prompt, at least one token.
        params: sampling parameters of its choices.
        seed: seed of their noise: that of `params`, or a derived or random one.
        stop_ids: the ids that end a choice, the model's own included; see `merge_stop_ids`.
        constraint: a constraint of the text, or None.
        compiled: the constraint, compiled; None where the engine has to compile it. Each choice gets a copy.
        client: who it is from, from the outermost group inwards (an address, a call of it). Rows are shared evenly
            among groups, and within a group among those inside it. Requests of one client are served in order.
        continued: the ids whose text the choices continue: those of a prompt that is a text, and none of a
            conversation, whose answer begins a text.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    constraint: ConstraintSpec | None = None
    compiled: TextConstraint | None = field(default=None, compare=False, repr=False)
    client: tuple[str, ...] = ()
    continued: tuple[int, ...] = ()

    def new_tokens(self, context: int) -> int:
        """Maximum number of tokens of a choice, for this context length."""
        return context - len(self.tokens) if self.params.max_tokens is None else self.params.max_tokens


@dataclass(frozen=True, kw_only=True)
class Token:
    """A choice has one more token.

    Attributes:
        of: the choice.
        id: the token.
        logprob: log-probability in the model's own distribution; None if it was not requested.
        top: ids and log-probabilities of the likeliest tokens, the likeliest first, as many as requested.
        policy_logprob: log-probability at the temperature of the request; None if the Programs do not compute it.
    """

    of: ChoiceId
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    policy_logprob: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A choice has ended.

    Attributes:
        of: the choice.
        reason: why it ended.
        matched: the stop string or the id that ended it; None if neither did.
    """

    of: ChoiceId
    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A choice failed; other choices are not affected.

    Attributes:
        of: the choice.
        error: the error message for the client.
        is_invalid: whether the request is at fault, by its constraint.
    """

    of: ChoiceId
    error: str
    is_invalid: bool = field(default=False, compare=False)


Event: TypeAlias = Token | Finished | Failed
