"""Counting devices, and the report that a run prints at start."""

import jax
import pytest
from helpers.mesh_devices import HostDevice, SliceDevice, slices

from haliax_ext.mapping import AxisMapping, Mappings
from levanter.mesh import MeshConfig, describe_devices, local_devices, mesh_report, resolve_sizes
from levanter.mesh.devices import require_accelerator

pytestmark = pytest.mark.quick

FSDP = Mappings(params=AxisMapping({"embed": "data"}), compute=AxisMapping({"batch": ["replica_dcn", "data"]}))


def test_the_devices_here():
    found = local_devices(MeshConfig())
    assert (found.platform, found.hosts, found.granules, found.hbm_bytes) == ("cpu", 1, 1, None)
    assert found.devices == tuple(jax.devices())


def test_slices_hosts_and_memory():
    found = describe_devices(slices(2, 8, kind="tpu"), MeshConfig())
    assert (found.granules, found.hosts, found.chips, found.hbm_bytes) == (2, 4, 16, 32 << 30)


def test_hosts_as_granules():
    devices = [HostDevice(id=n, process_index=n // 4) for n in range(8)]
    assert describe_devices(devices, MeshConfig()).granules == 1
    assert describe_devices(devices, MeshConfig(granule="process")).granules == 2
    assert describe_devices(devices, MeshConfig()).hbm_bytes is None


def test_two_devices_on_a_chip():
    class Core(SliceDevice):
        @property
        def coords(self):
            return (self.id // 2, 0, 0)

    found = describe_devices([Core(id=n) for n in range(8)], MeshConfig())
    assert found.chips == 4
    assert mesh_report(resolve_sizes(MeshConfig(), devices=8), found).startswith(
        "4 chips (TPU stand-in) as 8 devices, 1 host, 1 slice\n"
    )


def test_report_of_one_pod_slice():
    found = describe_devices(slices(1, 16, kind="tpu"), MeshConfig())
    spec = resolve_sizes(MeshConfig(), devices=16, granules=1)
    sizes = {"parameters": 2 << 30, "optimizer": 4 << 30, "gradients": 2 << 30}
    assert mesh_report(spec, found, mappings=FSDP, bytes_per_device=sizes) == (
        "16 chips (TPU stand-in), 4 hosts, 1 slice\n"
        "mesh data 16 × replica 1 × model 1 × replica_dcn 1 (DCN)\n"
        "on each device: parameters 2.00 GiB, optimizer 4.00 GiB, gradients 2.00 GiB; together 8.00 GiB of 32.00 GiB "
        "(25.0%)\n"
        "no mesh axis crosses DCN: all devices are in one slice"
    )


def test_report_of_attention_that_is_cut():
    """`heads` reaches q, k, v and o, where upstream's reached o: said whenever it does so."""
    found = describe_devices(slices(1, 16, kind="tpu"), MeshConfig())
    spec = resolve_sizes(MeshConfig(axes={"model": 4, "group": 2}), devices=16, granules=1)
    both = Mappings(params=AxisMapping({"kv_head": "model", "q_heads_per_group": ["group"], "embed": "data"}))
    assert mesh_report(spec, found, mappings=both).splitlines()[2] == (
        "kv_head → model shards q, k, v and o 4 ways; q_heads_per_group → group shards q and o 2 ways"
    )
    whole = Mappings(params=AxisMapping({"kv_head": "replica", "embed": "data"}))
    assert "shards" not in mesh_report(spec, found, mappings=whole)


def test_report_of_two_slices_warns_of_parameters_across_them():
    found = describe_devices(slices(2, 8, kind="tpu"), MeshConfig())
    spec = resolve_sizes(MeshConfig(), devices=16, granules=2)
    assert mesh_report(spec, found, mappings=FSDP).splitlines()[-1] == "replica_dcn crosses DCN"
    across = Mappings(
        params=AxisMapping({"embed": ["replica_dcn", "data"]}),
        overrides=(("**.norm", AxisMapping({"embed": None})),),
    )
    assert mesh_report(spec, found, mappings=across) == (
        "16 chips (TPU stand-in), 4 hosts, 2 slices\n"
        "mesh data 8 × replica 1 × model 1 × replica_dcn 2 (DCN)\n"
        "replica_dcn crosses DCN\n"
        "warning: parameters are sharded across slices (embed → replica_dcn): each use of such a weight gathers it "
        "over "
        "DCN, which is at least an order of magnitude slower than ICI"
    )


def test_report_without_mappings_on_hosts():
    config = MeshConfig(granule="process")
    found = describe_devices([HostDevice(id=n, process_index=n // 4) for n in range(8)], config)
    assert mesh_report(resolve_sizes(config, devices=8, granules=2), found) == (
        "8 GPUs (H100), 2 hosts, 2 processes\n"
        "mesh data 4 × replica 1 × model 1 × replica_dcn 2 (DCN)\n"
        "replica_dcn crosses DCN"
    )


def test_an_accelerator_that_is_not_there(monkeypatch):
    cpu = local_devices(MeshConfig())
    require_accelerator(wanted=None, devices=cpu)
    require_accelerator(wanted=True, devices=describe_devices(slices(1, 4, kind="tpu"), MeshConfig()))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(ValueError) as caught:
        require_accelerator(wanted=True, devices=cpu)
    assert str(caught.value) == (
        "trainer.require_accelerator is true, but JAX sees only CPU devices (JAX_PLATFORMS=cpu is set)"
    )
