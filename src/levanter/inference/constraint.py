"""Constrained text (JSON, a JSON schema, a regular expression, a grammar), as masks of the next token.

llguidance follows a text through a grammar and returns which tokens may come next, a bit for each. It is an optional
dependency (`pip install 'levanter-fork[constraint]'`) that only this file imports. A mask is made on the host for each
token, so a constrained row gets one token per decode call.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from levanter.inference.exclusive_branches import ADVICE, coerce_exclusive_branches
from levanter.inference.requests import MASK_BITS, ConstraintKind, ConstraintSpec

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

    def load_vocabulary(self) -> None:
        """Reads the vocabulary now, if llguidance is installed and can: the first constrained text waits for less."""
        with contextlib.suppress(ConstraintError):
            assert self._tokenizer is not None

    def start(self, spec: ConstraintSpec) -> "Constraint":
        """Starts a text that has to meet a constraint; the mask of its first token is computed here.

        This may take some hundred milliseconds, in which other threads run. `Constraint.copy` of the result is cheap.

        Raises:
            ConstraintError: names the error in the schema, the expression or the grammar; or it is too complex, or no
                text conforms to it.
        """
        _check_size(spec)
        llguidance = _llguidance()
        matcher = llguidance.LLMatcher
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
        limits = llguidance.LLParserLimits(**LIMITS)
        started = matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if started.is_error():
            raise ConstraintError(f"{spec.kind}: {_one_line(started.get_error())}")
        constraint = Constraint(started, spec, self.words)
        # Some grammars fail only when they are used: where nothing conforms, or where a part of them is too large. A
        # token is tried too, because the second state of a lexer may be the first that is too large.
        ids = [i for i in ids_in(constraint.mask()) if i not in self._ends]
        if not ids and not constraint.complete:
            raise ConstraintError(f"{spec.kind}: no text conforms to it")
        if ids:
            trial = constraint.copy()
            trial.accept(ids[0])
            assert trial.mask() is not None
        return constraint


def ids_in(mask: np.ndarray) -> list[int]:
    """The ids that a mask allows, in order."""
    return np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")).tolist()


def _check_size(spec: ConstraintSpec) -> None:
    """Refuses a constraint whose compilation would take seconds."""
    most = MAX_CHARACTERS.get(spec.kind)
    if most is not None and len(spec.text) > most:
        raise ConstraintError(f"{spec.kind}: at most {most:,} characters, got {len(spec.text):,}")
    if spec.kind == "json_schema" and (count := _most_properties(json.loads(spec.text))) > MAX_PROPERTIES:
        raise ConstraintError(f"{spec.kind}: an object may have at most {MAX_PROPERTIES} properties, got {count:,}")


def _most_properties(schema: object) -> int:
    """The number of properties of the object in a schema that has most."""
    most, rest = 0, [schema]
    # A stack instead of recursion: schemas may be deep.
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            properties = part.get("properties")
            most = max(most, len(properties) if isinstance(properties, dict) else 0)
            rest += part.values()
        elif isinstance(part, list):
            rest += part
    return most


MAX_CHARACTERS: Mapping[ConstraintKind, int] = {"json_schema": 1 << 18, "regex": 1 << 13, "grammar": 1 << 16}
"""Largest size of a constraint. Compiling takes time that grows with it, or faster."""
MAX_PROPERTIES = 500
"""Properties of one object in a schema: their order is free, which takes time with their square. llguidance follows no
more than about as many."""
LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 60_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    # An error would contain the state of the parser.
    "verbose_errors": False,
}
"""Limits of llguidance. A mask is computed while all other texts wait: at its default limits, a lexer may take 14 ms
for one, and `(a{1000}){1000}` took 2 s."""
MASK_SECONDS = 0.05
"""Processor time for a mask, after which a text is given up. Usual masks take a tenth of a millisecond, and some take a
few."""


class Constraint:
    """The state of one text in its grammar; made by `Constraints.start`."""

    def __init__(self, matcher: "LLMatcher", spec: ConstraintSpec, words: int, *, mask: np.ndarray | None = None):
        self._matcher, self.spec, self._words, self._mask = matcher, spec, words, mask
        self._tokens = 0

    @property
    def complete(self) -> bool:
        """Whether the text conforms as it is, so that it may end here."""
        return self._matcher.is_accepting()

    def copy(self) -> "Constraint":
        """Another text in the same state; what was computed for this one is shared."""
        return Constraint(self._matcher.deep_copy(), self.spec, self._words, mask=self._mask)

    def mask(self) -> np.ndarray:
        """The ids that may come next, uint32 `[words]`, a bit each, lowest first.

        Raises:
            ConstraintError: no continuation conforms, or a limit of llguidance or of time is exceeded.
        """
        if self._mask is None:
            self._mask = self._compute_mask()
        return self._mask

    def _compute_mask(self) -> np.ndarray:
        began = time.thread_time()
        # The mask of llguidance may be longer (padded) or shorter than the model's vocabulary.
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.dtype("<u4")).astype(np.uint32)
        self._check()
        # The first mask is computed when the request is read, where it may take longer.
        if self._tokens and time.thread_time() - began > MASK_SECONDS:
            raise ConstraintError(f"{self.spec.kind}: too complex: a token takes more than {MASK_SECONDS * 1e3:g} ms")
        mask = np.zeros(self._words, np.uint32)
        mask[: len(bits)] = bits[: self._words]
        return mask

    def accept(self, id: int) -> None:
        """Advances the text by one token.

        Raises:
            ConstraintError: the token was not allowed.
        """
        self._mask = None
        self._tokens += 1
        if not self._matcher.consume_token(id):
            # A limit of llguidance has its own message; otherwise the token itself is at fault.
            self._check()
            raise ConstraintError(f"{self.spec.kind}: token {id} is not allowed here")

    def _check(self) -> None:
        if self._matcher.is_error():
            # The name of a state of llguidance's parser: what follows conforms to nothing.
            error = self._matcher.get_error()
            dead = error.startswith("NoExtension")
            raise ConstraintError(f"{self.spec.kind}: {'no text conforms to it' if dead else _one_line(error)}")


def _llguidance():
    try:
        import llguidance
    except ImportError as error:
        raise ConstraintError(
            "JSON, regular expressions and grammars need llguidance: pip install 'levanter-fork[constraint]'"
        ) from error
    return llguidance


def _one_line(text: str) -> str:
    """A message of llguidance on one line."""
    # It names an option of the library, which no request can set.
    if "coerce_one_of" in text and "oneOf" in text:
        return ADVICE
    words = " ".join(text.replace("<non-verbose/>", "").split())
    return "not understood" if not words else words if len(words) <= 300 else f"{words[:299]}…"
