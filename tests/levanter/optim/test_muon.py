"""Muon's options against their formulas in torch, and AdamW's groups: nanochat's optimizer as a whole."""

import dataclasses
import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from haliax_ext.abstract import abstract, leaves
from levanter.config import parse_text
from levanter.layers.linear import Linear
from levanter.models.nanochat.config import NanochatConfig
from levanter.optim import AdamConfig, GroupConfig, MomentumSchedule, MuonConfig
from levanter.optim.groups import describe_groups
from levanter.optim.muon import COEFFICIENTS, POLAR_EXPRESS

torch = pytest.importorskip("torch")

STEPS, LAYERS = 20, 2
NANOCHAT = MuonConfig(
    learning_rate=0.02,
    momentum=0.97,
    momentum_schedule=MomentumSchedule(start=0.85, warmup=6, final=0.90),
    average_momentum=True,
    polar="polar_express",
    muon_epsilon=1e-6,
    row_equalize=True,
    renormalize=True,
    second_moment=0.9,
    cautious_decay=True,
    weight_decay=0.28,
    weight_decay_schedule="cosine",
    max_grad_norm=None,
    warmup=4,
    warm_first_step=True,
    decay=13,
    min_lr_ratio=0.05,
    lr_schedule="linear",
)
SHAPES = {"wide": (24, 40), "tall": (40, 24), "square": (16, 16), "gate": (4, 12)}


def matrices(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((LAYERS, *shape)).astype(np.float32) for name, shape in SHAPES.items()}


def as_model(arrays: dict[str, np.ndarray]) -> dict[str, Linear]:
    """A stack of projections for each shape."""
    model = {}
    for name, array in arrays.items():
        axes = (Axis("layers", LAYERS), Axis("mlp", array.shape[1]), Axis("embed", array.shape[2]))
        model[name] = Linear(weight=hax.named(jnp.asarray(array), axes), bias=None, In=("embed",))
    return model


def history_of(config: MuonConfig) -> list[dict[str, np.ndarray]]:
    optimizer, model = config.build(STEPS), as_model(matrices(0))
    state, update, history = optimizer.init(model), jax.jit(optimizer.update), []  # pyright: ignore
    for step in range(STEPS):
        updates, state = update(as_model(matrices(1 + step)), state, model)
        model = optax.apply_updates(model, updates)  # pyright: ignore
        history.append({name: np.asarray(linear.weight.array) for name, linear in model.items()})
    return history


def rate_at(step: int, config: MuonConfig) -> float:
    """nanochat's multiple of the learning rate, times it."""
    falls = STEPS - 13
    if step < 4:
        return config.learning_rate * (step + 1) / 4
    if step <= falls:
        return config.learning_rate
    progress = (STEPS - step) / 13
    return config.learning_rate * (progress + (1 - progress) * 0.05)


def momentum_at(step: int) -> float:
    falls = STEPS - 13
    if step < 6:
        return 0.85 + (0.97 - 0.85) * step / 6
    return 0.97 if step < falls else 0.97 + (0.90 - 0.97) * (step - falls) / 13


def judge(config: MuonConfig) -> list[dict[str, np.ndarray]]:
    """The formulas, one matrix after the other, in torch and float64."""
    values = {
        (name, layer): torch.tensor(array[layer]).double()
        for name, array in matrices(0).items()
        for layer in range(LAYERS)
    }
    means = {key: torch.zeros_like(x) for key, x in values.items()}
    squares: dict = {}
    history = []
    for step in range(STEPS):
        gradients = matrices(1 + step)
        for (name, layer), x in values.items():
            grad = torch.tensor(gradients[name][layer]).double()
            rows, columns = grad.shape
            beta = momentum_at(step)
            means[name, layer] = mean = torch.lerp(means[name, layer], grad, 1 - beta)
            u = torch.lerp(grad, mean, beta)
            if config.row_equalize:
                u = u * (u.norm() / math.sqrt(rows)) / u.norm(dim=1, keepdim=True).clamp_min(1e-6)
            express = config.polar == "polar_express"
            u = u / (u.norm() * (1.01 if express else 1.0) + config.muon_epsilon)
            for a, b, c in POLAR_EXPRESS if express else (COEFFICIENTS["quintic"],) * 5:
                gram = u.T @ u if rows > columns else u @ u.T
                polynomial = b * gram + c * gram @ gram
                u = a * u + (u @ polynomial if rows > columns else polynomial @ u)
            if config.renormalize:
                u = u * math.sqrt(min(rows, columns)) / u.norm()
            if config.second_moment is not None:
                size = columns if rows >= columns else rows
                now = u.square().mean(1 if rows >= columns else 0, keepdim=True)
                kept = squares.get((name, layer), torch.zeros_like(now))
                squares[name, layer] = kept = torch.lerp(kept, now, 1 - config.second_moment)
                factor = kept.clamp_min(1e-10).rsqrt()
                u = u * factor * u.norm() / (now * size * factor.square()).sum().sqrt()
            decay = config.weight_decay * 0.5 * (1 + math.cos(math.pi * step / STEPS)) if config.cautious_decay else 0
            rate = rate_at(step, config) * math.sqrt(max(1, rows / columns))
            values[name, layer] = x - rate * (u + decay * x * (u * x >= 0))
        history.append({name: np.stack([values[name, n].numpy() for n in range(LAYERS)]) for name in SHAPES})
    return history


