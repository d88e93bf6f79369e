"""A run's `Target` from a pod's name, or from available devices."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from levanter.hardware import Accelerator, parse_accelerator
from levanter.hardware.memory import host_memory
from levanter.plan.device_order import pod_hosts
from levanter.runplan import Target


def pod_target(accelerator: Accelerator | str) -> Target:
    """The `Target` of a pod, from its name alone.

    Raises:
        AcceleratorError: the name is unknown.
    """
    pod = parse_accelerator(accelerator) if isinstance(accelerator, str) else accelerator
    return Target(
        name=pod.name,
        platform=pod.generation.platform,
        kind=pod.generation.device_kind,
        devices=pod.devices,
        granules=pod.slices,
        hosts=pod.hosts,
        hbm_bytes=pod.hbm_bytes,
        devices_per_chip=pod.generation.devices_per_chip,
        hosts_on=functools.partial(pod_hosts, accelerator=pod) if pod.can_compile else None,
    )


def device_target(devices: Sequence[Any]) -> Target:
    """The `Target` of real devices; its memory limit is the one that the runtime reports, if any."""
    first = devices[0]
    limit = None
    if first.platform != "cpu":
        # CPU devices report no memory of their own; they share that of the host, which is `host_bytes` below.
        limit = (first.memory_stats() or {}).get("bytes_limit")
    # Only TPU devices of a multislice run have a slice index; elsewhere it is missing or None.
    slices = {getattr(device, "slice_index", None) or 0 for device in devices}
    return Target(
        name="local",
        platform=first.platform,
        kind=first.device_kind,
        devices=len(devices),
        granules=len(slices),
        hosts=len({device.process_index for device in devices}),
        hosts_on=lambda mesh: _host_indices(mesh.build(devices).devices),
        hbm_bytes=limit,
        host_bytes=host_memory() if first.platform == "cpu" else None,
    )


def _host_indices(devices: np.ndarray) -> np.ndarray:
    """Host index of each device, hosts numbered from 0 in the order of their process ids."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    return np.unique(processes, return_inverse=True)[1].reshape(devices.shape)
