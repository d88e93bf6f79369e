"""Atomic writes: the old file or the whole new one, and nothing else left in the folder."""

import errno
import os
import signal
import subprocess
import sys

import fsspec
import pytest

from levanter.io import atomic_write


def write_and_fail(path, content, error):
    with atomic_write(str(path)) as file:
        file.write(content)
        raise error


def test_a_new_file_in_a_new_folder(tmp_path):
    path = tmp_path / "a" / "b" / "result.json"
    with atomic_write(str(path)) as file:
        file.write(b"12")
        assert not path.exists()
        assert os.listdir(path.parent) != []  # the temporary name is in the same folder, so the rename is atomic
    assert path.read_bytes() == b"12"
    assert os.listdir(path.parent) == ["result.json"]


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError, match="in the middle"):
        write_and_fail(path, b"half", RuntimeError("in the middle"))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"), atomic_write(str(path)) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_link_keeps_being_a_link(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with atomic_write(str(tmp_path / "link")) as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"new"


def test_a_killed_process_leaves_the_old_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    program = (
        "import os, signal, sys\n"
        "from levanter.io.atomic import atomic_write\n"
        "with atomic_write(sys.argv[1]) as file:\n"
        "    file.write(b'new' * 100000); file.flush(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"old"


def test_remote_files_are_moved_into_place():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    with atomic_write("memory://bucket/deep/x") as file:
        file.write(b"one")
    with pytest.raises(RuntimeError, match="in the middle"):
        write_and_fail("memory://bucket/deep/x", b"two", RuntimeError("in the middle"))
    assert fs.cat("/bucket/deep/x") == b"one"
    assert [entry["name"] for entry in fs.ls("/bucket/deep")] == ["/bucket/deep/x"]
    with atomic_write("memory://bucket/deep/x") as file:
        file.write(b"three")
    assert fs.cat("/bucket/deep/x") == b"three"
    fs.store.clear()
