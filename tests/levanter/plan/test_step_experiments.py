"""`benchmarks/step_experiments.py`: what an experiment changes of a step's functions, and what it does not."""

import importlib.util
import math
import sys
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from levanter.layers.attention import grouped
from levanter.layers.linear import Dense, Linear
from levanter.layers.norm import RMSNorm
from levanter.layers.rotary import DefaultRotaryConfig, apply_rotary

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def experiments(monkeypatch):
    """The benchmark; what its experiments change is as it was afterwards."""
    monkeypatch.setattr(grouped, "apply_rotary", grouped.apply_rotary)
    monkeypatch.setattr(Dense, "dot", Dense.dot)
    monkeypatch.setattr(RMSNorm, "__call__", RMSNorm.__call__)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return loaded("step_experiments")


def test_every_slow_row_has_experiments_for_its_three_largest_costs(experiments):
    published = loaded("published_step_times")
    own = {name: found[experiments.AS_IT_IS].high for name, found in experiments.kept().items()}
    assert set(own) <= set(experiments.ROWS) <= {case.config for case in published.CASES}
    assert all(value > 1.1 for value in own.values())
    for name, found in experiments.kept().items():
        before = found[experiments.AS_IT_IS].kinds
        aimed_at = {
            experiments.EXPERIMENTS[each].cost for together in experiments.ROWS[name] for each in together.split("+")
        }
        # Or an experiment that was aimed at another cost took most of this one away.
        taken = {kind for kind in before for after in found.values() if after.kinds.get(kind, 0) < before[kind] / 2}
        assert {*[kind for kind in before if kind != "matmuls"][:3]} <= aimed_at | taken, name


def test_rows_as_they_are_are_those_of_the_published_table(experiments):
    """The step of before is today's: what the table of published speeds has been compiled from."""
    published = loaded("published_step_times").read()
    for name, found in experiments.kept().items():
        step = found[experiments.AS_IT_IS]
        assert step.seconds == pytest.approx(published[name].cycles, rel=1e-9), name
        assert step.exposed == pytest.approx(published[name].exposed, rel=1e-9), name


def test_what_is_kept_is_of_the_rows_and_their_experiments(experiments):
    for name, found in experiments.kept().items():
        assert set(found) == {experiments.AS_IT_IS, *experiments.ROWS[name]}, name


def test_the_tables_in_the_documentation_are_of_these_figures(experiments):
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    for mark, lines in (
        ("costs", experiments.costs(experiments.kept())),
        ("experiments", experiments.table(experiments.kept())),
    ):
        assert text.split(f"<!-- {mark} -->")[1].strip().splitlines() == lines


def test_a_rotation_by_a_product_changes_no_bit(experiments):
    Batch, Pos, Head, HeadSize = Axis("batch", 2), Axis("position", 5), Axis("head", 3), Axis("head_size", 16)
    x = hax.random.normal(jax.random.key(0), (Batch, Pos, Head, HeadSize), dtype=jnp.bfloat16)
    tables = DefaultRotaryConfig().tables(HeadSize, hax.arange(Pos), length=Pos.size)
    expected = apply_rotary(x, *tables, HeadSize)
    experiments.EXPERIMENTS["rotation"].patch()
    assert grouped.apply_rotary is not apply_rotary
    found = grouped.apply_rotary(x, *tables, HeadSize)
    assert found.axes == expected.axes and found.dtype == expected.dtype
    np.testing.assert_array_equal(found.array, expected.array)


@pytest.mark.parametrize("into_heads", [True, False])
def test_flat_heads_are_the_same_product(experiments, into_heads: bool):
    Pos, Embed = Axis("position", 5), Axis("embed", 8)
    heads = (Axis("kv_head", 2), Axis("q_heads_per_group", 3), Axis("head_size", 4))
    In, Out = ((Embed,), heads) if into_heads else (heads, (Embed,))
    module = Linear.init(In, Out, scale=1.0, use_bias=False, key=jax.random.key(0))
    x = hax.random.normal(jax.random.key(1), (Pos, *In))
    expected = module(x)
    experiments.EXPERIMENTS["flat_heads"].patch()
    found = module(x)
    assert math.prod(found.array.shape) == math.prod(expected.array.shape)
    np.testing.assert_allclose(found.rearrange(expected.axes).array, expected.array, rtol=1e-5, atol=1e-5)


def test_without_norms_a_norm_does_nothing(experiments):
    Embed = Axis("embed", 8)
    norm = RMSNorm.init(Embed, eps=1e-5, use_weight=True)
    x = 3 * hax.random.normal(jax.random.key(0), Embed)
    assert not np.allclose(norm(x).array, x.array)
    experiments.EXPERIMENTS["no_norms"].patch()
    np.testing.assert_array_equal(norm(x).array, x.array)
