"""What a compiled step's cycles are spent on: nothing is lost or counted twice, and each kind is what its name says."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from haliax_ext.hlo import Scope, read_figures
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]
SMALL = (ROOT / "tests" / "golden" / "hlo" / "small_v4.txt").read_text(encoding="utf-8")
LAYERS = 3


def loaded_benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("step_costs", ROOT / "benchmarks" / "step_costs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


costs = loaded_benchmark()


def test_every_cycle_that_a_plan_counts_is_of_one_kind():
    found = costs.spent(SMALL)
    assert sum(costs.sums(found).values()) == read_figures(SMALL, MeshSpec.of(data=4, model=2)).total_cycles
    # Two products a layer, each with two gradients: in fusions that run once a layer.
    assert sum(each.times for each in found if each.kind == costs.MATMULS) == 6 * LAYERS


def test_a_shallow_step_is_counted_at_its_true_depth(monkeypatch):
    monkeypatch.setattr(costs, "SHALLOW", LAYERS)
    deep = read_figures(SMALL, MeshSpec.of(data=4, model=2), trips={LAYERS: 80})
    assert sum(costs.sums(costs.spent(SMALL, layers=80)).values()) == deep.total_cycles


@pytest.mark.parametrize(
    ("module", "opcodes", "kind"),
    [
        ("layers.self_attn.q_proj", {"convolution", "copy"}, "matmuls"),
        ("(unnamed)", {"broadcast"}, "zeros"),
        ("(unnamed)", {"copy"}, "other"),
        ("layers.self_attn.rope", {"slice", "negate"}, "rotation and layout"),
        ("microbatch.layers.self_attn.attention", {"copy"}, "rotation and layout"),
        ("layers.input_layernorm", {"reduce"}, "norms"),
        ("optimizer.watch_grads", {"reduce"}, "optimizer"),
        ("microbatch.lm_head.chunks", {"exponential"}, "head and table"),
        ("layers.mlp.up_proj", {"dynamic-slice"}, "weights"),
        ("microbatch.layers", {"dynamic-update-slice", "add"}, "saved"),
        ("layers", {"add"}, "stream"),
    ],
)
def test_kinds(module, opcodes, kind):
    assert costs.kind_of(Scope(module), opcodes) == kind


def test_texts_stand_side_by_side():
    lines = costs.table({"a": costs.spent(SMALL), "b": costs.spent(SMALL)})
    assert lines[0] == "| | a | b |" and lines[-1].startswith("| all |")
    assert lines[2].startswith("| matmuls | ")
