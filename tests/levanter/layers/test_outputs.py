"""Sums by name: added up over unlike layers, carried through scans, out of jitted functions."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from haliax_ext.abstract import leaves
from levanter.layers.outputs import Outputs, Sums

pytestmark = pytest.mark.quick

Embed = Axis("embed", 4)


def sums(**values: float) -> Sums:
    return Sums({name: jnp.float32(value) for name, value in values.items()})


def test_what_was_asked_for_is_added_and_nothing_else():
    asked = Sums.zeros(("z", "a"))
    found = asked.plus(sums(a=2.0, other=7.0)).plus(Sums()).plus(sums(a=0.5, z=1.0))
    assert {name: float(value) for name, value in found.items()} == {"z": 1.0, "a": 2.5}
    # In the order of those who asked: names do not change places when a layer makes them in another order.
    assert list(found) == ["z", "a"]


def test_two_sums_have_the_same_names():
    total = sums(a=1.0, b=2.0) + sums(b=3.0, a=4.0)
    assert {name: float(value) for name, value in total.items()} == {"a": 5.0, "b": 5.0}
    with pytest.raises(AssertionError):
        _ = sums(a=1.0) + sums(b=1.0)


def test_sums_are_carried_through_a_scan_and_differentiated():
    """Σ_n 2·(x·n) over n = 0, 1, 2 has the gradient 2·(0 + 1 + 2)."""

    @jax.jit
    def total(x):
        def layer(carry: Outputs, n):
            made = Sums({"twice": 2 * x * n, "dropped": jnp.float32(1)})
            return Outputs(carry.activations + 1.0, carry.auxiliary.plus(made)), None

        start = Outputs(activations=hax.zeros(Embed), auxiliary=Sums.zeros(("twice",)))
        ended, _ = jax.lax.scan(layer, start, jnp.arange(3, dtype=jnp.float32))
        return (ended.auxiliary * 0.5)["twice"], ended

    (value, ended), gradient = jax.value_and_grad(total, has_aux=True)(jnp.float32(5))
    assert float(value) == 15.0 and float(gradient) == 3.0
    assert list(ended.auxiliary) == ["twice"]
    np.testing.assert_array_equal(ended.activations.array, 3.0)


def test_their_paths_are_their_names():
    found = Outputs(activations=hax.zeros(Embed), auxiliary=sums(balance=1.0))
    assert [leaf.path for leaf in leaves(found)] == ["activations", "auxiliary.balance"]


def test_a_part_without_sums_may_return_its_activations_alone():
    x = hax.zeros(Embed)
    assert Outputs.of(x).activations is x and not Outputs.of(x).auxiliary
    made = Outputs(activations=x, auxiliary=sums(a=1.0))
    assert Outputs.of(made) is made