OFF = {"row_equalize": False, "renormalize": False, "second_moment": None, "cautious_decay": False}
VARIANTS = {
    "nanochat": NANOCHAT,
    "polar express alone": dataclasses.replace(
        NANOCHAT, **OFF, weight_decay=0.0, weight_decay_schedule="constant"
    ),
    "newton-schulz with rows equalized": dataclasses.replace(
        NANOCHAT, **OFF | {"row_equalize": True}, weight_decay=0.0, weight_decay_schedule="constant",
        polar="newton_schulz",
    ),
    "second moment alone": dataclasses.replace(
        NANOCHAT, **OFF | {"second_moment": 0.9}, weight_decay=0.0, weight_decay_schedule="constant"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_matrices_are_those_of_the_formulas(name):
    got, expected = history_of(VARIANTS[name]), judge(VARIANTS[name])
    for step, tolerance in ((0, 1e-5), (STEPS - 1, 1e-4)):
        for shape, array in expected[step].items():
            off = np.abs(got[step][shape] - array) > tolerance * np.abs(array).max()
            # A cautious decay is switched by a sign, which float32 and float64 may see otherwise near zero.
            assert off.sum() <= (2 if VARIANTS[name].cautious_decay and step else 0), (shape, step, off.sum())


GROUPS = """
optimizer:
  type: muon
  learning_rate: 0.02
  groups:
    lm_head: {learning_rate: 0.008, beta1: 0.8, beta2: 0.96, epsilon: 1e-10, weight_decay: 0.01}
    embeddings: {learning_rate: 0.3, beta1: 0.8, beta2: 0.995, epsilon: 1e-10, weight_decay: 0.001}
    "**.value_embedding.table": {learning_rate: 0.15, beta1: 0.8, beta2: 0.995, epsilon: 1e-10, weight_decay: 0.01}
    "**.stream_scale": {learning_rate: 0.005, beta1: 0.8, beta2: 0.95, epsilon: 1e-10, weight_decay: 0.05}
    "**.x0_scale": {learning_rate: 0.5, beta1: 0.96, beta2: 0.95, epsilon: 1e-10, weight_decay: 0.0}
    transformer.ends: {rule: adam, learning_rate: 0.2, beta1: 0.8, beta2: 0.95, epsilon: 1e-10, weight_decay: 0.0}
"""
TINY = NanochatConfig(
    num_layers=2, hidden_dim=24, intermediate_dim=48, num_heads=2, num_kv_heads=2, vocab_size=16, pattern="L"
)


def tiny(seed: int):
    built = abstract(lambda: TINY.build(Axis("vocab", 16), key=jax.random.key(0)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), built)


def test_groups_of_nanochat_are_adamw_and_all_matrices_are_muon():
    from levanter.main.train_lm import TrainLmConfig

    configured = parse_text(TrainLmConfig, GROUPS).optimizer
    model = tiny(0)
    lines = describe_groups(configured.groups, model)
    assert [line.partition(":")[0] for line in lines] == [*sorted(configured.groups), "rest"]
    config = dataclasses.replace(
        configured, lr_schedule="constant", warmup=0, max_grad_norm=None, muon_epsilon=1e-6, beta1=0.5
    )
    optimizer = config.build(STEPS)
    updates, _ = jax.jit(optimizer.update)(tiny(1), optimizer.init(model), model)  # pyright: ignore

    def by_path(tree):
        return {leaf.path: np.asarray(x) for leaf, x in zip(leaves(tree), jax.tree.leaves(tree), strict=True)}

    old, gradients, found = by_path(model), by_path(tiny(1)), by_path(updates)
    settings = {
        "lm_head.weight": (0.008, 0.01),
        "embeddings.token_embeddings.weight": (0.3, 0.001),
        "value_embedding.table": (0.15, 0.01),
        "stream_scale": (0.005, 0.05),
        "x0_scale": (0.5, 0.0),
        "ends.smear.scale": (0.2, 0.0),
        "ends.smear.gate.weight": (0.2, 0.0),
        "ends.backout_scale": (0.2, 0.0),
    }
    by_muon = []
    for path, update in found.items():
        known = [value for suffix, value in settings.items() if path.endswith(suffix)]
        if not known:
            by_muon.append(path)
            continue
        ((rate, decay),) = known
        # AdamW's first step: both moments are those of the gradient.
        expected = -rate * (np.sign(gradients[path]) + decay * old[path])
        np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-7, err_msg=path)
    assert {path.rpartition("self_attn.")[2].rpartition("mlp.")[2] for path in by_muon} == {
        *(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "up", "down")),
        "value_embedding.gate.weight",
    }
    # Orthogonal, and not by AdamW: their elements differ in size.
    assert all(np.abs(np.abs(found[path]) / np.abs(found[path]).mean() - 1).max() > 0.1 for path in by_muon)


def test_a_group_may_have_matrices_updated_by_adamw():
    config = MuonConfig(
        learning_rate=0.02, groups={"wide": GroupConfig(rule="adam", learning_rate=0.5)}, max_grad_norm=None,
        lr_schedule="constant", warmup=0,
    )  # fmt: skip
    optimizer, model = config.build(STEPS), as_model(matrices(0))
    updates, _ = optimizer.update(as_model(matrices(1)), optimizer.init(model), model)  # pyright: ignore
    wide = np.asarray(updates["wide"].weight.array)
    np.testing.assert_allclose(wide, -0.5 * np.sign(matrices(1)["wide"]), rtol=1e-3)  # but for epsilon
    assert np.abs(np.abs(np.asarray(updates["tall"].weight.array)) / 0.02 - 1).max() > 0.1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MuonConfig(polar="polar_express", backend_steps=6), "the Polar Express has 5 steps, got 6"),
        (lambda: MuonConfig(weight_decay_schedule="cosine"), "set cautious_decay: true"),
        (lambda: AdamConfig(groups={"mlp": GroupConfig(rule="adam")}), "rule is no setting of this optimizer"),
    ],
)
def test_what_does_not_fit_together_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
