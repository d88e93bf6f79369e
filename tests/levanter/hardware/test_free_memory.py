"""What processes may still use: the machine's, or what a container leaves."""

import pytest

from levanter.hardware.memory import free_memory

pytestmark = pytest.mark.quick

GIB = 1 << 30


def machine(folder, available: int, files: dict[str, str] | None = None):
    (folder / "proc").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available >> 10} kB\n")
    for name, text in (files or {}).items():
        path = folder / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_container_leaves_less_and_gives_up_files_that_were_read(tmp_path):
    assert free_memory(machine(tmp_path / "bare", 20 * GIB)) == 20 * GIB
    limits = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{6 * GIB}\n", "memory.stat": f"inactive_file {GIB}\n"}
    assert free_memory(machine(tmp_path / "second", 20 * GIB, limits)) == 3 * GIB
    old = {"memory/memory.limit_in_bytes": f"{4 * GIB}", "memory/memory.usage_in_bytes": f"{GIB}"}
    assert free_memory(machine(tmp_path / "first", 20 * GIB, old)) == 3 * GIB
    assert free_memory(machine(tmp_path / "open", 20 * GIB, {"memory.max": "max", "memory.current": "5"})) == 20 * GIB
    assert free_memory(tmp_path / "nothing") is None
