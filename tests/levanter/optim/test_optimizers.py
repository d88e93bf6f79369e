"""Optimizers against PyTorch's and against NumPy, alone and cut over a mesh."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from helpers.llama_on_mesh import abstract_model, llama_2d, mappings_for, random_arrays, tiny_config
from jax.sharding import NamedSharding

from haliax_ext.abstract import leaves, map_arrays, with_arrays
from haliax_ext.meshspec import MeshSpec
from levanter.config import load
from levanter.layers.embedding import Embedding
from levanter.layers.linear import Linear
from levanter.layers.norm import RMSNorm
from levanter.optim import (
    AdafactorConfig,
    AdamConfig,
    ClipUpdateNormConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    RmsPropConfig,
    SgdConfig,
    SkipStepConfig,
)
from levanter.optim.parameters import decay_mask, map_parameters

torch = pytest.importorskip("torch")

Layers, Embed, Heads, HeadSize, Mlp, Vocab = (
    Axis(n, s) for n, s in (("layers", 3), ("embed", 6), ("kv_head", 2), ("head_size", 4), ("mlp", 5), ("vocab", 7))
)
CONSTANT = {"lr_schedule": "constant", "warmup": 0}


class Small(eqx.Module):
    """One of each: a stacked projection over several axes, its bias, a table, a norm."""

    out: Linear
    up: Linear
    table: Embedding
    norm: RMSNorm


def small(seed: int) -> Small:
    rng = np.random.default_rng(seed)

    def named(*axes):
        return hax.named(jnp.asarray(rng.normal(size=[a.size for a in axes]), jnp.float32), axes)

    return Small(
        out=Linear(weight=named(Layers, Embed, Heads, HeadSize), bias=None, In=("kv_head", "head_size")),
        up=Linear(weight=named(Layers, Mlp, Embed), bias=named(Layers, Mlp), In=("embed",)),
        table=Embedding(weight=named(Vocab, Embed)),
        norm=RMSNorm.init(Embed, eps=1e-5, use_weight=True),
    )


def arrays(model) -> dict[str, np.ndarray]:
    found = {}
    map_parameters(lambda p, x: found.__setitem__(p.path, np.asarray(x.array)), model)
    return found


def run(config: OptimizerConfig, steps: int = 4) -> list[dict[str, np.ndarray]]:
    """The parameters after each of some steps with random gradients of changing size."""
    optimizer = config.build(100)
    model = small(0)
    state = optimizer.init(model)  # pyright: ignore
    history = []
    for step in range(steps):
        updates, state = jax.jit(optimizer.update)(gradients(step), state, model)
        model = optax.apply_updates(model, updates)  # pyright: ignore
        history.append(arrays(model))
    return history


def gradients(step: int) -> Small:
    return jax.tree.map(lambda x: x * (0.1 + step), small(10 + step))


def as_torch(value: np.ndarray, path: str) -> list:
    """The parameters a framework without stacks would have: one for each layer, projections as [out, in]."""
    matrices = {"out.weight": (Embed.size, -1), "up.weight": (Mlp.size, -1)}
    layered = path.startswith(("out.", "up."))
    parts = value if layered else value[None]
    return [torch.tensor(p.reshape(matrices[path]) if path in matrices else p) for p in parts]


def torch_run(make, decayed: tuple[str, ...], weight_decay: float, steps: int = 4) -> list[dict[str, np.ndarray]]:
    start = arrays(small(0))
    parameters = {path: [torch.nn.Parameter(t) for t in as_torch(v, path)] for path, v in start.items()}
    groups = [
        {"params": [p for ps in (parameters[k] for k in parameters if (k in decayed) is decays) for p in ps],
         "weight_decay": weight_decay if decays else 0.0}
        for decays in (True, False)
    ]  # fmt: skip
    optimizer = make(groups)
    history = []
    for step in range(steps):
        for path, value in arrays(gradients(step)).items():
            for p, g in zip(parameters[path], as_torch(value, path), strict=True):
                p.grad = g.clone()
        optimizer.step()
        history.append(
            {k: np.stack([p.detach().numpy() for p in ps]).reshape(start[k].shape) for k, ps in parameters.items()}
        )
    return history


def assert_same(found, expected, rtol=2e-5, atol=2e-6):
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for path in ours:
            np.testing.assert_allclose(ours[path], theirs[path], rtol=rtol, atol=atol, err_msg=f"{path}, step {step}")


WEIGHTS = ("out.weight", "up.weight")


def test_adam_equals_torch_adamw():
    config = AdamConfig(learning_rate=0.02, weight_decay=0.3, max_grad_norm=None, beta2=0.98, **CONSTANT)
    expected = torch_run(lambda g: torch.optim.AdamW(g, lr=0.02, betas=(0.9, 0.98), eps=1e-8), WEIGHTS, 0.3)
    assert_same(run(config), expected)


def test_adafactor_equals_torch_adafactor():
    config = AdafactorConfig(learning_rate=0.01, weight_decay=0.0, max_grad_norm=None, scale_parameter=True, **CONSTANT)
    expected = torch_run(lambda g: torch.optim.Adafactor(g, lr=0.01), (), 0.0)
    assert_same(run(config), expected)


def test_adafactor_equals_its_formulas_in_numpy():
    config = AdafactorConfig(learning_rate=0.05, weight_decay=0.0, max_grad_norm=None, **CONSTANT)
    parameters = {path: as_torch(v, path) for path, v in arrays(small(0)).items()}
    values = {path: [p.numpy().astype(np.float64) for p in ps] for path, ps in parameters.items()}
    averages: dict = {}
    expected = []
    for step in range(4):
        beta = 1 - (step + 1.0) ** -0.8
        for path, value in arrays(gradients(step)).items():
            for n, tensor in enumerate(as_torch(value, path)):
                g = tensor.numpy().astype(np.float64)
                square = g * g + 1e-30
                if g.ndim == 2:
                    rows, columns = averages.get((path, n), (0.0, 0.0))
                    rows = beta * rows + (1 - beta) * square.mean(1)
                    columns = beta * columns + (1 - beta) * square.mean(0)
                    averages[path, n] = rows, columns
                    second = np.outer(rows, columns) / rows.mean()
                else:
                    second = beta * averages.get((path, n), 0.0) + (1 - beta) * square
                    averages[path, n] = second
                u = g / np.sqrt(second)
                values[path][n] = values[path][n] - 0.05 * u / max(1.0, np.sqrt((u * u).mean()))
        expected.append({p: np.stack(v).reshape(arrays(small(0))[p].shape) for p, v in values.items()})
    assert_same(run(config), expected)


def test_adafactor_never_factors_over_layers_and_keeps_names():
    state = AdafactorConfig().scaling().init(small(0))  # pyright: ignore
    axes = {leaf.path: dict(leaf.axes) for leaf in leaves(state)}
    assert axes["rows.out.weight"] == {"layers": 3, "embed": 6}
    assert axes["columns.out.weight"] == {"layers": 3, "kv_head": 2, "head_size": 4}
    assert axes["rows.up.weight"] == {"layers": 3, "mlp": 5}
    assert axes["columns.up.weight"] == {"layers": 3, "embed": 6}
    assert axes["full.up.bias"] == {"layers": 3, "mlp": 5}
    assert axes["full.norm.weight"] == {"embed": 6}
    assert axes["rows.table.weight"] == {"vocab": 7}
    assert axes["columns.table.weight"] == {"embed": 6}
    assert not any(path.startswith(("rows.norm", "columns.up.bias", "full.out")) for path in axes)


def test_sgd_equals_torch():
    config = SgdConfig(learning_rate=0.1, weight_decay=0.0, momentum=0.8, nesterov=True, max_grad_norm=None, **CONSTANT)
    assert_same(run(config), torch_run(lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.8, nesterov=True), (), 0.0))


def test_lion_and_rmsprop_equal_their_formulas():
    lion = run(LionConfig(learning_rate=0.1, weight_decay=0.0, max_grad_norm=None, **CONSTANT))
    rms = run(RmsPropConfig(learning_rate=0.1, weight_decay=0.0, max_grad_norm=None, **CONSTANT))
    for path, start in arrays(small(0)).items():
        value, moment = start.astype(np.float64), np.zeros_like(start, np.float64)
        slow, mean, square = start.astype(np.float64), 0.0, 0.0
        for step in range(4):
            g = arrays(gradients(step))[path].astype(np.float64)
            value = value - 0.1 * np.sign(0.9 * moment + 0.1 * g)
            moment = 0.95 * moment + 0.05 * g
            np.testing.assert_allclose(lion[step][path], value, rtol=1e-5, atol=1e-6)
            square = 0.99 * square + 0.01 * g * g
            mean = 0.9 * mean + 0.1 * g / np.sqrt(square / (1 - 0.99 ** (step + 1)))
            slow = slow - 0.1 * mean / (1 - 0.9 ** (step + 1))
            np.testing.assert_allclose(rms[step][path], slow, rtol=1e-4, atol=1e-5)


def in_numpy(config: MuonConfig, steps: int = 4) -> list[dict[str, np.ndarray]]:
    """Muon by its formulas in float64, matrix by matrix; AdamW for the table, the norm and the bias."""
    polynomial = {"quintic": (3.4445, -4.7750, 2.0315), "simple": (2.0, -1.5, 0.5)}[config.coefficient_type]
    start = arrays(small(0))
    values = {path: [p.numpy().astype(np.float64) for p in as_torch(v, path)] for path, v in start.items()}
    kept: dict = {}
    history = []
    for step in range(steps):
        gradient = {
            path: [g.numpy().astype(np.float64) for g in as_torch(v, path)]
            for path, v in arrays(gradients(step)).items()
        }
        others = [g for path in gradient if path not in WEIGHTS for g in gradient[path]]
        norm = np.sqrt(sum((g * g).sum() for g in others))
        for path, each in gradient.items():
            for n, g in enumerate(each):
                key = path, n
                if path in WEIGHTS:
                    kept[key] = config.momentum * kept.get(key, 0.0) + g
                    x = config.momentum * kept[key] + g if config.nesterov else kept[key]
                    x = x / (np.linalg.norm(x) + config.muon_epsilon)
                    u, s, v = np.linalg.svd(x, full_matrices=False)
                    for _ in range(config.backend_steps):
                        a, b, c = polynomial
                        s = a * s + b * s**3 + c * s**5
                    rows, columns = x.shape
                    scale = (
                        0.2 * max(rows, columns) ** 0.5 if config.use_kimi_scaling else max(1, rows / columns) ** 0.5
                    )
                    move = scale * (u * s) @ v + config.weight_decay * values[path][n]
                    values[path][n] = values[path][n] - config.learning_rate * move
                    continue
                g = g * min(1.0, config.max_grad_norm / norm)
                mean, square = kept.get(key, (0.0, 0.0))
                mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g * g
                kept[key] = mean, square
                ahead = mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.95 ** (step + 1))
                # Neither table, norm nor bias decays.
                values[path][n] = values[path][n] - config.adam_lr * ahead[0] / (np.sqrt(ahead[1]) + 1e-8)
        history.append({p: np.stack(v).reshape(start[p].shape) for p, v in values.items()})
    return history


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nesterov": False, "use_kimi_scaling": True, "weight_decay": 0.3},
        {"coefficient_type": "simple", "backend_steps": 12},
    ],
)
def test_muon_equals_its_formulas_in_numpy(changes):
    config = MuonConfig(learning_rate=0.05, adam_lr=0.02, **(CONSTANT | changes))
    assert_same(run(config), in_numpy(config), rtol=2e-4, atol=2e-5)


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adam():
    config = MuonConfig(learning_rate=1.0, momentum=0.0, nesterov=False, coefficient_type="simple", backend_steps=30)
    optimizer = dataclasses.replace(config, warmup=0, lr_schedule="constant").build(10)
    model = small(0)
    state = optimizer.init(model)  # pyright: ignore
    updates, state = jax.jit(optimizer.update)(gradients(0), state, model)
    for matrix in arrays(updates)["up.weight"]:
        product = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
        np.testing.assert_allclose(product, np.eye(len(product)), atol=1e-4)
    kinds = {leaf.path: leaf.path.split(".")[-3] for leaf in leaves(state) if leaf.path.endswith("weight")}
    assert sorted(path.rpartition("momentum.")[2] for path in kinds if ".momentum." in path) == sorted(WEIGHTS)
    assert {path.rpartition(".mu.")[2] for path in kinds if ".mu." in path} == {"table.weight", "norm.weight"}


def test_the_head_and_its_bias_are_not_muons():
    from levanter.optim.muon import is_hidden_matrix

    found = set()
    map_parameters(lambda p, _: found.add(p.path) if is_hidden_matrix(p) else None, abstract_model(tiny_config()))
    assert not any(word in path for path in found for word in ("lm_head", "embed", "norm"))
    stacked = "transformer.layers.stacked"
    projections = [f"self_attn.{k}_proj" for k in "qkvo"] + [f"mlp.{k}_proj" for k in ("gate", "up", "down")]
    assert found == {f"{stacked}.{name}.weight" for name in projections}


def test_the_state_has_the_same_paths_whatever_is_off():
    every = AdamConfig(max_grad_norm=1.0, weight_decay=0.1)
    none = AdamConfig(max_grad_norm=None, weight_decay=0.0)
    paths = [[leaf.path for leaf in leaves(config.build(9).init(small(0)))] for config in (every, none)]  # pyright: ignore
    assert paths[0] == paths[1] and any(path.startswith("1.mu.") for path in paths[0])
    skips = AdamConfig(skip_bad_steps=True).build(9).init(small(0))  # pyright: ignore
    more = {leaf.path: leaf.shape for leaf in leaves(skips) if leaf.path not in paths[0]}
    assert more == {"4.losses": (128,), "4.grad_norms": (128,), "4.seen": ()}
    clips = AdamConfig(clip_update_norm=ClipUpdateNormConfig(rolling_interval_length=8), adamc_weight_decay=True)
    more = {leaf.path: leaf.shape for leaf in leaves(clips.build(9).init(small(0))) if leaf.path not in paths[0]}  # pyright: ignore
    assert more == {"2.0.inner_state.count": (), "2.1.norms": (8,), "2.1.seen": ()}


def test_the_global_norm_is_clipped():
    config = SgdConfig(learning_rate=1.0, weight_decay=0.0, max_grad_norm=0.5, **CONSTANT)
    before, (after,) = arrays(small(0)), run(config, steps=1)
    moved = np.sqrt(sum(((before[p] - after[p]) ** 2).sum() for p in before))
    np.testing.assert_allclose(moved, 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("modules", "default", "decayed"),
    [
        (None, None, {"out.weight", "up.weight"}),
        (None, True, {"out.weight", "up.weight"}),
        (r".*table|Linear\.weight", None, {"table.weight", "out.weight", "up.weight"}),
        (["norm", "Embedding"], None, {"norm.weight", "table.weight"}),
        (["norm"], True, {"norm.weight", "out.weight", "up.weight"}),
        ([], False, set()),
    ],
)
def test_decay_masks(modules, default, decayed):
    mask = decay_mask(modules, default)
    assert mask is not None
    found = set()
    map_parameters(lambda p, _, on: found.add(p.path) if on else None, small(0), mask(small(0)))
    assert found == decayed


def test_without_masks_everything_decays():
    assert decay_mask(None, False) is None


EVERY = {
    "adam": AdamConfig(learning_rate=0.05, **CONSTANT),
    "adafactor": AdafactorConfig(learning_rate=0.05, scale_parameter=True, **CONSTANT),
    "lion": LionConfig(learning_rate=0.05, **CONSTANT),
    "rmsprop": RmsPropConfig(learning_rate=0.05, **CONSTANT),
    "sgd": SgdConfig(learning_rate=0.05, momentum=0.9, **CONSTANT),
    "muon": MuonConfig(learning_rate=0.05, adam_lr=0.01, weight_decay=0.1, **CONSTANT),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("adam", "2d"),
        ("adafactor", "4x2"),
        ("muon", "4x2"),
        *(
            pytest.param(kind, layout, marks=pytest.mark.slow)
            for kind, layout in [
                ("adam", "4x2"),
                ("adafactor", "2d"),
                ("lion", "4x2"),
                ("rmsprop", "4x2"),
                ("sgd", "4x2"),
                ("muon", "2d"),
            ]
        ),
    ],
)
def test_cut_over_a_mesh_it_is_the_same(kind, layout, devices):
    model_config = tiny_config()
    spec = MeshSpec.of(data=4, model=2)
    mesh = spec.build(devices)
    mappings = mappings_for(model_config, spec) if layout == "4x2" else llama_2d(model_config)
    template = abstract_model(model_config)
    optimizer = EVERY[kind].build(10)

    def values(seed):
        return with_arrays(template, {k: jnp.asarray(v) for k, v in random_arrays(model_config, seed=seed).items()})

    def cut(tree, prefix=""):
        def put(leaf, x):
            # A statistic of a parameter lies where the parameter's own mapping puts the axes it has.
            own = next((p for p in paths if leaf.path.endswith(p)), leaf.path)
            return jax.device_put(x, NamedSharding(mesh, mappings.params_at(own).spec(leaf.names)))

        return map_arrays(put, tree)

    def two_steps(model, state):
        for seed in (5, 6):
            updates, state = optimizer.update(values(seed), state, model)
            model = optax.apply_updates(model, updates)
        return model, state

    paths = [leaf.path for leaf in leaves(template)]
    model = values(0)
    state = optimizer.init(model)  # pyright: ignore
    expected = jax.jit(two_steps)(model, state)
    found = jax.jit(two_steps)(cut(model), cut(state))
    for path, a, b in zip(
        [leaf.path for leaf in leaves(expected)], jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6, err_msg=path)


def test_blocks_are_read_from_yaml(tmp_path):
    from dataclasses import dataclass, field

    @dataclass(frozen=True, kw_only=True)
    class Document:
        optimizer: OptimizerConfig = field(default_factory=AdamConfig)

    def read(text):
        (tmp_path / "c.yaml").write_text(text)
        return load(Document, ["--config_path", str(tmp_path / "c.yaml")]).optimizer

    adam = read("optimizer: {learning_rate: 1e-3, warmup: 500, lr_schedule: {type: inv_sqrt, timescale: 100}}")
    assert isinstance(adam, AdamConfig) and adam.beta2 == 0.95 and adam.warmup == 500
    assert isinstance(read("optimizer: {type: adafactor}"), AdafactorConfig)
    assert isinstance(read("optimizer: {type: muon, lr: 0.02, adam_lr: 1e-3}"), MuonConfig)
    skips = {
        "true": SkipStepConfig(rolling_interval_length=128, sigma_factor=6.0),
        "64": SkipStepConfig(rolling_interval_length=64, sigma_factor=6.0),
        "{rolling_interval_length: 32, sigma_factor: 3}": SkipStepConfig(rolling_interval_length=32, sigma_factor=3.0),
        "false": None,
    }
    for text, expected in skips.items():
        assert read(f"optimizer: {{type: adam, skip_bad_steps: {text}}}").outliers == expected
    with pytest.raises(ValueError, match="at least 2 steps are remembered"):
        read("optimizer: {type: adam, skip_bad_steps: 1}")
    clipped = read("optimizer: {type: adam, clip_update_norm: {sigma_factor: 2}, adamc_weight_decay: true}")
    assert clipped.clip_update_norm == ClipUpdateNormConfig(rolling_interval_length=128, sigma_factor=2.0)
    wrong = "optimizer: {type: adam, clip_update_norm: {}, update_rms_clipping: -1, min_lr_ratio: 2, beta2: 1}"
    with pytest.raises(ValueError) as refused:
        read(wrong)
    for message in ("update_rms_clipping: must be positive", "from 0 to 1, got 2", "beta2: must be from 0 to below 1"):
        assert message in str(refused.value)
    with pytest.raises(ValueError, match="keep one"):
        read("optimizer: {type: adam, clip_update_norm: {}, update_rms_clipping: 1}")
    with pytest.raises(ValueError, match="rolling_interval_length: must be at least 2"):
        read("optimizer: {type: adam, clip_update_norm: {rolling_interval_length: 1}}")
    with pytest.raises(ValueError, match="adafactor"):
        read("optimizer: {type: adafacto}")
