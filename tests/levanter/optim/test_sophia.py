"""Sophia-H against its paper (arXiv:2305.14342, algorithm 3) in NumPy, on losses whose Hessian is known."""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.outputs import Sums
from levanter.models.precision import Precision
from levanter.optim import OptimizerConfig
from levanter.optim.hessian import HessianEma, Hutchinson, direction, no_curvature, product, remembered
from levanter.optim.sophia import SophiaHConfig
from levanter.trainer.objective import LOSS, Objective, Term
from levanter.trainer.state import start
from levanter.trainer.step import StepRecipe, train_step
from levanter.trainer.train_state import TrainState

N, ROWS, STEPS = 6, 8, 7
RANDOM = np.random.default_rng(3)
ROOT = RANDOM.normal(size=(N, N))
MATRIX = ROOT @ ROOT.T / N - 0.3 * np.eye(N)  # curvature of both signs
COEFFICIENTS = RANDOM.uniform(0.5, 1.5, (STEPS, ROWS))
SHIFTS = RANDOM.normal(size=(STEPS, ROWS, N))
BEGIN = RANDOM.normal(size=N)
CONFIG = SophiaHConfig(
    learning_rate=0.05, warmup=0, lr_schedule="constant", weight_decay=0.1, default_weight_decay_mask=False,
    beta1=0.9, beta2=0.8, gamma=0.4, update_interval=3, rng_seed=5, max_grad_norm=None,
)  # fmt: skip


class Point(eqx.Module):
    at: hax.NamedArray


@dataclass(frozen=True)
class Quadratic(Objective):
    """The mean over rows of `c/2 · θᵀAθ − b·θ`: gradient `mean(c) Aθ − mean(b)`, Hessian `mean(c) A`."""

    terms = (Term(name=LOSS),)

    def abstract_batch(self, Batch, Pos):
        raise NotImplementedError

    def rows(self, batch):
        return batch["c"].resolve_axis("batch")

    def normalizer(self, batch):
        return jnp.float32(batch["c"].axis_size("batch"))

    def sums(self, model, batch, at):
        x = model.at.array
        energy = 0.5 * x @ jnp.asarray(MATRIX, jnp.float32) @ x
        return Sums({LOSS: jnp.sum(batch["c"].array) * energy - jnp.sum(batch["b"].array @ x)})


def batch_of(step: int):
    c = hax.named(jnp.asarray(COEFFICIENTS[step], jnp.float32), "batch")
    b = hax.named(jnp.asarray(SHIFTS[step], jnp.float32), ("batch", "feature"))
    return {"c": c, "b": b}


def papers(directions: list[np.ndarray]) -> list[np.ndarray]:
    """Algorithm 3, line by line; `directions` are the draws of u by step."""
    theta, m, h, found = BEGIN.copy(), np.zeros(N), np.zeros(N), []
    for t in range(STEPS):
        gradient = COEFFICIENTS[t].mean() * MATRIX @ theta - SHIFTS[t].mean(0)
        m = CONFIG.beta1 * m + (1 - CONFIG.beta1) * gradient
        if t % CONFIG.update_interval == 0:
            u = directions[t]
            estimate = u * (COEFFICIENTS[t].mean() * MATRIX @ u)
            h = CONFIG.beta2 * h + (1 - CONFIG.beta2) * estimate
        theta = theta - CONFIG.learning_rate * CONFIG.weight_decay * theta
        theta = theta - CONFIG.learning_rate * np.clip(m / np.maximum(CONFIG.gamma * h, CONFIG.epsilon), -1, 1)
        found.append(theta.copy())
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_steps_are_the_papers(accumulation):
    optimizer = CONFIG.build(STEPS)
    model = Point(hax.named(jnp.asarray(BEGIN, jnp.float32), "feature"))
    state: TrainState = start(model, optimizer, jax.random.PRNGKey(0))
    recipe = StepRecipe(
        objective=Quadratic(), optimizer=optimizer, schedule=CONFIG.schedule(STEPS), precision=Precision.parse("f32"),
        accumulation=accumulation, curvature=CONFIG.curvature,
    )  # fmt: skip
    step = eqx.filter_jit(lambda state, batch: train_step(recipe, state, None, batch))
    directions = [np.asarray(direction(CONFIG.curvature, model, jnp.int32(t)).at.array, float) for t in range(STEPS)]
    for t, expected in enumerate(papers(directions)):
        state, _ = step(state, batch_of(t))
        np.testing.assert_allclose(state.model.at.array, expected, rtol=2e-4, atol=2e-5)
    # Some components were clipped and some were not, or this compared nothing.
    moved = np.abs(np.diff([BEGIN, *papers(directions)], axis=0)) / CONFIG.learning_rate
    assert (moved > 0.95).any() and (moved < 0.7).any()


def test_directions_are_standard_normal_and_follow_from_seed_and_step():
    params = {"a": hax.zeros(Axis("embed", 20000)), "b": jnp.zeros(20000)}
    rule = Hutchinson(interval=1, decay=0.0, seed=1)
    first = direction(rule, params, jnp.int32(4))
    again, other = direction(rule, params, jnp.int32(4)), direction(rule, params, jnp.int32(5))
    a, b = np.asarray(first["a"].array), np.asarray(first["b"])
    assert (a == np.asarray(again["a"].array)).all() and abs(np.corrcoef(a, np.asarray(other["a"].array))[0, 1]) < 0.03
    for values in (a, b):
        assert abs(values.mean()) < 0.03 and abs(values.std() - 1) < 0.03
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.03


def test_estimates_average_to_the_diagonal():
    """E[u ⊙ Hu] is the diagonal: 4,000 draws on a function that is not quadratic, Hessian by hand."""
    point = jnp.asarray([0.3, -0.7, 1.1], jnp.float32)

    def loss(x):
        return x[0] ** 4 + jnp.exp(x[1]) + x[0] * x[2] + jnp.sin(x[2])

    diagonal = np.array([12 * 0.3**2, np.exp(-0.7), -np.sin(1.1)])
    rule = Hutchinson(interval=1, decay=0.0, seed=0)

    def estimate(step):
        u = direction(rule, point, step)
        return u * product(jax.grad(loss), point, u)

    found = np.asarray(jax.vmap(estimate)(jnp.arange(4000)))
    np.testing.assert_allclose(found.mean(0), diagonal, atol=5 * found.std(0).max() / np.sqrt(4000))


def test_a_mean_takes_estimates_wherever_it_lies():
    params = {"w": jnp.ones(3)}
    state = ("clip", (HessianEma(diagonal={"w": jnp.ones(3)}), jnp.int32(1)))
    rule = Hutchinson(interval=1, decay=0.75, seed=0)
    _, (curved, count) = remembered(rule, state, {"w": jnp.asarray([5.0, 1.0, -3.0])})
    assert curved.diagonal["w"].tolist() == [2.0, 1.0, 0.0] and count == 1
    assert no_curvature(params).diagonal["w"].tolist() == [0.0, 0.0, 0.0]


def test_configuration_is_read_with_upstreams_keys():
    assert OptimizerConfig.get_choice_class("sophia-h") is SophiaHConfig
    assert SophiaHConfig().curvature == Hutchinson(interval=10, decay=0.99, seed=0)
    for key, value in (("gamma", 0.0), ("update_interval", 0), ("beta2", 1.0), ("clip_threshold", -1.0)):
        with pytest.raises(ValueError, match=key):
            SophiaHConfig(**{key: value})
