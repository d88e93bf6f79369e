"""Rows that begin anew: which, how they are drawn, and what stays as it was."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.embedding import Embedding
from levanter.trainer.reinit_rows import RenewedRows

Vocab, Embed = Axis("vocab", 12), Axis("embed", 4000)


@pytest.mark.parametrize("order", [(Vocab, Embed), (Embed, Vocab)], ids=["rows", "columns"])
def test_new_rows_have_the_mean_and_the_deviation_of_all(order):
    rng = np.random.default_rng(0)
    means, deviations = rng.standard_normal(4000), rng.random(4000) + 0.5
    table = (rng.standard_normal((12, 4000)) * deviations + means).astype(np.float32)
    table[10:] = 1e6  # padding
    given = hax.named(jnp.asarray(table), (Vocab, Embed)).rearrange(order)
    rows = RenewedRows(paths=("weight",), ids=(7, 2), vocab=10)
    model = eqx.filter_jit(rows)(Embedding(weight=given), jax.random.PRNGKey(0))
    found = np.asarray(model.weight.rearrange((Vocab, Embed)).array)
    others = [n for n in range(12) if n not in (2, 7)]
    np.testing.assert_array_equal(found[others], table[others])
    mean, deviation = table[:10].mean(axis=0), table[:10].std(axis=0)
    for row in (2, 7):
        drawn = (found[row] - mean) / deviation
        assert np.abs(drawn).max() <= 3.001
        # Of a normal that is cut off at three deviations.
        assert abs(drawn.mean()) < 0.06 and abs(drawn.std() - 0.9866) < 0.05
        assert np.abs(drawn - (table[row] - mean) / deviation).max() > 1
    assert np.abs(found[2] - found[7]).max() > 0.1
    again = eqx.filter_jit(rows)(Embedding(weight=given), jax.random.PRNGKey(0))
    np.testing.assert_array_equal(again.weight.array, model.weight.array)


def test_other_arrays_stay():
    rows = RenewedRows(paths=("head",), ids=(1,), vocab=12)
    weight = hax.ones((Vocab, Embed))
    assert rows(Embedding(weight=weight), jax.random.PRNGKey(0)).weight is weight
