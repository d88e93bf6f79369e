"""Parameter groups against torch's, alone, in Muon, resumed, and what is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.llama_on_mesh import mappings_for, tiny_config
from helpers.train_steps import mesh_setup

from haliax_ext.abstract import abstract, leaves
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.config import parse_text
from levanter.optim import (
    AdamConfig,
    ClipUpdateNormConfig,
    GroupConfig,
    MuonConfig,
    OptimizerConfig,
    SgdConfig,
    SophiaHConfig,
)
from levanter.optim.groups import describe_groups
from levanter.optim.muon import is_hidden_matrix
from levanter.optim.parameters import map_parameters
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker

STEPS = 5
CONSTANT: dict[str, Any] = {"lr_schedule": "constant", "warmup": 0}
CONFIG = tiny_config(hidden_dim=32, intermediate_dim=48, num_heads=4)


def model(seed: int = 0) -> Any:
    """A tiny Llama with random parameters, norms included."""
    built = abstract(lambda: CONFIG.build(hax.Axis("vocab", 48), key=jax.random.PRNGKey(0)))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), built)


def arrays(tree: Any) -> dict[str, np.ndarray]:
    return {leaf.path: np.asarray(x) for leaf, x in zip(leaves(tree), jax.tree.leaves(tree), strict=True)}


def run(config: OptimizerConfig, *, platform: str | None = None) -> list[dict[str, np.ndarray]]:
    """The parameters after each of some steps with random gradients."""
    optimizer = config.build(STEPS, platform=platform)
    update, parameters = jax.jit(optimizer.update), model()
    state, history = optimizer.init(parameters), []
    for step in range(STEPS):
        updates, state = update(model(10 + step), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        history.append(arrays(parameters))
    return history


# Rates, betas, decay and schedule of each differ.
GROUPS = {
    "embedding": GroupConfig(learning_rate=0.3, beta1=0.8, beta2=0.995, weight_decay=0.01, epsilon=1e-6),
    "lm_head": GroupConfig(learning_rate=0.008, beta1=0.8, beta2=0.96, lr_schedule="linear", min_lr_ratio=0.0),
    "attention": GroupConfig(learning_rate_multiple=0.5, warmup=3, weight_decay=0.02),
}
PATHS = {"embedding": "embeddings", "lm_head": "lm_head", "attention": "self_attn"}


def grouped(**changes: Any) -> AdamConfig:
    return AdamConfig(**{"learning_rate": 0.02, "weight_decay": 0.1, "groups": GROUPS, **CONSTANT, **changes})


def test_the_steps_are_those_of_torch_s_param_groups():
    torch = pytest.importorskip("torch")
    config = grouped()
    assert config.groups is not None
    start = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in arrays(model()).items()}
    groups, members = [], {}
    for path, parameter in start.items():
        key = next((key for key, part in PATHS.items() if part in path), None)
        # The rest decays where the default mask lets it: not its norms.
        name = key or ("norm" if "norm" in path else "rest")
        members.setdefault(name, []).append(parameter)
    linear = lambda step: 1 - step / STEPS  # noqa: E731
    settings: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
        "embedding": (dict(lr=0.3, betas=(0.8, 0.995), weight_decay=0.01, eps=1e-6), lambda _: 1.0),
        # No decay is written for the head, so that of the optimizer holds.
        "lm_head": (dict(lr=0.008, betas=(0.8, 0.96), weight_decay=0.1), linear),
        "attention": (dict(lr=0.01, weight_decay=0.02), lambda step: min(1.0, step / 3)),
        "norm": (dict(lr=0.02, weight_decay=0.0), lambda _: 1.0),
        "rest": (dict(lr=0.02, weight_decay=0.1), lambda _: 1.0),
    }
    assert set(members) == set(settings)
    groups = [{"params": members[name], **values} for name, (values, _) in settings.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [at for _, at in settings.values()])
    for step, ours in enumerate(run(config)):
        for path, gradient in arrays(model(10 + step)).items():
            start[path].grad = torch.tensor(gradient)
        # One norm of all gradients, whatever their group.
        torch.nn.utils.clip_grad_norm_(list(start.values()), 1.0)
        optimizer.step()
        schedule.step()
        for path, parameter in start.items():
            np.testing.assert_allclose(ours[path], parameter.detach().numpy(), atol=3e-5, err_msg=f"{path} {step}")


@pytest.mark.parametrize(("kind", "platform"), [(AdamConfig, "cpu"), (MuonConfig, None)])
def test_groups_with_the_optimizer_s_settings_change_nothing_but_the_last_bits(kind, platform):
    config = kind(learning_rate=0.02, weight_decay=0.1, warmup=2)
    same = dataclasses.replace(config, groups={"norm": GroupConfig(), "**.mlp": GroupConfig(learning_rate_multiple=1)})
    for a, b in zip(run(config, platform=platform), run(same, platform=platform), strict=True):
        for path in a:
            np.testing.assert_allclose(a[path], b[path], atol=1e-5, err_msg=path)


def test_muon_s_matrices_and_its_others_take_the_settings_of_a_group():
    config = MuonConfig(learning_rate=0.02, adam_lr=0.01, max_grad_norm=None, **CONSTANT)
    settings = GroupConfig(learning_rate=0.5, momentum=0.5, beta1=0.5, weight_decay=0.1)
    layers = run(dataclasses.replace(config, groups={"transformer.layers": settings}))[-1]
    alike = {"learning_rate": 0.5, "adam_lr": 0.5, "momentum": 0.5, "beta1": 0.5, "weight_decay": 0.1}
    inside = run(dataclasses.replace(config, **alike, default_weight_decay_mask=False))[-1]
    outside = run(config)[-1]
    for path, values in layers.items():
        expected = inside if path.startswith("transformer.layers.") else outside
        np.testing.assert_allclose(values, expected[path], atol=1e-4, err_msg=path)


def test_muon_clips_its_others_of_all_groups_by_one_norm():
    config = MuonConfig(groups={"embedding": GroupConfig(), "lm_head": GroupConfig()}, max_grad_norm=0.5)
    grads = model(10)
    clipped, _ = config.clipping_before_groups().update(grads, config.clipping_before_groups().init(grads), grads)
    hidden = arrays(jax.tree.map(jnp.asarray, map_parameters(lambda p, x: x * float(is_hidden_matrix(p)), grads)))
    others = {path for path, values in hidden.items() if not values.any()}
    norm = np.sqrt(sum((arrays(grads)[path] ** 2).sum() for path in others))
    for path, values in arrays(clipped).items():
        factor = 0.5 / norm if path in others else 1.0
        np.testing.assert_allclose(values, arrays(grads)[path] * factor, rtol=1e-5, err_msg=path)


def test_the_order_of_the_keys_changes_no_path_of_the_state():
    config = grouped()
    assert config.groups is not None
    turned = dataclasses.replace(config, groups=dict(reversed(config.groups.items())))
    first, second = ([leaf.path for leaf in leaves(c.build(9).init(model()))] for c in (config, turned))
    assert first == second
    # Each parameter has one pair of moments, in the state of its group.
    moments = [path.partition(".mu.")[2] for path in first if ".mu." in path]
    assert sorted(moments) == sorted(arrays(model()))


def test_a_resumed_run_is_the_same_to_the_bit_and_its_state_is_cut_like_the_parameters(devices):
    groups = {"embedding": GROUPS["embedding"], "norm": GroupConfig(warmup=2)}
    setup = mesh_setup(4, 2, optimizer=grouped(groups=groups))
    mesh = setup.spec.build(devices[:8])
    plan, _, program = setup.programs()
    step, state, frozen = program.jit(mesh), setup.start(mesh), setup.frozen(mesh)
    for n in range(3):
        if n == 2:
            # Host and back: what a checkpoint keeps is all that the next step depends on.
            saved = [np.asarray(x) for x in jax.tree.leaves(state)]
            placed = [jax.device_put(x, s.sharding) for x, s in zip(saved, jax.tree.leaves(state), strict=True)]
            again = jax.tree.unflatten(jax.tree.structure(state), placed)
        state, _ = step(state, frozen, setup.batch(n, mesh))
    resumed, _ = step(again, frozen, setup.batch(2, mesh))
    for leaf, a, b in zip(leaves(state), jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=leaf.path)
        assert a.sharding.is_equivalent_to(plan.whole.sharding(leaf.path, mesh), a.ndim)
    specs = {planned.leaf.path: planned.spec for planned in plan.whole.leaves}
    for path, spec in specs.items():
        if ".mu." in path:
            assert spec == specs["model." + path.partition(".mu.")[2]], path


def test_a_build_gets_the_mappings_and_an_older_one_is_called_without():
    received = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Placed(SgdConfig):
        def stages(self, schedule, *, platform=None, mappings: Mappings | None = None):
            received.append(mappings)
            return super().stages(schedule, platform=platform)

    mappings = mappings_for(CONFIG, MeshSpec.of(data=2, model=2))
    Placed().build_for(9, "cpu", mappings)
    Placed(groups={"norm": GroupConfig()}).build_for(9, "cpu", mappings)
    AdamConfig().build_for(9, "cpu", mappings)
    assert received == [mappings] * 3


def refusal(groups: dict[str, GroupConfig]) -> list[str]:
    with pytest.raises(ValueError) as info:
        AdamConfig(groups=groups).build(9).init(model())
    return str(info.value).splitlines()


def test_everything_that_is_wrong_with_the_patterns_is_listed_with_the_nearest():
    keys = ("embeding", "**.self_atn", "**.q_proj", "attention", "bias", "norm", "transformer.norm")
    lines = refusal(dict.fromkeys(keys, GroupConfig()))
    assert len(lines) == 3 + 2
    hints = {"**.self_atn": "mean **.self_attn", "bias": "has the role bias", "embeding": "mean embedding"}
    for line, (key, hint) in zip(lines, hints.items(), strict=False):
        assert line.startswith(f"optimizer.groups[{key!r}] matches no parameter") and hint in line, line
    assert "q_proj.weight is matched by '**.q_proj' and 'attention'" in lines[3]
    assert "transformer.norm.weight is matched by 'norm' and 'transformer.norm'" in lines[4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamConfig(groups={"norm": GroupConfig(momentum=0.5)}), "groups['norm']: momentum is no setting"),
        (lambda: AdamConfig(groups={"rest": GroupConfig()}), "the name of what no key selects"),
        (lambda: AdamConfig(groups={}), "groups: is empty"),
        (lambda: GroupConfig(learning_rate=0.1, learning_rate_multiple=2.0), "these are alternatives"),
        (lambda: GroupConfig(lr_schedule="cosin"), "did you mean cosine"),
        (lambda: MuonConfig(groups={"norm": GroupConfig(learning_rate=0.0)}), "groups['norm']: learning_rate: must be"),
        (lambda: SophiaHConfig(groups={"norm": GroupConfig()}), "groups: not supported with an estimated curvature"),
        (
            lambda: AdamConfig(groups={"norm": GroupConfig()}, clip_update_norm=ClipUpdateNormConfig()),
            "clip_update_norm: not supported with groups",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError) as info:
        make()
    assert message in str(info.value)


DOCUMENT = """
model: {{type: llama, hidden_dim: 16, intermediate_dim: 32, num_layers: 2, num_heads: 2, num_kv_heads: 2,
        max_seq_len: 16}}
