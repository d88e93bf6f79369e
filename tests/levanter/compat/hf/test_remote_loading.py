"""Loading over a network: values, bytes that a server sent against those of the plan, memory, interruption."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
from helpers.object_store import Fault, ObjectStore
from safetensors.numpy import save_file

from haliax_ext.abstract import abstract, leaves
from haliax_ext.abstract_source import ExpectedSource
from haliax_ext.host_reader import BufferPool, Readers
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.read_scheduler import byte_ranges
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.repository import RemoteFolder
from levanter.io.ranges import RangeError, fetcher
from levanter.models.gpt2 import family as gpt2_weights
from levanter.models.gpt2.config import Gpt2Config
from levanter.models.gpt_neox import family as neox_weights
from levanter.models.gpt_neox.config import GptNeoxConfig
from levanter.models.llama import weights as llama_weights
from levanter.models.llama.config import LlamaConfig

MIB = 1 << 20
MESH = MeshSpec.of(data=4, model=2)
SIZES = {"hidden_dim": 64, "intermediate_dim": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 96}
FAMILIES = {
    "llama": (LlamaConfig(**SIZES, num_kv_heads=2), llama_weights.rules),
    "gpt_neox": (GptNeoxConfig(**SIZES), neox_weights.rules),
    "gpt2": (Gpt2Config(**SIZES), gpt2_weights.rules),
}
MAPPINGS = {
    "outer": {"vocab": "data", "mlp": "data", "kv_head": "model"},
    "inner": {"embed": "data"},
    "both": {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
}


def planned(family: str, mapping, source=None, *, hosts=None, dtype=None):
    """Sharding plan, load plan, and the tensors that the family expects."""
    config, rules = FAMILIES[family]
    model = abstract(config.build, hax.Axis("vocab", SIZES["vocab_size"]), key=jax.random.PRNGKey(0))
    sharding = plan_sharding(leaves(model), Mappings(params=AxisMapping(mapping)), MESH).check()
    expected = ExpectedSource.of(rules(config), leaves(model), dtype=np.dtype(np.float32))
    plan = plan_loading(sharding, rules(config), source or expected, hosts=hosts, dtype=dtype)
    return sharding, plan, expected.tensors


def checkpoint(folder: Path, family: str) -> dict[str, np.ndarray]:
    """Writes random weights under the names of Hugging Face; returns them."""
    rng = np.random.default_rng(5)
    _, _, expected = planned(family, {})
    made = {name: rng.normal(size=info.shape).astype(np.float32) for name, info in expected.items()}
    save_file(made, folder / "model.safetensors")
    return made


@pytest.fixture
def unhurried(monkeypatch):
    """Nothing is slow or silent: nothing is asked for twice because this machine stood still for a moment."""
    monkeypatch.setattr(fetcher.Durations, "slow_seconds", lambda durations, nbytes: float("inf"))
    monkeypatch.setattr(fetcher.Durations, "silent_seconds", float("inf"))


def assembled_qkv(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v of GPT-NeoX by hand: `[layers, heads, 3, size, embed]`, taken apart."""
    fused = np.stack([tensors[f"gpt_neox.layers.{n}.attention.query_key_value.weight"] for n in range(3)])
    apart = fused.reshape(3, 4, 3, 16, 64)
    return {name: apart[:, :, i] for i, name in enumerate(("q_proj", "k_proj", "v_proj"))}


