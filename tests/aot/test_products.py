"""Products as the TPU compiler sees them: FLOPs of a cycle, and grouped products against a batch of the same."""

import importlib.util
from pathlib import Path

import pytest

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.kernel_cost import GROUPED, grouped_product, kernel_cost

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]
PRODUCTS = f"{Path(__file__).parent / 'matmul_programs.py'}:products"
SIZES = {"rows": 16384, "inner": 6144, "outer": 16384, "groups": 8}


def compiled(target: str, *names: str, **sizes: int) -> dict[str, Compiled]:
    found = compile_programs(PRODUCTS, SIZES | sizes, target=target, programs=names)
    assert all(isinstance(one, Compiled) for one in found)
    return {one.name: one for one in found if isinstance(one, Compiled)}


@pytest.mark.parametrize("target", ["v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"])
def test_no_product_does_more_flops_a_cycle_than_the_clock_allows(target):
    """And a large one does most of them: the clock belongs to these cycles."""
    (dense,) = compiled(target, "dense").values()
    pod = parse_accelerator(target)
    assert dense.figures is not None and pod.generation.clock_hz is not None
    flops = 2 * SIZES["rows"] * SIZES["inner"] * SIZES["outer"]
    of_peak = flops / (dense.figures.total_cycles / pod.generation.clock_hz) / pod.peak_flops()
    assert 0.6 < of_peak <= 1.0


@pytest.mark.parametrize(("target", "tile"), [("v6e-8", 256), ("v5p-8", 128)])
def test_a_grouped_product_costs_about_what_a_batch_of_the_same_products_costs(target, tile):
    found = compiled(target, "grouped", "batched")
    grouped, batched, pod = found["grouped"].figures, found["batched"].figures, parse_accelerator(target)
    assert grouped is not None and batched is not None and pod.generation.clock_hz is not None
    assert not grouped.unestimated
    (kernel,) = (kernel for kernel in grouped.kernels if grouped_product(kernel) is not None)
    product, cost = grouped_product(kernel), kernel_cost(kernel, pod)
    assert product is not None and (product.groups, product.rows, product.tile) == (8, 16384, tile)
    assert product.flops == 2 * SIZES["rows"] * SIZES["inner"] * SIZES["outer"]
    # The batch has no tiles that are gone through twice, and the compiler gives it 0.65 to 0.88 of peak.
    seconds = batched.total_cycles / pod.generation.clock_hz
    again = product.computed / product.flops
    assert cost is not None and 0.85 < cost.expected / again / seconds < 0.95 / GROUPED
