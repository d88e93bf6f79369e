"""A process's place from the configuration, our launchers' environment, Slurm, and TPU machines."""

from datetime import timedelta

import pytest

from levanter.config import parse
from levanter.distributed.initialize import (
    DistributedConfig,
    PlaceError,
    PlaceHints,
    find_process_place,
    first_host,
    slurm_hints,
    tpu_pod_hints,
)
from levanter.distributed.rendezvous import ProcessPlace
from levanter.trainer import TrainerConfig

pytestmark = pytest.mark.quick

ENVIRONMENT = {"LEVANTER_COORDINATOR": "10.0.0.2:8476", "LEVANTER_NUM_PROCESSES": "32", "LEVANTER_PROCESS_ID": "7"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "gpu[007-010,12]",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
POD = PlaceHints(source="the TPU pod", coordinator="t1k-0:8482", processes=4, process=2)


def test_alone_where_nothing_is_said():
    assert find_process_place(DistributedConfig(), {}) is None
    assert find_process_place(DistributedConfig(num_processes=1, process_id=0), ENVIRONMENT) is None
    assert find_process_place(DistributedConfig(initialize_jax_distributed=False), ENVIRONMENT, lambda: POD) is None
    alone = {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "1", "LEVANTER_PROCESS_ID": "0"}
    assert find_process_place(DistributedConfig(), alone) is None


def test_as_launchers_set_it():
    place = find_process_place(DistributedConfig(), {**ENVIRONMENT, "LEVANTER_LOCAL_DEVICE_IDS": "0,1"})
    assert place == ProcessPlace(
        coordinator="10.0.0.2:8476", processes=32, process=7, local_devices=(0, 1), source="the environment"
    )
    # They win over Slurm and the pod.
    assert find_process_place(DistributedConfig(), {**SLURM, **ENVIRONMENT}, lambda: POD).processes == 32


def test_as_written():
    config = DistributedConfig(coordinator_address="[::1]:99", num_processes=2, process_id=1, local_device_ids=3)
    place = find_process_place(config, ENVIRONMENT)
    assert place == ProcessPlace(coordinator="[::1]:99", processes=2, process=1, local_devices=(3,))
    assert place.address == ("::1", 99)


def test_what_is_written_wins_field_by_field():
    place = find_process_place(DistributedConfig(coordinator_address="head:1"), ENVIRONMENT)
    assert (place.coordinator, place.processes, place.process) == ("head:1", 32, 7)


def test_on_a_pod():
    assert find_process_place(DistributedConfig(), {}, lambda: POD).coordinator == "t1k-0:8482"


def test_under_slurm():
    place = find_process_place(DistributedConfig(), SLURM)
    assert (place.coordinator, place.processes, place.process) == (f"gpu007:{61440 + 5000 % 4096}", 8, 3)
    assert place.local_devices is None
    # Two tasks on each node see the same four GPUs: each takes half.
    shared = slurm_hints({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert shared.local_devices == (2, 3)
    # Not started by srun, or a step of one task within a job of many.
    assert slurm_hints({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}) is None
    assert slurm_hints({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3-7]", "node3"),
        ("node[003,5-7],login", "node003"),
        ("n[01-02]-ib", "n01-ib"),
        ("a-b-c", "a-b-c"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        ({}, {"LEVANTER_PROCESS_ID": "1"}, "LEVANTER_PROCESS_ID is set, but LEVANTER_COORDINATOR, LEVANTER_NUM_PROC"),
        ({}, {**ENVIRONMENT, "LEVANTER_PROCESS_ID": "32"}, "process number 32 of 32: numbers"),
        ({}, {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "1", "LEVANTER_PROCESS_ID": "9"}, "process number 9 of 1: num"),
        ({}, {**ENVIRONMENT, "LEVANTER_PROCESS_ID": "-1"}, "process number -1: numbers .* begin with 0"),
        ({}, {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "0"}, "a run of 0 processes: .* from 1 to 1,048,576"),
        ({}, {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "99999999999"}, "a run of 99,999,999,999 processes"),
        ({}, {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "9" * 5000}, "expected a whole number, got '9{40}…'"),
        ({}, {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "1_6"}, "LEVANTER_NUM_PROCESSES: expected a whole number"),
        ({}, {**ENVIRONMENT, "LEVANTER_NUM_PROCESSES": "many"}, "LEVANTER_NUM_PROCESSES: expected a whole number"),
        ({}, {**ENVIRONMENT, "LEVANTER_COORDINATOR": "10.0.0.2"}, "LEVANTER_COORDINATOR: must be host:port"),
        ({"coordinator_address": "h:1"}, {}, "trainer.distributed.num_processes, trainer.distributed.process_id is"),
        ({"num_processes": 4}, {}, "trainer.distributed.coordinator_address, trainer.distributed.process_id is"),
    ],
    ids=[
        "half",
        "number",
        "9 of 1",
        "negative",
        "none",
        "too many",
        "long",
        "underscore",
        "word",
        "address",
        "no count",
        "no address",
    ],
)
def test_half_a_place_is_an_error(config, environment, message):
    with pytest.raises(PlaceError, match=message):
        find_process_place(DistributedConfig(**config), environment)


def test_timeouts_are_durations():
    given = {"init_timeout": "90s", "barrier_timeout": "1h", "heartbeat_timeout": "20s"}
    config = parse(TrainerConfig, overrides={f"distributed.{name}": value for name, value in given.items()})
    assert config.distributed.barrier_timeout == timedelta(hours=1)
    timeouts = config.distributed.timeouts
    assert (timeouts.roll, timeouts.barrier, timeouts.heartbeat) == (90, 3600, 20)
    with pytest.raises(ValueError, match="init_timeout: must be at least 1s"):
        DistributedConfig(init_timeout=timedelta(milliseconds=500))


def test_on_the_machines_of_a_pod(monkeypatch):
    """What GKE sets on each worker, read by JAX's own code; on CPU nobody looks."""
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for name, value in {
        "TPU_WORKER_HOSTNAMES": "localhost,b,c,d",
        "TPU_WORKER_ID": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert tpu_pod_hints("cpu") is None
    found = tpu_pod_hints("")
    assert (found.coordinator, found.processes, found.process) == ("localhost:8482", 8, 6)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "1")
    assert tpu_pod_hints("") is None
