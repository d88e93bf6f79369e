"""What binds loading on a host: each ceiling by hand."""

import math

import numpy as np
import pytest
from helpers.memory_source import MemorySource
from helpers.tiny_llama import tiny_leaves, tiny_rules, tiny_tensors

from haliax_ext.loading import plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.hardware import parse_accelerator
from levanter.plan.load_budget import load_budget, load_ceilings
from levanter.plan.report.view import load_ceilings as said_of

pytestmark = pytest.mark.quick

BOTH = {"store": 2.0, "interpreter": 2.0}
BY_HAND = {
    # 240 processors at 1.9 s a gigabyte; four chips at 15 GB/s; no network is published.
    "v4-256": BOTH | {"PCIe": 60.0, "processors": 126.3},
    "v5p-64": BOTH | {"network": 25.0, "PCIe": 60.0, "processors": 109.5},
    "v6e-8": BOTH | {"network": 50.0, "processors": 94.74, "PCIe": 120.0},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_ceilings(name):
    found = load_ceilings(parse_accelerator(name))
    assert {each.name: each.gigabytes_per_second for each in found} == pytest.approx(BY_HAND[name], rel=1e-3)
    assert [each.name for each in found] == list(BY_HAND[name]), "the lowest first"


@pytest.mark.parametrize("name", ["h100-8", "tpu7x-8"])
def test_hosts_that_are_not_known_have_none(name):
    assert load_ceilings(parse_accelerator(name)) == ()


def test_the_lowest_ceiling_is_the_time():
    mesh = MeshSpec.of(data=4, model=2)
    sharding = plan_sharding(tiny_leaves(), Mappings(params=AxisMapping({"vocab": "data"})), mesh).check()
    source = MemorySource(tiny_tensors())
    plan = plan_loading(sharding, tiny_rules(), source, hosts=np.arange(8).reshape(4, 2) // 4)
    budget = load_budget(plan, ceilings=load_ceilings(parse_accelerator("v4-16")))
    assert math.isclose(budget.store_seconds, max(plan.bytes_by_host) / 2e9)
    said = said_of(budget)
    assert said == (
        "bound by the store (assumed), 2.00 GB/s a host; interpreter (counted elsewhere) 2.00, PCIe (not verified) 60.0"
    )
