"""What Adam does behind its moments: weight decay that follows the schedule, limits on the update; in NumPy."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from levanter.layers.linear import Linear
from levanter.layers.norm import RMSNorm
from levanter.optim import AdamConfig, ClipUpdateNormConfig
from levanter.optim.parameters import map_parameters

STEPS, RATE, DECAY = 14, 0.05, 0.4
Layers, Out, In = Axis("layers", 3), Axis("mlp", 4), Axis("embed", 5)
WEIGHT, NORM = "up.weight", "norm.weight"


class Model(eqx.Module):
    """A stack of matrices, which decays, and a norm, which does not."""

    up: Linear
    norm: RMSNorm


def model(seed: int, *, scale: float = 1.0) -> Model:
    """Random values; the matrices of the stack are of very different sizes."""
    rng = np.random.default_rng(seed)
    sizes = np.array([1.0, 30.0, 0.01]).reshape(3, 1, 1)
    weight = hax.named(jnp.asarray(scale * sizes * rng.normal(size=(3, 4, 5)), jnp.float32), (Layers, Out, In))
    norm = hax.named(jnp.asarray(scale * rng.normal(size=5), jnp.float32), (In,))
    return Model(up=Linear(weight=weight, bias=None, In=("embed",)), norm=RMSNorm(weight=norm, axis="embed", eps=1e-5))


def arrays(tree: Any) -> dict[str, np.ndarray]:
    found = {}
    map_parameters(lambda p, x: found.__setitem__(p.path, np.asarray(x.array)), tree)
    return found


def gradients(step: int) -> Model:
    """Usual ones, and two that are far from them in size."""
    return model(100 + step, scale={9: 50.0, 12: 2000.0}.get(step, 1.0))


def run(config: AdamConfig, grads=gradients) -> list[dict[str, np.ndarray]]:
    optimizer = config.build(STEPS)
    parameters = model(0)
    state = optimizer.init(parameters)  # pyright: ignore
    update, history = jax.jit(optimizer.update), []
    for step in range(STEPS):
        updates, state = update(grads(step), state, parameters)
        parameters = optax.apply_updates(parameters, updates)  # pyright: ignore
        history.append(arrays(parameters))
    return history


def in_numpy(config: AdamConfig, grads=gradients) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """AdamW in float64 with a linear schedule, and by how much each step was clipped."""
    values = {k: v.astype(np.float64) for k, v in arrays(model(0)).items()}
    first = {k: np.zeros_like(v) for k, v in values.items()}
    second = {k: np.zeros_like(v) for k, v in values.items()}
    history, factors, norms = [], [], []
    for step in range(STEPS):
        part = 1 - 0.9 * step / STEPS
        moves = {}
        for path, g in arrays(grads(step)).items():
            g = g.astype(np.float64)
            first[path] = config.beta1 * first[path] + (1 - config.beta1) * g
            second[path] = config.beta2 * second[path] + (1 - config.beta2) * g * g
            mean = first[path] / (1 - config.beta1 ** (step + 1))
            root = np.sqrt(second[path] / (1 - config.beta2 ** (step + 1)))
            moves[path] = mean / (root + config.epsilon)
        moves[WEIGHT] += config.weight_decay * (part if config.adamc_weight_decay else 1.0) * values[WEIGHT]
        factor = 1.0
        if config.update_rms_clipping is not None:
            for matrix in (*moves[WEIGHT], moves[NORM]):
                size = np.sqrt((matrix**2).mean()) / config.update_rms_clipping
                factor = min(factor, 1 / max(1.0, size))
                matrix /= max(1.0, size)
        if config.clip_update_norm is not None:
            norm = np.sqrt(sum((m**2).sum() for m in moves.values()))
            last = norms[-config.clip_update_norm.rolling_interval_length :]
            if len(last) >= config.clip_update_norm.rolling_interval_length // 2:
                most = np.mean(last) + config.clip_update_norm.sigma_factor * np.std(last)
                factor = min(1.0, most / norm)
            norms.append(norm)
            moves = {path: m * factor for path, m in moves.items()}
        factors.append(factor)
        values = {path: v - RATE * part * moves[path] for path, v in values.items()}
        history.append(values)
    return history, factors


def config(**changes) -> AdamConfig:
    usual = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": None, "warmup": 0, "lr_schedule": "linear"}
    return AdamConfig(**{**usual, **changes})


CASES = {
    "adamc": {"adamc_weight_decay": True},
    "rms": {"update_rms_clipping": 1.0},
    # Quick averages, so that one large gradient makes a large update.
    "norm": {"clip_update_norm": ClipUpdateNormConfig(rolling_interval_length=8, sigma_factor=0.5), "beta1": 0.1},
    "both": {
        "clip_update_norm": ClipUpdateNormConfig(rolling_interval_length=6, sigma_factor=0.5),
        "beta1": 0.1,
        "adamc_weight_decay": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_adam_equals_its_formulas_in_numpy(case):
    asked = config(**CASES[case])
    expected, factors = in_numpy(asked)
    for step, (ours, theirs) in enumerate(zip(run(asked), expected, strict=True)):
        for path in ours:
            np.testing.assert_allclose(ours[path], theirs[path], rtol=2e-5, atol=2e-6, err_msg=f"{path}, step {step}")
    if case != "adamc":
        # Some steps are clipped; by their norm, not all are.
        assert min(factors) < 0.98 and (case == "rms" or max(factors) == 1.0), factors


def test_a_norm_that_is_none_is_not_remembered():
    """What was usual stays known: the state behind a step that is not a number is the one before it."""
    rule = ClipUpdateNormConfig(rolling_interval_length=4, sigma_factor=1.0)
    from levanter.optim.update_clipping import clip_by_recent_norms

    clip = clip_by_recent_norms(rule)
    state, update = clip.init(model(0)), jax.jit(clip.update)  # pyright: ignore
    for step in range(3):
        _, state = update(model(step), state)
    nothing = jax.tree.map(lambda x: x * jnp.nan, model(0))
    _, after = update(nothing, state)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert int(after.seen) == 3  # pyright: ignore
