"""Leases: of two processes one writes, the other is told who; who is gone is replaced, who was replaced stops."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from levanter.io import LeaseError, LeaseLostError, LeaseTakenError, lease_files, leased, release_all
from levanter.io import lease as lease_module
from levanter.io.lease import LEASE, LeaseTimes, take_lease
from levanter.io.lease_holder import Holder

QUICK = LeaseTimes(beat=0.05, stale=0.6)
PATIENT = LeaseTimes(beat=1000, stale=36000)
"""Waiting until it is stale would take longer than a test may."""


class Plain(MemoryFileSystem):
    """An object store that writes whatever it is told to, whole, and knows nothing of conditions or times."""

    protocol = "plainstore"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    def modified(self, path):
        raise NotImplementedError


@pytest.fixture(params=["disk", "memory", "plain"])
def place(request, tmp_path, monkeypatch):
    """A place on a disk, on a store that creates conditionally, and on one that does not."""
    monkeypatch.setattr(lease_files, "SETTLE_SECONDS", 0.1)
    if request.param == "disk":
        return str(tmp_path / "run")
    if request.param == "plain":
        fsspec.register_implementation("plainstore", Plain, clobber=True)
        Plain.store.clear()
        return f"plainstore://bucket/{tmp_path.name}"
    return f"memory://bucket/{tmp_path.name}"


@pytest.fixture(autouse=True)
def nothing_held():
    """Tests leave no lease to the next, and no thread that is about to end."""
    release_all()
    end = time.monotonic() + 100
    while keepers() and time.monotonic() < end:
        time.sleep(0.01)
    yield
    release_all()


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "leases"]


def names(place: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(f"{place}/{LEASE}")
    fs.invalidate_cache()
    return sorted(path.rsplit("/", 1)[-1] for path in fs.find(root)) if fs.exists(root) else []


def written_by(place: str, number: int = 1, **differs: Any) -> Holder:
    """Leaves the claim of another process there."""
    values = {**vars(Holder.here("training run other")), "id": "0" * 16, "host": "elsewhere", "machine": "m", **differs}
    holder = Holder(**values)
    fs, root = fsspec.core.url_to_fs(f"{place}/{LEASE}")
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/{number:06d}.json", holder.content())
    return holder


def take(place: str, **more: Any):
    return take_lease(place, what="training run mine", advice="go elsewhere", **{"times": QUICK, **more})


def test_the_second_is_refused_and_told_who_where_and_since_when(place):
    with leased(place, what="training run a", advice="give another trainer.id") as held:
        assert set(names(place)) == {"000001.json", f"000001.{held._holder.id}.beat"}
        with pytest.raises(LeaseTakenError) as refused:
            take(place)
        held.check()
    said = str(refused.value)
    for part in ("training run a", str(os.getpid()), Holder.here("").host, "since 20", "UTC", "go elsewhere", LEASE):
        assert part in said
    assert names(place) == []
    take(place).release()


def test_one_of_many_that_come_at_once_gets_it(place, monkeypatch):
    # Eight threads and whatever else this machine does: the moment after which a plain store is read again is longer.
    monkeypatch.setattr(lease_files, "SETTLE_SECONDS", 1.5)
    together, won, refused = threading.Barrier(8), [], []

    def come():
        together.wait()
        try:
            won.append(take(place))
        except LeaseTakenError as error:
            refused.append(error)

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert (len(won), len(refused)) == (1, 7)
    won[0].check()
    won[0].release()
    assert names(place) == []


def test_a_process_of_this_machine_that_is_gone_is_replaced_at_once(place, caplog):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    here = vars(Holder.here("training run killed"))
    from levanter.io.lease_holder import _started

    there = {**here, "pid": child.pid, "started": _started(child.pid), "id": "0" * 16}
    written_by(place, **there)
    with pytest.raises(LeaseTakenError, match=f"process {child.pid}"):
        take(place, times=PATIENT)
    child.kill()
    # Not waited for yet: the kernel still has an entry of that number.
    while (state := Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z":
        assert state
        time.sleep(0.01)
    lease = take(place, times=PATIENT)
    assert "took over the lease of training run killed" in caplog.text and "is gone" in caplog.text
    lease.release()
    child.wait()
    # And after the number went to another process.
    written_by(place, **{**there, "pid": os.getpid(), "started": "1"})
    take(place, times=PATIENT).release()
    assert names(place) == []


def test_a_process_elsewhere_is_replaced_when_it_gives_no_sign_of_life(place, caplog):
    began = time.monotonic()
    written_by(place, number=4)
    lease = take(place)
    assert time.monotonic() - began >= 0.9 * QUICK.stale
    assert set(names(place)) == {"000005.json", f"000005.{lease._holder.id}.beat"}
    assert "was not renewed for" in caplog.text
    lease.release()


def test_a_process_elsewhere_that_gives_signs_of_life_is_not(place):
    other = written_by(place)
    fs, root = fsspec.core.url_to_fs(f"{place}/{LEASE}")
    over = threading.Event()

    def live():
        count = 0
        while not over.wait(0.1):
            count += 1
            fs.pipe_file(f"{root}/000001.{other.id}.beat", str(count).encode())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(LeaseTakenError, match="on elsewhere"):
            take(place, times=LeaseTimes(beat=0.2, stale=100))
    finally:
        over.set()
        thread.join()


def test_what_was_left_long_ago_is_replaced_without_waiting(tmp_path):
    """By the clock of the storage: the times of its own files."""
    written_by(str(tmp_path))
    claim = tmp_path / LEASE / "000001.json"
    os.utime(claim, (time.time() - 2 * PATIENT.stale,) * 2)
    take(str(tmp_path), times=PATIENT).release()


@pytest.mark.parametrize("hours", [-1000, 1000])
def test_clocks_of_machines_are_not_compared(tmp_path, hours):
    """What a holder calls its time means nothing; a file of the future (a storage that was set back) is watched."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() + 3600 * hours))
    began = time.monotonic()
    written_by(str(tmp_path), since=since)
    if hours > 0:
        os.utime(tmp_path / LEASE / "000001.json", (time.time() + 3600 * hours,) * 2)
    take(str(tmp_path)).release()
    assert time.monotonic() - began >= 0.9 * QUICK.stale