def columns_qkv(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """q, k and v of GPT-2 by hand: thirds of the columns of `[layers, embed, 3 × heads × size]`."""
    fused = np.stack([tensors[f"transformer.h.{n}.attn.c_attn.weight"] for n in range(3)])
    parts = fused.reshape(3, 64, 3, 4, 16)
    return {name: parts[:, :, i].transpose(0, 2, 3, 1) for i, name in enumerate(("q_proj", "k_proj", "v_proj"))}


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_plan_says_is_what_the_server_sends(family, mapping, tmp_path, devices, unhurried):
    """Through failures and all: bytes that were wanted once are counted once, and are the plan's."""
    tensors = checkpoint(tmp_path, family)
    broken = Fault(status=503)
    with ObjectStore(
        {"m/model.safetensors": tmp_path / "model.safetensors"},
        fault=lambda r: broken if r.number % 11 == 10 and not r.seen else None,
    ) as store:
        source = open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False)
        sharding, plan, _ = planned(family, MAPPINGS[mapping], source)
        before, opened = store.sent, source.remote.tally
        seen = []
        found = load(plan, sharding, source, MESH.build(devices), progress=seen.append)
        tally = source.remote.tally
    total = sum(each.nbytes for each in tensors.values())
    assert plan.amplification == 1.0 and plan.source_bytes == total
    assert source.bytes_read == found.report.bytes_read == total == store.sent - before
    assert tally.wanted_bytes - opened.wanted_bytes == total and tally.extra_bytes == 0
    assert tally.retried > 0 and f"{tally.retried} retried" in found.report.network
    assert "connections" in str(seen[-1]) and "connections" in str(found.report)
    by_name = {path.split(".")[-2]: np.asarray(array) for path, array in found.items() if path.endswith("weight")}
    for name, values in {"gpt_neox": assembled_qkv, "gpt2": columns_qkv, "llama": lambda _: {}}[family](
        tensors
    ).items():
        np.testing.assert_array_equal(by_name[name].reshape(values.shape), values)
    ends = ("down_proj.weight", "dense_4h_to_h.weight", "mlp.c_proj.weight")
    down = np.stack([tensors[name] for name in sorted(tensors) if name.endswith(ends)])
    np.testing.assert_array_equal(by_name["down_proj"], down.transpose(0, 2, 1) if family == "gpt2" else down)


@pytest.mark.parametrize(("mapping", "runs"), [({}, 1), ({"kv_head": "model"}, 2), ({"kv_head": "data"}, 4)])
def test_interleaved_heads_are_asked_for_once_for_all_three(mapping, runs, tmp_path, devices, unhurried):
    """By the server's own log: a run of a fused tensor for each part of its heads, not for each head of each leaf."""
    tensors = checkpoint(tmp_path, "gpt_neox")
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}) as store:
        source = open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False)
        sharding, plan, _ = planned("gpt_neox", mapping, source)
        seen = len(store.log)
        load(plan, sharding, source, MESH.build(devices))
        for n in range(3):
            name = f"gpt_neox.layers.{n}.attention.query_key_value.weight"
            (whole,) = source.byte_ranges(name, tuple(slice(0, size) for size in tensors[name].shape))
            asked = sorted((r.start, r.stop) for r in store.log[seen:] if r.start < whole.stop and r.stop > whole.start)
            # The first and the last may have small neighbours too.
            inside = [(max(a, whole.start), min(b, whole.stop)) for a, b in asked]
            size = whole.nbytes // runs
            assert inside == [(whole.start + i * size, whole.start + (i + 1) * size) for i in range(runs)]


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_host_asks_for_the_bytes_that_the_plan_gives_it(family, mapping, hosts, tmp_path):
    """Interleaved heads and inner axes: the ranges that a reader asks a server for, summed, against the plan."""
    checkpoint(tmp_path, family)
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}) as store:
        source = open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False)
        layout = np.arange(8).reshape(4, 2) // (8 // hosts)
        _, plan, _ = planned(family, MAPPINGS[mapping], source, hosts=layout)
        listed = [sum(r.nbytes for r in byte_ranges(plan, source, host)) for host in range(hosts)]
    assert listed == list(plan.bytes_by_host)
    assert sum(listed) <= 1.02 * plan.source_bytes


