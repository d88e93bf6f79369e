"""What a layer waits for, beside the bytes by hand, compiled steps, and runs that others published."""

import pytest

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import parse_accelerator
from levanter.layers.attention import ring_splash
from levanter.mesh.context_parallel import choose, method_mapping
from levanter.models import LlamaConfig
from levanter.plan.comms import Network, axis_spans
from levanter.plan.context_parallel_cost import (
    ADDED_BYTES,
    HOP_SECONDS,
    LAID_OUT,
    ContextParallelCost,
    causal_share,
    context_parallel_cost,
    context_parallel_seconds,
)
from levanter.plan.target_from_name import pod_target

pytestmark = pytest.mark.quick

CUT = AxisMapping({"position": "context", "kv_head": "model"})
LLAMA_24 = dict(position=65_536, kv_head=12, q_heads_per_group=1, head_size=128)
"""The Llama of 24 layers of the compiled steps."""


def stock_8b(positions):
    return dict(position=positions, kv_head=8, q_heads_per_group=4, head_size=128)


def laid(pod, ways, model=1):
    mesh = MeshSpec.of(data=pod.devices // ways // model, replica=1, model=model, context=ways)
    return mesh, Network.of(mesh, pod)


def waited(word, sizes, network, **keys):
    mappings = Mappings(compute=CUT, attention=method_mapping(word, CUT))
    given = dict(rows=1, forward=1, backward=True, itemsize=2) | keys
    return context_parallel_seconds(sizes, mappings, network, **given)


def test_gathers_cross_links_and_memory():
    """Twice forward (the backward pass wants the keys again), and their gradients."""
    pod = parse_accelerator("v6e-8")
    mesh, network = laid(pod, 8)
    nbytes = 2 * 65_536 * 12 * 128 * 2
    once = network.seconds("all-gather", nbytes, axis_spans(mesh, "context")) + LAID_OUT * nbytes / 1638e9
    assert waited("gather", LLAMA_24, network) == pytest.approx(3 * once)
    assert waited("gather", LLAMA_24, network, backward=False) == pytest.approx(once)
    assert waited("gather", LLAMA_24, network, rows=4, forward=2) == pytest.approx(4 * 4 * once, rel=1e-3)


def test_heads_cross_links_as_queries_keys_values_and_results():
    mesh, network = laid(parse_accelerator("v6e-64"), 8)
    everything = 131_072 // 8 * (32 + 8 + 8 + 32) * 128 * 2
    once = network.seconds("all-to-all", everything, axis_spans(mesh, "context"))
    assert waited("heads", stock_8b(131_072), network) == pytest.approx(3 * once)


def test_a_ring_waits_for_what_kernels_do_not_hide():
    """Links of 90 GB/s, kernels at half of 918 TFLOP/s, sums over 1,638 GB/s."""
    _, network = laid(parse_accelerator("v6e-8"), 8)
    part = 65_536 // 8 * 12 * 128
    products = 2 * 2 * 65_536 / 2 * part / (459e12 * 8)
    forward = 2 * part * 2 / 90e9 + 1e-6 - products + ADDED_BYTES * part / 1638e9 + HOP_SECONDS
    # Queries, the gradients of the result and, in float32, theirs: 8 bytes, and the products of two kernels meanwhile.
    assert part * 8 / 90e9 < 3.5 * products
    backward = ADDED_BYTES * 3 * part / 1638e9 + HOP_SECONDS
    assert waited("ring", LLAMA_24, network) == pytest.approx(8 * (forward + backward), rel=1e-4)
    assert waited("ring", LLAMA_24, network, backward=False) == pytest.approx(8 * forward, rel=1e-4)
    # Under a window there is less to hide behind.
    assert waited("ring", LLAMA_24, network, attended=0.01) > waited("ring", LLAMA_24, network) + 0.002


def test_whole_positions_wait_for_nothing():
    mesh = MeshSpec.of(data=8, replica=1, model=1, context=1)
    assert waited("ring", LLAMA_24, Network.of(mesh, parse_accelerator("v6e-8"))) == 0.0


@pytest.mark.parametrize(
    ("windows", "share"),
    [
        ((), 0.5),
        (((None, 8),), 0.5),
        (((4096, 8),), 0.5),
        (((1024, 8),), 0.25 - 1 / 32),
        (((1024, 3), (None, 1)), (3 * 7 / 32 + 0.5) / 4),
    ],
)
def test_the_share_of_pairs_that_masks_show(windows, share):
    assert causal_share(windows, 4096) == pytest.approx(share)


@pytest.mark.parametrize(
    ("sizes", "pod", "ways", "exchange", "seconds"),
    [
        # Compiled (docs/performance.md): 6.44 s a step by gathers, 4.99 s in a ring; 4.63 s by heads.
        (LLAMA_24, "v6e-8", 8, "ring", dict(gather=9.57e-3, ring=8.57e-3)),
        (LLAMA_24, "v6e-8", 4, "heads", dict(gather=8.73e-3, heads=3.36e-3, ring=7.28e-3)),
        # Compiled: 34.2 s by heads, 34.7 s in a ring; gathers were not.
        (stock_8b(131_072), "v6e-64", 8, "gather", dict(gather=20.6e-3, heads=22.4e-3, ring=23.7e-3)),
        # Published for v5p-128, CP 64, the stock model: 1.31 against 1.68 s, 14.33 against 15.35 s.
        (stock_8b(65_536), "v5p-128", 64, "gather", dict(gather=2.94e-3, ring=14.5e-3)),
        (stock_8b(262_144), "v5p-128", 64, "gather", dict(gather=11.7e-3, ring=33.6e-3)),
        # Published for 2,048 positions a chip: 52.2 % of peak by heads, 52.9 % by gathers, 28.5 % in a ring.
        (stock_8b(8_192), "v5p-128", 4, "gather", dict(gather=0.607e-3, heads=0.705e-3, ring=1.25e-3)),
        (stock_8b(16_384), "v5p-128", 8, "heads", dict(gather=1.03e-3, heads=0.708e-3, ring=2.5e-3)),
    ],
)
def test_auto_is_what_compiled_and_published_runs_say(sizes, pod, ways, exchange, seconds):
    accelerator = parse_accelerator(pod)
    mesh, _ = laid(accelerator, ways)
    prices = ContextParallelCost(accelerator=accelerator, backward=True, itemsize=2, attended=0.5)
    words = ["gather", *(["heads"] if sizes["kv_head"] % ways == 0 else []), "ring"]
    found = {word: prices(sizes, Mappings(compute=CUT, attention=method_mapping(word, CUT)), mesh) for word in words}
    assert found == pytest.approx(seconds, rel=0.01)
    given = dict(kv_heads=sizes["kv_head"], head_size=128, positions=sizes["position"], heads_ways=1)
    assert choose(**given, position_ways=ways, hbm_bytes=accelerator.hbm_bytes, seconds=found).method == exchange


def test_prices_are_of_the_devices_that_there_are(monkeypatch):
    """By kind and number, as a run on real devices knows them; elsewhere there are none."""
    model = LlamaConfig(hidden_dim=4096, num_heads=32, num_kv_heads=8, max_seq_len=131_072)
    given = dict(positions=131_072, itemsize=2, backward=True)
    target = pod_target("2xv5p-128")
    found = context_parallel_cost(model, target, **given)
    assert found is not None and found.accelerator == parse_accelerator("2xv5p-128")
    assert (found.attended, found.rings, found.backward) == (0.5, True, True)
    assert context_parallel_cost(model, pod_target("h100x8"), **given) is None
    ring = Mappings(compute=CUT, attention=method_mapping("ring", CUT))

    def of_ring(pod, positions=131_072, **changes):
        prices = ContextParallelCost(**(dict(accelerator=pod, backward=True, itemsize=2, attended=0.5) | changes))
        return prices(stock_8b(positions), ring, laid(pod, 8)[0])

    pod = parse_accelerator("v6e-8")
    assert of_ring(pod) is not None
    # A run of positions is no whole block; this model's backend, or this JAX, has none; another mesh.
    assert of_ring(pod, positions=16 * 100) is None and of_ring(pod, rings=False) is None
    assert ContextParallelCost(accelerator=pod, backward=True, itemsize=2, attended=0.5)(
        stock_8b(131_072), ring, MeshSpec.of(context=4)
    ) is None  # fmt: skip
    monkeypatch.setattr(ring_splash, "obstacle", lambda: "none of its names")
    without = context_parallel_cost(model, target, **given)
    assert without is not None and not without.rings
