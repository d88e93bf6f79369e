"""`Request`: a prompt and how it is continued; `Event`: what happens to one of its choices.

Neither knows of text: prompts come as tokens, tokens go out as ids, and `inference.text` makes text of them.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from levanter.inference.params import SamplingParams

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
"""Why a choice ended well: an end of text or a stop string, `max_tokens` or the context, or its client left."""
MASK_BITS = 32
"""Ids in a word of a mask of ids that may come next."""
ConstraintKind: TypeAlias = Literal["json_object", "json_schema", "regex", "grammar"]


class ChoiceId(NamedTuple):
    """Which choice of which request."""

    request: str
    choice: int

    def __str__(self) -> str:
        return f"{self.request}[{self.choice}]"


@dataclass(frozen=True, kw_only=True)
class ConstraintSpec:
    """What a text has to conform to.

    Attributes:
        kind: what `text` is; it is empty for `json_object`.
        text: a JSON schema, a regular expression, or a grammar in Lark's notation.
    """

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody asks for.

    Attributes:
        id: unique among the requests of a run.
        tokens: the prompt, at least one token.
        params: how its choices are sampled.
        seed: of their noise: that of `params`, or a fresh one.
        stop_ids: the ids that end a choice, the model's own included; see `params.stop_ids_of`.
        constraint: what the text has to conform to; None for nothing.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    constraint: ConstraintSpec | None = None

    def new_tokens(self, context: int) -> int:
        """How many tokens a choice may have in a context of so many."""
        return context - len(self.tokens) if self.params.max_tokens is None else self.params.max_tokens


@dataclass(frozen=True, kw_only=True)
class Token:
    """A choice has one more token.

    Attributes:
        of: the choice.
        id: the token.
        logprob: of the model's own distribution; None if nobody asked.
        top: ids and log-probabilities of the likeliest tokens, the likeliest first, as many as asked for.
    """

    of: ChoiceId
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A choice has ended.

    Attributes:
        of: the choice.
        reason: why.
        matched: the stop string or the id that ended it, where one did.
    """

    of: ChoiceId
    reason: FinishReason
    matched: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A choice cannot go on, and no other is concerned.

    Attributes:
        of: the choice.
        error: what happened, for whoever asked.
    """

    of: ChoiceId
    error: str


Event: TypeAlias = Token | Finished | Failed
