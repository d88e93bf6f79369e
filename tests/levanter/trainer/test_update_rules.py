"""Parameters that a rule updates: the balance bias of the toy router, against NumPy, in parts, on meshes, resumed."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.toy_router import STEPS, Router, RouterObjective, RouterRun, rows

from haliax_ext.abstract import leaves
from levanter.checkpoint import Checkpointer, RestoreTarget, latest, restore
from levanter.trainer.update_rules import UpdateRule, split_by_rules

BIAS, RATE = "model.balance_bias", 0.125
BALANCED = RouterObjective(rate=RATE)


@cache
def reference():
    """The metrics and the state of a run on one device without accumulation."""
    return RouterRun(objective=BALANCED).run()


def test_one_step_is_the_sign_rule_and_the_optimizer_knows_nothing_of_the_bias(devices):
    run = RouterRun(objective=BALANCED)
    start = run.start() | {BIAS: np.array([0.5, 0, 0, -0.5], np.float32)}
    (metrics,), state = run.run(dict(start), stop=1)
    logits = rows(0)["inputs"] @ start["model.router"].T + start[BIAS]
    load = np.bincount(logits.argmax(-1), minlength=4)
    assert load.std() > 0
    np.testing.assert_array_equal(state[BIAS], start[BIAS] + np.float32(RATE) * np.sign(load.mean() - load))
    assert [path for path in state if "balance_bias" in path] == [BIAS], "no statistics"
    assert "load" not in metrics.terms
    # The norms are those of the other parameters.
    moved = np.concatenate([start[f"model.{name}"].ravel() for name in ("router", "experts")])
    np.testing.assert_allclose(metrics.parameter_norm, np.linalg.norm(moved), rtol=1e-6)
    plan, _ = run.programs()
    assert plan.ruled == {"balance_bias"}
    assert [leaf.path for leaf in leaves(plan.moved_by_gradients(Router.init(jax.random.key(0))))] == [
        "router",
        "experts",
    ]
    without = RouterRun().programs()[0].bytes_by_group["gradients"]
    assert plan.bytes_by_group["gradients"] == without - 4 * 4


@pytest.mark.parametrize(("count", "accumulation"), [(1, 4), (8, 1), (8, 2)])
def test_the_bias_has_the_same_bits_on_every_mesh_and_in_parts(devices, count, accumulation):
    _, expected = reference()
    _, state = RouterRun(devices=count, accumulation=accumulation, objective=BALANCED).run()
    assert np.abs(expected[BIAS]).max() > 0
    assert state[BIAS].tobytes() == expected[BIAS].tobytes()
    assert state.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(state[path], array, rtol=1e-4, atol=1e-6, err_msg=path)


def test_a_resumed_run_has_the_same_bits(devices, tmp_path):
    run = RouterRun(devices=8, objective=BALANCED)
    _, expected = run.run()
    _, half = run.run(stop=STEPS // 2)
    mesh = (plan := run.programs()[0].whole).mesh.build(devices)
    placed = {path: jax.device_put(array, plan.sharding(path, mesh)) for path, array in half.items()}
    with Checkpointer(str(tmp_path), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        checkpointer.save(STEPS // 2, placed, {})
    ref = latest(str(tmp_path))
    assert ref is not None
    targets = {p: RestoreTarget(shape=a.shape, dtype=a.dtype, sharding=a.sharding) for p, a in placed.items()}
    restored = {path: np.asarray(array) for path, array in restore(ref, targets).items()}
    _, resumed = run.run(restored, first=STEPS // 2)
    for path, array in expected.items():
        assert resumed[path].tobytes() == array.tobytes(), path


def test_a_rule_that_matches_nothing_and_two_for_one_parameter_are_errors():
    model = jax.eval_shape(lambda: Router.init(jax.random.key(0)))
    rules = [UpdateRule(pattern=p, update=lambda old, _: old) for p in ("bias", "balance_bias", "**.balance_bias")]
    with pytest.raises(ValueError, match=r"'bias' matches no trained parameter.*like router\n.*has 2 update rules"):
        split_by_rules(rules, model)
    kept, ruled = split_by_rules(rules[1:2], model)
    assert [leaf.path for leaf in leaves(kept)] == ["router", "experts"]
    assert [leaf.path for leaf in leaves(ruled)] == ["balance_bias"]


def test_statistics_are_exact_sums():
    sums = BALANCED.zeros()
    assert sums["load"].shape == (4,) and tuple(sums) == ("loss", "penalty", "load")
    scaled = BALANCED._scaled(
        sums.__class__({**sums, "loss": jnp.float32(4), "load": jnp.arange(4.0)}), jnp.float32(0.1)
    )
    assert scaled["load"].tolist() == [0, 1, 2, 3] and float(scaled["loss"]) == pytest.approx(0.4)