def test_memory_of_readers_is_a_part_of_the_budget():
    class Far:
        reads_at_once, read_bytes, hedge_bytes = 128, 4 * MIB, 16 * MIB

    for budget in (64 * MIB, 256 * MIB, 4096 * MIB):
        readers = Readers.of(Far(), budget, threads=None, read_bytes=None)  # type: ignore[arg-type]
        small = readers.threads * readers.read_bytes // 16
        assert readers.buffers * readers.read_bytes <= budget // 4 and readers.threads == 128
        assert readers.held_bytes == min(budget, readers.buffers * readers.read_bytes + small + 16 * MIB)
        # At 30 ms and 20 MB/s it takes thirteen reads of 2 MiB side by side, or nineteen of 1 MiB, for 200 MB/s.
        assert readers.read_bytes == {64: 1, 256: 1, 4096: 4}[budget // MIB] * MIB
        assert readers.buffers == {64: 16, 256: 32, 4096: 128}[budget // MIB]
    near = Readers.of(None, 256 * MIB, threads=3, read_bytes=None)
    assert (near.threads, near.buffers, near.held_bytes) == (3, 3, 0)


def test_buffers_are_shared_and_a_thread_more_waits():
    pool, order = BufferPool(1024, 2), []
    inside, go = threading.Semaphore(0), threading.Event()

    def use(number: int) -> None:
        with pool.borrow(np.dtype(np.uint8), (1000,)) as buffer:
            buffer[:] = number
            inside.release()
            go.wait(100)
            assert (buffer == number).all()
            order.append(number)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        assert inside.acquire(timeout=100)
    assert not inside.acquire(timeout=0.2), "a third"
    with pool.borrow(np.dtype(np.uint8), (64,)) as small:
        assert small.nbytes == 64, "a small one waits for nobody"
    go.set()
    for thread in threads:
        thread.join(100)
    assert sorted(order) == list(range(6))


def test_a_failure_ends_a_load_while_other_ranges_are_stalled(tmp_path, devices):
    """One range is refused for good; the others would take an hour."""
    checkpoint(tmp_path, "llama")
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}) as store:
        source = open_weights(RemoteFolder(f"{store.url}/m"), allow_pickle=False)
        sharding, plan, _ = planned("llama", MAPPINGS["both"], source)
        first = store.requests
        store.fault = lambda r: Fault(status=403) if r.number == first + 2 else Fault(stall_after=8)
        with pytest.raises(RangeError, match="the server refuses bytes"):
            load(plan, sharding, source, MESH.build(devices))
        deadline = time.monotonic() + 100
        while any(each.name.startswith("load_") for each in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [each.name for each in threading.enumerate() if each.name.startswith("load_")]


@pytest.mark.slow
def test_memory_stays_within_the_budget_on_a_slow_network(tmp_path):
    """A load of 96 MiB with room for 24: in a process of its own, what is resident beyond the arrays."""
    rows = 8192
    tensors = {f"w{n}": np.full((rows, 1024), n, np.float32) for n in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with ObjectStore({"m/model.safetensors": tmp_path / "model.safetensors"}, latency=0.01, total=100e6) as store:
        program = f"""
import jax, json, numpy as np
from haliax_ext.abstract import Leaf
from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.rules import WeightRule, WeightRules
from levanter.compat.hf.index import open_weights
from levanter.compat.hf.repository import RemoteFolder
source = open_weights(RemoteFolder("{store.url}/m"), allow_pickle=False)
axes = (("rows", {rows}), ("columns", 1024))
leaves = [Leaf(name, axes, np.dtype(np.float16)) for name in ("w0", "w1", "w2")]
axes_of = (("rows",), ("columns",))
rules = WeightRules(rules=tuple(WeightRule(target=n, source=n, axes=axes_of) for n in ("w0", "w1", "w2")))
spec = MeshSpec.of(data=8)
sharding = plan_sharding(leaves, Mappings(params=AxisMapping({{"rows": "data"}})), spec).check()
plan = plan_loading(sharding, rules, source)
found = load(plan, sharding, source, spec.build(jax.devices()), memory_bytes=24 << 20)
for n, name in enumerate(("w0", "w1", "w2")):
    assert (np.asarray(found[name]) == n).all()
arrays = sum(shard.data.nbytes for each in found.values() for shard in each.addressable_shards)
print(json.dumps([found.report.peak_rss_bytes, arrays, source.bytes_read]))
"""
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        peak, arrays, read = json.loads(done.stdout.splitlines()[-1])
    assert read == 96 * MIB and arrays == 48 * MIB
    # The interpreter's own growth (threads, sockets, buffers of the kernel's library) is a few MiB.
    assert peak - arrays <= (24 + 12) * MIB


@pytest.mark.slow
def test_ctrl_c_during_a_stalled_load_is_quick(tmp_path):
    checkpoint(tmp_path, "llama")
    with ObjectStore(
        {"m/model.safetensors": tmp_path / "model.safetensors"},
        fault=lambda r: Fault(stall_after=4) if r.start > 100 else None,
    ) as store:
        here = Path(__file__)
        program = (
            f"import sys; sys.path.insert(0, {str(here.parents[3])!r}); sys.path.insert(0, {str(here.parent)!r})\n"
            "import jax, test_remote_loading as t\n"
            f"source = t.open_weights(t.RemoteFolder('{store.url}/m'), allow_pickle=False)\n"
            "sharding, plan, _ = t.planned('llama', {}, source)\n"
            "print('begun', flush=True)\n"
            "t.load(plan, sharding, source, t.MESH.build(jax.devices()))\n"
        )
        environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        while store.under_way < 3:
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert "KeyboardInterrupt" in errors and time.monotonic() - begun < 5
