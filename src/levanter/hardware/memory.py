"""Memory of this machine that processes may use, and the share of a GPU's memory that JAX's allocator takes.

Of this machine: the RAM, or the limit of the container if that is less.

Devices without memory of their own (CPU) share it. `host_memory` is the total, not what is free now: a run that needs
more can never work here, one that needs less may have to wait for others.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

DEFAULT_FRACTION = 0.75
"""The share of a GPU's memory that JAX's allocator takes unless `XLA_CLIENT_MEM_FRACTION` names another."""
FRACTION_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
OUTSIDE_BYTES = 1 << 30
"""Bytes that the driver's context and libraries keep outside the allocator: an allowance. It matters only where the
fraction is set so high that the allocator would leave less."""


class GpuMemoryError(ValueError):
    """A variable of JAX's allocator that JAX would refuse."""


def host_memory(root: Path = Path("/")) -> int | None:
    """The most bytes that processes on this machine may use; None where the system does not report it.

    Args:
        root: of the file system that has `proc` and `sys`.
    """
    limits = [*_built_in(root), *_allowed(root)]
    return min(limits) if limits else None


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that processes on this machine may still use: free memory, or the rest of the container's limit if less.

    Args:
        root: of the file system that has `proc` and `sys`.
    """
    amounts: list[int] = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, rest = line.partition(":")
        # In kB. `MemAvailable` includes caches that the kernel can drop, which `MemFree` leaves out.
        if name == "MemAvailable" and rest.split()[0].isdigit():
            amounts.append(int(rest.split()[0]) * 1024)
    # The first pair is of control groups v2, the second of v1.
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        base = root / ("sys/fs/cgroup" if limit == "memory.max" else "sys/fs/cgroup/memory")
        # Cached pages of files count as used, and the kernel drops them when memory is needed: they count as free here.
        for allowed in _number(base / limit):
            cached = next((n for n in _reclaimable(base / "memory.stat")), 0)
            amounts += [max(allowed - now + cached, 0) for now in _number(base / used)]
    return min(amounts) if amounts else None


def _reclaimable(file: Path) -> Iterator[int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            yield int(value)


def _built_in(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        # Systems without /proc (macOS): POSIX has the number of pages. Tests pass
        # another root, where it would be wrong.
        if root == Path("/") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys():
            yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemTotal" and rest.split()[0].isdigit():
            yield int(rest.split()[0]) * 1024


def _allowed(root: Path) -> Iterator[int]:
    """The limits of this process's control groups and of their ancestors, for both versions of control groups."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for group in groups:
        # A line is `id:controllers:path`; version 2 has no controllers in it.
        _, controllers, path = [*group.split(":", 2), "", ""][:3]
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path is that of the host, and the container's own group is mounted at the base.
        folders = [part for part in path.split("/") if part]
        for depth in range(len(folders), -1, -1):
            yield from _number(base.joinpath(*folders[:depth]) / name)


def _number(file: Path) -> Iterator[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdigit():  # `max` where there is no limit
        yield int(text)


def memory_fraction(environment: Mapping[str, str] | None = None) -> float:
    """The share of a GPU's memory that JAX's allocator takes, as its environment variables set it.

    Args:
        environment: of the run; by default that of this process.

    Raises:
        GpuMemoryError: a variable is no number above 0, or both of them are set.
    """
    variables = os.environ if environment is None else environment
    texts = {name: text for name in FRACTION_VARIABLES if (text := variables.get(name, ""))}
    if len(texts) > 1:
        raise GpuMemoryError(f"{' and '.join(texts)} are both set; JAX takes one of them, the second is deprecated")
    for name, text in texts.items():
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if not 0.0 < fraction <= 1.0:
            raise GpuMemoryError(f"{name}={text}: expected a share of a GPU's memory above 0 and at most 1, like 0.9")
        return fraction
    return DEFAULT_FRACTION


def allocator_bytes(memory_bytes: int, *, fraction: float) -> int:
    """Bytes that programs of a run may use of a GPU.

    Args:
        memory_bytes: of the card.
        fraction: that JAX's allocator takes.
    """
    # Near 1 the allocator cannot have its share: the context and libraries come out of the same memory.
    return min(int(memory_bytes * fraction), memory_bytes - OUTSIDE_BYTES)
