"""Atomic writes: the old file or the whole new one, and nothing else left in the folder."""

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time

import fsspec
import pytest

from levanter.io import OutputError, atomic_write
from levanter.io.atomic import remove_stale_temporaries, temporary_name


def write(path, content, **more):
    with atomic_write(str(path), **more) as file:
        file.write(content)


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


def test_errors_say_the_path_and_what_to_do(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match=r"file/x: cannot be written \(Not a directory\)\n  → .*file is a file"):
        write(tmp_path / "file" / "x", b"")
    with pytest.raises(OutputError, match=r"Is a directory\)\n  → .* is a folder, but a file will be written"):
        write(tmp_path, b"")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(OutputError, match="a link that leads back to itself"):
        write(tmp_path / "circle", b"")
    assert os.listdir(tmp_path) in (["file", "circle"], ["circle", "file"])


def test_what_the_filler_reads_is_not_blamed_on_the_file(tmp_path):
    with pytest.raises(PermissionError, match="source"):
        write_and_fail(tmp_path / "x", b"half", PermissionError("source"))


def test_no_space_says_how_much_it_takes(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            OutputError, match=r"x: cannot be written \(File too large\); it takes 4.00 MiB\n  → .*ulimit"
        ):
            write(tmp_path / "x", bytes(4 << 20), needed=4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(OutputError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        write("/dev/full", b"x" * 100_000)
    assert os.listdir(tmp_path) == []


def test_a_device_stays_a_device(tmp_path):
    """In a folder of its own: what is tested here used to destroy it."""
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.stat("/dev/null").st_rdev)
        os.close(os.open(path, os.O_WRONLY))
    except PermissionError:  # not as this user, or not in a file system of this kind
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
    write(path, b"gone")
    assert stat.S_ISCHR(os.stat(path).st_mode) and os.listdir(tmp_path) == ["null"]


def test_a_pipe_is_written_into(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OutputError, match="is a pipe without a reader"):
        write(path, b"to nobody")
    found = []
    reader = threading.Thread(target=lambda: found.append(path.read_bytes()))
    reader.start()
    deadline = time.monotonic() + 100
    while not found and time.monotonic() < deadline:
        try:
            write(path, b"x" * 200_000)  # more than a pipe holds
            break
        except OutputError:
            time.sleep(0.01)  # the reader has not opened it yet
    reader.join()
    assert found == [b"x" * 200_000] and stat.S_ISFIFO(os.stat(path).st_mode)


def test_a_pipe_whose_reader_goes(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def goes_in_the_middle():
        with atomic_write(str(path)) as file:
            os.close(reader)
            file.write(b"x" * 100_000)

    with pytest.raises(OutputError, match=r"pipe: cannot be written \(Broken pipe\)"):
        goes_in_the_middle()


def test_standard_output_in_a_file_keeps_its_lines(tmp_path):
    program = (
        "from levanter.io import atomic_write\n"
        "print('before', flush=True)\n"
        "with atomic_write('/dev/stdout') as file: file.write(b'result\\n')\n"
        "print('behind')\n"
    )
    with open(tmp_path / "log", "wb") as log:
        subprocess.run([sys.executable, "-c", program], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "before\nresult\nbehind\n"


def test_permissions_stay(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"private")
    path.chmod(0o600)
    write(path, b"more")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_name_as_long_as_names_may_be(tmp_path):
    path = tmp_path / ("ü" * 127)
    write(path, b"x")
    assert path.read_bytes() == b"x"


def test_what_killed_writers_left_is_removed_by_name(tmp_path):
    long = "n" * 220
    for path in ("answers.jsonl", "other.jsonl", long):
        with open(temporary_name(f"{tmp_path}/{path}"), "w") as file:
            file.write("half")
    (tmp_path / ".answers.jsonl.tmp").write_text("somebody's own")
    remove_stale_temporaries(str(tmp_path), of="answers.jsonl")
    remove_stale_temporaries(f"file://{tmp_path}", of=long)
    assert sorted(path.name.split(".")[1] for path in tmp_path.iterdir()) == ["answers", "other"]
    remove_stale_temporaries(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [".answers.jsonl.tmp"]
    remove_stale_temporaries(str(tmp_path / "missing"))
