"""Constrained text (JSON, a JSON schema, a regular expression, a grammar), as masks of the next token.

llguidance follows a text through a grammar and returns which tokens may come next, a bit for each. It is an optional
dependency (`pip install 'levanter[constraint]'`) that only this file imports. A mask is made on the host for each
token, so a constrained row gets one token per decode call.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from levanter.inference.exclusive_branches import ADVICE, coerce_exclusive_branches
from levanter.inference.requests import MASK_BITS, ConstraintSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class ConstraintError(ValueError):
    """A constraint that cannot be used: it is invalid or too large, or llguidance is not installed."""


class Constraints:
    """Makes constraints for the texts of one model.

    Args:
        definition: the content of `tokenizer.json`.
        vocab_size: number of ids of the model.
        ends: ids that end a text; they are allowed where the text is complete.
    """

    def __init__(self, definition: Mapping[str, Any], *, vocab_size: int, ends: Sequence[int]):
        self._definition, self._ends = definition, list(ends)
        self.vocab_size = vocab_size

    @property
    def words(self) -> int:
        """Number of 32-bit words of a mask."""
        return -(-self.vocab_size // MASK_BITS)

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        """The vocabulary for llguidance; making it takes about a second for 50,000 ids."""
        llguidance = _llguidance()
        if not self._ends:
            raise ConstraintError("a text cannot be constrained: the model has no end-of-text token")
        try:
            # The vocabulary of the model may be larger than that of the tokenizer: masks have a bit for each id of the
            # model.
            return llguidance.LLTokenizer(json.dumps(self._definition), n_vocab=self.vocab_size, eos_token=self._ends)
        except (ValueError, TypeError) as error:
            raise ConstraintError(f"llguidance cannot read this tokenizer ({_one_line(str(error))})") from error

    def start(self, spec: ConstraintSpec) -> "Constraint":
        """Starts a text that has to meet a constraint.

        Raises:
            ConstraintError: names the error in the schema, the expression or the grammar.
        """
        matcher = _llguidance().LLMatcher
        try:
            if spec.kind == "json_object":
                grammar = matcher.grammar_from_json_schema({"type": "object"})
            elif spec.kind == "json_schema":
                grammar = matcher.grammar_from_json_schema(coerce_exclusive_branches(spec.text))
            elif spec.kind == "regex":
                grammar = matcher.grammar_from_regex(spec.text)
            else:
                grammar = matcher.grammar_from_lark(spec.text)
        except ValueError as error:
            raise ConstraintError(f"{spec.kind}: {_one_line(str(error))}") from error
        # llguidance reports errors of a grammar as a state of the matcher, not as an exception.
        started = matcher(self._tokenizer, grammar, log_level=0)
        if started.is_error():
            raise ConstraintError(f"{spec.kind}: {_one_line(started.get_error())}")
        return Constraint(started, spec, self.words)


class Constraint:
    """The state of one text in its grammar; made by `Constraints.start`."""

    def __init__(self, matcher: "LLMatcher", spec: ConstraintSpec, words: int):
        self._matcher, self.spec, self._words = matcher, spec, words

    @property
    def complete(self) -> bool:
        """Whether the text conforms as it is, so that it may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> np.ndarray:
        """The ids that may come next, uint32 `[words]`, a bit each, lowest first.

        Raises:
            ConstraintError: no continuation conforms, or a limit of llguidance is exceeded.
        """
        # The mask of llguidance may be longer (padded) or shorter than the model's vocabulary.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.dtype("<u4")).astype(np.uint32)
        self._check()
        mask = np.zeros(self._words, np.uint32)
        mask[: len(bits)] = bits[: self._words]
        return mask

    def accept(self, id: int) -> None:
        """Advances the text by one token.

        Raises:
            ConstraintError: the token was not allowed.
        """
        if not self._matcher.consume_token(id):
            # A limit of llguidance has its own message; otherwise the token itself is at fault.
            self._check()
            raise ConstraintError(f"{self.spec.kind}: token {id} is not allowed here")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"{self.spec.kind}: {_one_line(self._matcher.get_error())}")


def _llguidance():
    try:
        import llguidance
    except ImportError as error:
        raise ConstraintError(
            "JSON, regular expressions and grammars need llguidance: pip install 'levanter[constraint]'"
        ) from error
    return llguidance


def _one_line(text: str) -> str:
    """A message of llguidance on one line."""
    # It names an option of the library, which no request can set.
    if "coerce_one_of" in text and "oneOf" in text:
        return ADVICE
    words = " ".join(text.split())
    return "not understood" if not words else words if len(words) <= 300 else f"{words[:299]}…"
