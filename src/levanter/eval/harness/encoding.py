"""Texts to tokens by lm_eval's rules: the model's inputs, and which tokens are scored.

A *query* is a sequence of tokens whose last ones are scored. For `loglikelihood` it is a context and a continuation,
encoded together, so that a token may span their border; spaces at the end of the context are moved to the continuation.
The special tokens that the tokenizer's files put around a text are added, unless it begins with BOS. An empty context
is BOS, or EOS if the tokenizer has no BOS. A query that is longer than the model's context loses its beginning.

For `loglikelihood_rolling` a text is split into windows with disjoint targets; the last window is extended backwards to
the full context.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from levanter.data import Tokenizer
from levanter.data.tokenizer import TextFrame


class HarnessError(ValueError):
    """A task has invalid requests; the message names the task and the reason."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A sequence whose end is scored.

    Attributes:
        inputs: int32, the model's inputs: all tokens but the last.
        targets: int32, the scored tokens; the last one follows `inputs`.
        truncated: number of tokens that were dropped from the beginning because they exceed the context.
    """

    inputs: np.ndarray
    targets: np.ndarray
    truncated: int = 0

    @property
    def target_positions(self) -> np.ndarray:
        """The positions of `inputs` that predict the targets."""
        return np.arange(len(self.inputs) - len(self.targets), len(self.inputs), dtype=np.int32)


@dataclass(frozen=True)
class QueryEncoder:
    """Builds queries from texts.

    Attributes:
        tokenizer: the model's.
        frame: the special tokens that the tokenizer puts around a text.
        max_length: maximum number of tokens of an input.
    """

    tokenizer: Tokenizer
    frame: TextFrame
    max_length: int

    @cached_property
    def prefix(self) -> int:
        """The token before a text without a context: BOS, or EOS if the tokenizer has no BOS."""
        token = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        if token is None:
            raise HarnessError(
                f"{self.tokenizer.name}: the tokenizer has neither BOS nor EOS, one of which must precede a text "
                "that is scored from its first token\n  → tokenizer: one with BOS or EOS"
            )
        return token

    @cached_property
    def _prefix_text(self) -> str:
        return self.tokenizer.decode([self.prefix])

    def encode(self, texts: Sequence[str], *, bare: bool = False) -> list[np.ndarray]:
        """The tokenizer's ids of texts.

        Args:
            texts: the texts.
            bare: whether special tokens are omitted.
        """
        ids = self.tokenizer.encode_batch(texts)
        if bare or self.frame == TextFrame():
            return ids
        # A chat template may write BOS itself; a second one would change every score.
        return [
            text_ids if text.startswith(self._prefix_text) else np.asarray(self.frame.around(text_ids), np.int32)
            for text, text_ids in zip(texts, ids, strict=True)
        ]

    def keeps(self, text: str) -> bool:
        """Whether the ids of a text keep it, so that its bytes are those of its tokens."""
        (ids,) = self.tokenizer.encode_batch([text])
        return self.tokenizer.byte_counts(text, ids) is not None

    def encode_pairs(self, pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Query]:
        """Queries for pairs of context and continuation.

        Args:
            pairs: the texts.
            names: names of the pairs in errors.

        Raises:
            HarnessError: lists continuations without a token, and those longer than the model's context.
        """
        adjusted = [_move_trailing_spaces(context, continuation) for context, continuation in pairs]
        # Each distinct text is encoded once: contexts, and contexts joined with their continuations.
        texts = list(dict.fromkeys(text for a, b in adjusted if a for text in (a, a + b)))
        encoded = dict(zip(texts, self.encode(texts), strict=True))
        alone = list(dict.fromkeys(b for a, b in adjusted if not a))
        bare = dict(zip(alone, self.encode(alone, bare=True), strict=True))
        queries, errors = [], []
        for (context, continuation), name in zip(adjusted, names, strict=True):
            if context:
                # lm_eval's rule: the continuation is what follows as many tokens as the context alone has, even if
                # joining the texts changes the last of them.
                whole, begin = encoded[context + continuation], len(encoded[context])
                before, after = encoded[context], whole[begin:]
            else:
                before, after = self._without_context(bare[continuation])
            problem = self._pair_error(continuation, after)
            if problem is None:
                queries.append(self.make_query(before, after))
            else:
                errors.append(f"{name}: {problem}")
        if errors:
            more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
            raise HarnessError("\n".join([*errors[:_MAX_ERRORS], *more]))
        return queries

    def _without_context(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # A text that begins with BOS itself: it serves as the context, and is not scored.
        if len(ids) and ids[0] == self.prefix:
            return ids[:1], ids[1:]
        return np.asarray([self.prefix], np.int32), ids

    def _pair_error(self, continuation: str, after: np.ndarray) -> str | None:
        if not len(after):
            return f"the answer {_quoted(continuation)} has no token after its context"
        if len(after) > self.max_length:
            return (
                f"the answer {_quoted(continuation)} has {len(after):,} tokens, more than the context of "
                f"{self.max_length:,} "
                "(eval_harness.max_length)"
            )
        return None

    def make_query(self, before: np.ndarray, after: np.ndarray) -> Query:
        """The query for context tokens and scored tokens, truncated at the beginning to the model's context."""
        whole = np.concatenate([before, after]).astype(np.int32)
        # One token more than the context: the last one is a target only, and no input.
        kept = whole[-(self.max_length + 1) :]
        return Query(inputs=kept[:-1], targets=kept[-len(after) :], truncated=len(whole) - len(kept))

    def rolling_windows(self, text: str) -> list[Query]:
        """Queries that score every token of a text exactly once."""
        (ids,) = self.encode([text])
        whole = np.concatenate([np.asarray([self.prefix], np.int32), ids])
        queries = []
        for begin in range(0, len(ids), self.max_length):
            end = min(begin + self.max_length, len(ids))
            # `whole[n]` is the token before `ids[n]`, so that `end` is exclusive for both.
            # Every window ends at its last target and has the full context if there is one; only the new tokens are
            # targets.
            inputs = whole[max(0, end - self.max_length) if begin else 0 : end]
            queries.append(Query(inputs=inputs, targets=ids[begin:end]))
        return queries


_MAX_ERRORS = 5


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}…")


def _move_trailing_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Moves spaces at the end of a context to the continuation; a context of only spaces is not changed."""
    kept = context.rstrip()
    if len(kept) == len(context):
        return context, continuation
    return kept, context[len(kept) :] + continuation


def token_count(queries: Iterable[Query]) -> int:
    """The number of input tokens of all queries."""
    return sum(len(query.inputs) for query in queries)
