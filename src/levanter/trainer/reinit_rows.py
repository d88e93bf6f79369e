"""Rows of the embedding table and of the output head that begin anew, where everything else is a checkpoint's.

For tokens that a checkpoint was never trained on. As upstream's, a new row is drawn with the mean and the deviation
of its column over the whole vocabulary, cut off at three deviations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray

from haliax_ext.pytree import KeyPath, PyTree, is_named, path_string

M = TypeVar("M")
VOCAB = "vocab"


@dataclass(frozen=True, kw_only=True)
class RenewedRows:
    """Which rows of a model begin anew.

    Attributes:
        paths: of the arrays with an axis `vocab` that they are rows of.
        ids: the tokens.
        vocab: tokens that there are; what lies behind is padding.
    """

    paths: tuple[str, ...]
    ids: tuple[int, ...]
    vocab: int

    def __call__(self, model: M, key: jax.Array) -> M:
        """The model, or a part of one, with new rows; call it inside `jit`."""

        def visit(keys: KeyPath, x: PyTree) -> PyTree:
            path = path_string(keys)
            if path not in self.paths:
                return x
            assert isinstance(x, NamedArray)
            return self._renewed(x, jax.random.fold_in(key, self.paths.index(path)))

        return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)

    def _renewed(self, x: NamedArray, key: jax.Array) -> NamedArray:
        Vocab = x.resolve_axis(VOCAB)
        others = tuple(axis for axis in x.axes if axis != Vocab)
        wide, counts = x.astype(jnp.float32), hax.arange(Vocab) < self.vocab
        mean = hax.sum(hax.where(counts, wide, 0.0), Vocab) / self.vocab
        variance = hax.sum(hax.where(counts, (wide - mean) ** 2, 0.0), Vocab) / self.vocab
        New = Vocab.resize(len(self.ids))
        drawn = hax.random.truncated_normal(key, (New, *others), -3, 3, dtype=jnp.float32)
        fresh = (drawn * hax.sqrt(variance) + mean).astype(x.dtype).rearrange((New, *others))
        at = (slice(None),) * x.axes.index(Vocab) + (jnp.asarray(self.ids),)
        moved = jnp.moveaxis(fresh.array, 0, x.axes.index(Vocab))
        return NamedArray(x.array.at[at].set(moved), x.axes)


Renewal = Callable[[M, jax.Array], M]
"""From what was loaded, and a key, to what a run begins with."""


def unchanged(model: M, key: jax.Array) -> M:
    """What a run begins with where nothing begins anew."""
    del key
    return model
