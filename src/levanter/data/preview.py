"""One conversation of a set as a run will see it, with what counts marked: what a look at the data would show.

talk: the first conversation, 31 tokens, of which 9 count (between ⟦ and ⟧)
  <|im_start|>user
  What is the capital of France?<|im_end|>
  <|im_start|>assistant
  ⟦Paris.<|im_end|>
  ⟧
  ids: 1 4093 198 … ⟦25133 30 2 198⟧
"""

from itertools import groupby

import numpy as np

from levanter.data.store import Tokens
from levanter.data.tokenizer import Tokenizer

TOKENS = 512
"""That are shown of a conversation at most."""


def marked_sample(
    name: str, tokens: Tokens, tokenizer: Tokenizer, *, number: int = 0, what: str = "the first conversation"
) -> str:
    """A document of a set with weights, as text and as ids, in a few lines.

    Args:
        name: the set's.
        tokens: its documents.
        tokenizer: the run's.
        number: of the document.
        what: it is.
    """
    length = int(tokens.starts[number + 1] - tokens.starts[number])
    ids, weights = tokens.read(tokens.starts[number : number + 1], np.array([length]))
    assert weights is not None
    # A weight is that of predicting *from* a place.
    counted = np.concatenate([[False], weights[:-1] > 0])
    text = [tokenizer.decode(ids[list(run)]) for run in _runs(counted[:TOKENS])]
    numbers = [" ".join(map(str, ids[list(run)].tolist())) for run in _runs(counted[:TOKENS])]
    marks = [bool(counted[run[0]]) for run in _runs(counted[:TOKENS])]
    omitted = f" … and {length - TOKENS:,} more tokens" if length > TOKENS else ""
    lines = [
        f"{name}: {what}, {length:,} tokens, of which {int(counted.sum()):,} count (between ⟦ and ⟧)",
        *_marked(text, marks, "").splitlines(),
        f"ids: {_marked(numbers, marks, ' ')}{omitted}",
    ]
    bos = tokenizer.bos_id
    if bos is not None and ids[0] != bos:
        lines.append(f"it does not begin with {tokenizer.decode([bos])} (id {bos}): its chat template writes none")
    return "\n  ".join(lines)


def _runs(counted: np.ndarray) -> list[range]:
    """The stretches of places that are alike."""
    runs, at = [], 0
    for _, group in groupby(counted.tolist()):
        length = len(list(group))
        runs.append(range(at, at + length))
        at += length
    return runs


def _marked(pieces: list[str], marks: list[bool], between: str) -> str:
    return between.join(f"⟦{piece}⟧" if mark else piece for piece, mark in zip(pieces, marks, strict=True))
