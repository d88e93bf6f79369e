"""Terms whose weight follows a schedule, and a normalizer that the host puts into the batch."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, random_arrays, tiny_config
from helpers.toy_router import Router, RouterObjective, RouterRun, rows

from haliax_ext.abstract import abstract, with_arrays
from levanter.data import next_tokens
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.objective import LOSS, AtStep


def ramp(step):
    return 0.01 * step.astype(jnp.float32)


@pytest.mark.parametrize(("count", "accumulation"), [(1, 4), (8, 1)])
def test_weights_follow_the_step_on_every_mesh_and_in_parts(devices, count, accumulation):
    scheduled = RouterObjective(penalty=ramp)
    history, state = RouterRun(objective=scheduled).run()
    in_parts, same = RouterRun(devices=count, accumulation=accumulation, objective=scheduled).run()
    constant, _ = RouterRun(objective=RouterObjective(penalty=1.0)).run(stop=1)
    # The metric is the contribution to the minimized function: 0 at the first step, whatever the sum is.
    assert float(history[0].terms["penalty"]) == 0 < float(constant[0].terms["penalty"])
    assert [float(m.weight) for m in history] == [10, 11, 12, 13], "the host's numbers"
    for metrics, other in zip(history, in_parts, strict=True):
        np.testing.assert_allclose(other.loss, metrics.loss, rtol=1e-5)
        np.testing.assert_allclose(other.terms["penalty"], metrics.terms["penalty"], rtol=1e-5)
    for path, array in state.items():
        np.testing.assert_allclose(same[path], array, rtol=1e-4, atol=1e-6, err_msg=path)


def test_a_schedule_changes_the_gradient_as_a_constant_of_its_value_does():
    model = Router.init(jax.random.key(0))
    template = RouterObjective().abstract_batch(hax.Axis("batch", 16), None)
    batch = with_arrays(template, {path: jnp.asarray(array) for path, array in rows(3).items()})
    at = AtStep(step=jnp.int32(3))

    def gradient(penalty):
        objective = RouterObjective(penalty=penalty)
        return jax.jit(jax.grad(lambda m, at: objective.total(m, batch, at, jnp.float32(1))[0]))(model, at).router.array

    np.testing.assert_allclose(gradient(ramp), gradient(0.03), rtol=1e-6)
    assert np.abs(gradient(ramp) - gradient(0.0)).max() > 1e-3


def test_constant_weights_compile_to_the_text_of_a_sum_without_schedules():
    model = Router.init(jax.random.key(0))
    objective = RouterObjective(penalty=0.5)
    batch = objective.abstract_batch(hax.Axis("batch", 16), None)

    def minimized(model, batch, at):
        return objective.total(model, batch, at, jnp.float32(0.1))[0]

    def by_hand(model, batch, at):
        sums = objective.sums(model, batch, at) * jnp.float32(0.1)
        return sums[LOSS] + 0.5 * sums["penalty"]

    by_hand.__name__ = "minimized"
    at = AtStep(step=jnp.int32(0))
    texts = [jax.jit(jax.grad(function)).lower(model, batch, at).as_text() for function in (minimized, by_hand)]
    assert texts[0] == texts[1]


def test_language_modeling_with_a_scheduled_z_loss_has_the_gradient_of_the_constant():
    """The scoring loop needs a constant; with a schedule JAX differentiates the sums."""
    config = tiny_config()
    template = abstract(lambda: config.build(hax.Axis("vocab", VOCAB), key=jax.random.PRNGKey(0)))
    model = with_arrays(template, {path: jnp.asarray(array) for path, array in random_arrays(config).items()})
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)
    axes = (hax.Axis("batch", 2), hax.Axis("position", 12))
    batch = LmBatch(tokens=hax.named(tokens, axes), targets=hax.named(next_tokens(tokens), axes))

    def gradient(weight):
        objective = LmObjective(z_loss_weight=weight)
        assert objective.gradient_in_loop == (not callable(weight))
        at = AtStep(step=jnp.int32(5))
        return jax.jit(jax.grad(lambda m: objective.total(m, batch, at, jnp.float32(1))[0]))(model).lm_head.weight.array

    np.testing.assert_allclose(gradient(ramp), gradient(0.05), rtol=1e-4, atol=1e-5)