def test_whoever_was_taken_over_stops_before_its_next_write(place):
    lease = take(place, times=LeaseTimes(beat=1000, stale=2000))
    lease._confirmed -= 1e9  # it was suspended
    written_by(place, number=2)
    with pytest.raises(LeaseLostError, match=r"taken over by training run other.*on elsewhere"):
        lease.check()
    lease.release()
    assert "000002.json" in names(place), "what is another's stays"


def test_a_lease_that_was_taken_over_by_a_run_that_has_ended_since_is_lost_too(place):
    lease = take(place, times=LeaseTimes(beat=1000, stale=2000))
    fs, root = fsspec.core.url_to_fs(f"{place}/{LEASE}")
    fs.rm(root, recursive=True)
    lease._confirmed -= 1e9
    with pytest.raises(LeaseLostError, match="has ended since"):
        lease.check()


def test_the_thread_notices_by_itself(place):
    lease = take(place)
    written_by(place, number=2)
    end = time.monotonic() + 100
    while lease._lost is None and time.monotonic() < end:
        time.sleep(0.02)
    with pytest.raises(LeaseLostError):
        lease.check()
    lease.release()


@pytest.mark.parametrize("damage", ["deleted", "truncated", "garbage"])
def test_a_lease_whose_files_are_damaged_while_it_is_held_is_written_again(place, damage, caplog):
    lease = take(place, times=LeaseTimes(beat=1000, stale=2000))
    fs, root = fsspec.core.url_to_fs(f"{place}/{LEASE}")
    path = f"{root}/000001.json"
    if damage == "deleted":
        fs.rm(root, recursive=True)
    else:
        fs.pipe_file(path, b"" if damage == "truncated" else b'{"pid": [[[')
    lease.beat()
    lease.check()
    assert fs.cat_file(path) == lease._holder.content()
    assert "rewriting them" in caplog.text
    lease.release()
    assert names(place) == []


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "half": b'{"host": "elsewh',
    "list": b"[1, 2]",
    "number": b"7",
    "deep": b"[" * 50_000,
    "pid is text": json.dumps({**vars(Holder.here("x")), "pid": "1"}).encode(),
    "host is null": json.dumps({**vars(Holder.here("x")), "host": None}).encode(),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_claim_counts_until_it_is_stale(tmp_path, content, caplog):
    (tmp_path / LEASE).mkdir()
    began = time.monotonic()
    (tmp_path / LEASE / "000001.json").write_bytes(content)
    take(str(tmp_path)).release()
    assert time.monotonic() - began >= 0.9 * QUICK.stale
    assert "damaged lease" in caplog.text


@pytest.mark.parametrize("pid", [0, -1, 10**30, 4194304 * 2])
def test_absurd_process_numbers_are_of_nobody(tmp_path, pid):
    written_by(str(tmp_path), **{**vars(Holder.here("x")), "pid": pid, "id": "0" * 16})
    take(str(tmp_path), times=PATIENT).release()


def test_signs_of_a_hostile_claim_do_not_reach_the_terminal(tmp_path):
    written_by(str(tmp_path), **{**vars(Holder.here("\x1b[2Jclear\nscreen" * 100)), "id": "0" * 16})
    with pytest.raises(LeaseTakenError) as refused:
        take(str(tmp_path))
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 1000


def test_a_folder_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("here")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LEASE).write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "run", Path("/proc/run")):
        with pytest.raises(LeaseError, match="nothing can be written there"):
            take(str(folder))


def test_folders_made_for_a_lease_alone_go_with_it(tmp_path):
    take(str(tmp_path / "a" / "b")).release()
    assert list(tmp_path.iterdir()) == []
    lease = take(str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b" / "result").write_text("")
    lease.release()
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["result"]


def test_whoever_may_wait_waits(place):
    lease, got = take(place), []
    waiter = threading.Thread(target=lambda: got.append(take(place, wait=True)))
    waiter.start()
    time.sleep(2 * QUICK.stale)
    assert not got, "its holder is alive: however long that takes"
    lease.release()
    waiter.join(100)
    got[0].check()
    got[0].release()


def test_storage_that_does_not_answer_is_suffered_until_somebody_may_have_taken_over(place, monkeypatch):
    lease = take(place, times=LeaseTimes(beat=0.0, stale=1000))
    real: Callable[[], Any] = lease._files.newest

    def broken():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(lease._files, "newest", broken)
    lease.check()
    lease._confirmed -= 600
    with pytest.raises(LeaseLostError, match="it is unknown whether this process may"):
        lease.check()
    monkeypatch.setattr(lease._files, "newest", real)
    lease.check()
    lease.release()


def test_a_disk_without_links_has_leases_too(tmp_path, monkeypatch):
    def refused(*_: object):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    lease = take(str(tmp_path))
    with pytest.raises(LeaseTakenError):
        take(str(tmp_path))
    lease.release()
    assert list(tmp_path.iterdir()) == []


def test_the_thread_ends_with_the_last_lease(tmp_path):
    lease = take(str(tmp_path))
    assert len(keepers()) == 1
    lease.release()
    end = time.monotonic() + 100
    while keepers() and time.monotonic() < end:
        time.sleep(0.01)
    assert not keepers() and lease_module._keeper.active() == []