data:
  tokenizer: passthrough
  vocab_size: 61
  cache_dir: null
  components:
    numbers: {{type: direct, datasets: {{train: ["{text}"]}}}}
optimizer:
  learning_rate: 3e-4
  {groups}
trainer:
  tracker: {{type: noop}}
  train_batch_size: 8
  num_train_steps: 3
  log_dir: {folder}/logs
  checkpointer: {{base_path: {folder}/checkpoints, keep: []}}
  mesh: {{axes: {{data: 4, model: 2}}, shared_mapping: {{vocab: model}}}}
"""
TEXT = " ".join(str(n * n % 61) for n in range(600))
WRITTEN = "groups: {embedding: {learning_rate: 0.3, beta1: 0.8, lr_schedule: linear}, '**.mlp': {warmup: 30}}"


def test_a_run_trains_its_groups_and_its_plan_shows_them(tmp_path, devices):
    local = Target(name="local", platform="cpu", kind="cpu", devices=8)
    plain, grouped = (
        describe(parse_text(TrainLmConfig, DOCUMENT.format(groups=groups, text=TEXT, folder=tmp_path)), local).check()
        for groups in ("warmup: 0", WRITTEN)
    )
    assert not any(check.name == "parameter group" for check in plain.checks)
    lines = [check.message for check in grouped.checks if check.name == "parameter group"]
    assert lines == list(describe_groups(grouped.work.config.optimizer.groups or {}, grouped.work.state.model))
    assert lines[0] == "**.mlp: 3 arrays, 3,072 parameters: warmup 30"
    assert lines[1] == "embedding: 1 array, 992 parameters: learning_rate 0.3, lr_schedule linear, beta1 0.8"
    assert lines[2].startswith("rest: ") and lines[2].endswith("the optimizer's settings")
    assert [check.message for check in grouped.checks if check.name == "schedule"] == [
        "groups['**.mlp']: warmup 30 is truncated: the run has 3 steps, and ends before its peak is reached"
    ]
    result = execute(grouped, grouped.mesh.build(devices), Session(run_id="run", tracker=NoopTracker()))
    assert result.taken == 3


def test_a_pattern_without_parameters_is_refused_by_the_plan(tmp_path):
    text = DOCUMENT.format(groups="groups: {'**.mpl': {warmup: 3}}", text=TEXT, folder=tmp_path)
    with pytest.raises(ValueError, match=r"optimizer.groups\['\*\*.mpl'\] matches no parameter .* mean \*\*.mlp"):
        describe(parse_text(TrainLmConfig, text), Target(name="local", platform="cpu", kind="cpu", devices=8))
