"""Texts as tokens by lm_eval's rules: what is put into the model, and which tokens are scored.

A *question* is a sequence of tokens whose last ones are scored. For `loglikelihood` it is a context and a continuation,
encoded together, so that a token may not be cut at their border; spaces that end the context belong to the
continuation. A tokenizer that puts BOS before a text does so here too, unless the text has it. An empty context is BOS,
or EOS where there is none. Of what is longer than the model's context the beginning is dropped.

For `loglikelihood_rolling` a text is cut into windows whose targets do not overlap; the last one reaches back as far as
the context does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from levanter.data import Tokenizer


class HarnessError(ValueError):
    """A task asks for something that cannot be answered; the message says which and why."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """A sequence whose end is scored.

    Attributes:
        inputs: int32, what the model sees: all tokens but the last.
        targets: int32, the tokens that are scored; the last one follows `inputs`.
        cut: tokens of the beginning that were dropped, since there is no room for them.
    """

    inputs: np.ndarray
    targets: np.ndarray
    cut: int = 0

    @property
    def places(self) -> np.ndarray:
        """The positions of `inputs` that predict the targets."""
        return np.arange(len(self.inputs) - len(self.targets), len(self.inputs), dtype=np.int32)


@dataclass(frozen=True)
class QueryEncoder:
    """How texts become questions.

    Attributes:
        tokenizer: the model's.
        adds_bos: whether it puts BOS before a text.
        max_length: tokens that the model sees at once.
    """

    tokenizer: Tokenizer
    adds_bos: bool
    max_length: int

    @cached_property
    def prefix(self) -> int:
        """What stands before a text that nothing else stands before: BOS, or EOS where there is none."""
        found = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
        if found is None:
            raise HarnessError(
                f"{self.tokenizer.name}: the tokenizer has neither BOS nor EOS, so nothing can stand before a text "
                "that is scored from its first token on\n  → name a tokenizer with one of them (tokenizer: …)"
            )
        return found

    @cached_property
    def _prefix_text(self) -> str:
        return self.tokenizer.decode([self.prefix])

    def encode(self, texts: Sequence[str], *, bare: bool = False) -> list[np.ndarray]:
        """The ids of texts, as the tokenizer gives them.

        Args:
            texts: the texts.
            bare: without a BOS that the tokenizer adds.
        """
        ids = self.tokenizer.encode_batch(texts)
        if bare or not self.adds_bos or self.tokenizer.bos_id is None:
            return ids
        begin = np.asarray([self.tokenizer.bos_id], np.int32)
        has = [text.startswith(self._prefix_text) for text in texts]
        return [each if there else np.concatenate([begin, each]) for each, there in zip(ids, has, strict=True)]

    def questions(self, pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Query]:
        """Contexts and continuations as questions.

        Args:
            pairs: of text.
            names: what to call each in an error.

        Raises:
            HarnessError: lists continuations without a token, and those longer than the model's context.
        """
        moved = [_spaces_moved(context, continuation) for context, continuation in pairs]
        texts = list(dict.fromkeys(text for a, b in moved if a for text in (a, a + b)))
        known = dict(zip(texts, self.encode(texts), strict=True))
        alone = list(dict.fromkeys(b for a, b in moved if not a))
        bare = dict(zip(alone, self.encode(alone, bare=True), strict=True))
        found, wrong = [], []
        for (context, continuation), name in zip(moved, names, strict=True):
            if context:
                whole, begin = known[context + continuation], len(known[context])
                before, after = known[context], whole[begin:]
            else:
                before, after = self._after_nothing(bare[continuation])
            problem = self._problem(continuation, after)
            if problem is None:
                found.append(self.question(before, after))
            else:
                wrong.append(f"{name}: {problem}")
        if wrong:
            more = [f"and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
            raise HarnessError("\n".join([*wrong[:_SHOWN], *more]))
        return found

    def _after_nothing(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if len(ids) and ids[0] == self.prefix:
            return ids[:1], ids[1:]
        return np.asarray([self.prefix], np.int32), ids

    def _problem(self, continuation: str, after: np.ndarray) -> str | None:
        if not len(after):
            return f"the answer {_shown(continuation)} has no token of its own behind its context"
        if len(after) > self.max_length:
            return (
                f"the answer {_shown(continuation)} has {len(after):,} tokens, and the model sees {self.max_length:,} "
                "(eval_harness.max_length)"
            )
        return None

    def question(self, before: np.ndarray, after: np.ndarray) -> Query:
        """Tokens that are given and tokens that are scored, without what there is no room for."""
        whole = np.concatenate([before, after]).astype(np.int32)
        kept = whole[-(self.max_length + 1) :]
        return Query(inputs=kept[:-1], targets=kept[-len(after) :], cut=len(whole) - len(kept))

    def windows(self, text: str) -> list[Query]:
        """A text as questions whose targets are its tokens, each once."""
        (ids,) = self.encode([text])
        whole = np.concatenate([np.asarray([self.prefix], np.int32), ids])
        found = []
        for begin in range(0, len(ids), self.max_length):
            end = min(begin + self.max_length, len(ids))
            # `whole` is a token ahead of `ids`: the inputs of a window end before its last target.
            inputs = whole[max(0, end - self.max_length) if begin else 0 : end]
            found.append(Query(inputs=inputs, targets=ids[begin:end]))
        return found


_SHOWN = 5


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}…")


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the end of a context at the beginning of what follows; a context of nothing else stays."""
    kept = context.rstrip()
    if len(kept) == len(context):
        return context, continuation
    return kept, context[len(kept) :] + continuation


def token_count(questions: Iterable[Query]) -> int:
    """The tokens that the model sees in all of them."""
    return sum(len(each.inputs) for each in questions)
