"""Reinitializes rows of the embedding table and of the output head of a loaded model.

This is for tokens that a checkpoint was not trained on. As in upstream, each element of a new row is drawn from a
normal distribution with the mean and standard deviation of its column over the vocabulary, truncated at three standard
deviations.
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
    """The rows of a model that are reinitialized.

    Attributes:
        paths: of the arrays with an axis `vocab`.
        ids: the token ids of the rows.
        vocab: number of tokens; rows from there on are padding.
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
            # Table and head have different keys: with tied shapes they would otherwise get equal rows.
            return self._renewed(x, jax.random.fold_in(key, self.paths.index(path)))

        return jax.tree_util.tree_map_with_path(visit, model, is_leaf=is_named)

    def _renewed(self, x: NamedArray, key: jax.Array) -> NamedArray:
        Vocab = x.resolve_axis(VOCAB)
        others = tuple(axis for axis in x.axes if axis != Vocab)
        # Statistics in float32 over real tokens only: padding rows are zeros and would shrink the deviation.
        wide, counts = x.astype(jnp.float32), hax.arange(Vocab) < self.vocab
        mean = hax.sum(hax.where(counts, wide, 0.0), Vocab) / self.vocab
        variance = hax.sum(hax.where(counts, (wide - mean) ** 2, 0.0), Vocab) / self.vocab
        New = Vocab.resize(len(self.ids))
        drawn = hax.random.truncated_normal(key, (New, *others), -3, 3, dtype=jnp.float32)
        fresh = (drawn * hax.sqrt(variance) + mean).astype(x.dtype).rearrange((New, *others))
        # An index by array behind slices leaves its axis in place, so the new rows move to the axis of the vocabulary.
        at = (slice(None),) * x.axes.index(Vocab) + (jnp.asarray(self.ids),)
        moved = jnp.moveaxis(fresh.array, 0, x.axes.index(Vocab))
        return NamedArray(x.array.at[at].set(moved), x.axes)


Renewal = Callable[[M, jax.Array], M]
"""(loaded parameters, key) → the parameters that a run starts with."""


def unchanged(model: M, key: jax.Array) -> M:
    """The `Renewal` that changes nothing."""
    del key
    return model
