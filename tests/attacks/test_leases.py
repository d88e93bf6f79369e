"""Folders that are written by one process: a second one, a dead one, a damaged lease, one that was taken over.

What leases are is in `tests/levanter/io/test_lease.py`; here, what a user sees of them at the entry points.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from helpers.attacks import Attack, judge, strike, strike_apart, table
from helpers.tiny_runs import make_inputs

from levanter.checkpoint import Checkpointer, find_checkpoints
from levanter.io import LeaseLostError, leased, release_all
from levanter.io import lease as lease_module
from levanter.io.lease import LEASE, LeaseTimes
from levanter.io.lease_holder import Holder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Leases that are stale soon; none is left to the next test."""
    monkeypatch.setattr(lease_module, "TIMES", LeaseTimes(beat=0.1, stale=1.0))
    yield
    release_all()


PLACES = {
    "train_lm": "checkpoints/run",
    "eval_careless_lm": "out",
    "cache_dataset": "tokens/numbers/train",
    "export_lm_to_hf": "exported",
}
"""The folder that each command writes, and whose lease it takes."""


def words(command: str, folder: Path) -> list[str]:
    """A small run of a command, without the module's name."""
    made = make_inputs(folder / "inputs")
    if command == "eval_careless_lm":
        return made.eval_careless_lm(folder)[1:]
    (folder / "texts").mkdir()
    texts = [" ".join(str((n + each) % 61) for n in range(60)) for each in range(20)]
    (folder / "texts/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return made.train_lm(folder, steps=4, data=made.stored_text(folder, folder / "texts"))[1:]


def claimed(place: Path, content: bytes | None = None, *, age: float = 0.0, **differs: object) -> None:
    """Leaves a claim in a place: of a process elsewhere, or of these bytes."""
    holder = {**vars(Holder.here("training run other")), "id": "0" * 16, "host": "elsewhere", "machine": "m"}
    (place / LEASE).mkdir(parents=True)
    path = place / LEASE / "000001.json"
    path.write_bytes(Holder(**{**holder, **differs}).content() if content is None else content)
    os.utime(path, (time.time() - age,) * 2)


def found_there(command: str, leave: Callable[[Path], None]) -> Callable[[Path], list[str]]:
    """The words of a command whose folder somebody has been in."""

    def prepared(folder: Path) -> list[str]:
        made = words(command, folder)
        leave(folder / PLACES[command])
        return made

    return prepared


def alive(place: Path) -> None:
    """A lease of this very process, which is alive."""
    held = leased(str(place), what="training run other", advice="")
    held.__enter__()
    _held.append(held)


_held: list[object] = []
TAKEN = (
    "another process is writing here",
    "training run other",
    f"process {os.getpid()} ",
    "since 20",
    "UTC",
    "delete",
)
HERE = {"machine": Holder.here("").machine, "host": Holder.here("").host}

ATTACKS = [
    Attack(name="two-train", command="train_lm", words=found_there("train_lm", alive), code=2,
           says=(*TAKEN, "trainer.id"), never=("step 2",)),
    Attack(name="two-memorize", command="eval_careless_lm", words=found_there("eval_careless_lm", alive), code=2,
           says=(*TAKEN, "output_base_path"), never=("loading weights",)),
    Attack(name="stale", command="cache_dataset", code=0, says=("took over the lease", "was not renewed for 3,6"),
           words=found_there("cache_dataset", lambda place: claimed(place, age=3600))),
    Attack(name="of-a-dead-process", command="cache_dataset", code=0, says=("that process is gone",),
           words=found_there("cache_dataset", lambda place: claimed(place, pid=2**22 + 1, **HERE))),
    Attack(name="damaged", command="cache_dataset", code=0, says=("took over a damaged lease",),
           words=found_there("cache_dataset", lambda place: claimed(place, b'{"pid": ', age=3600))),
    Attack(name="damaged-now", command="cache_dataset", code=0, says=("a damaged lease; waiting up to", "took over"),
           words=found_there("cache_dataset", lambda place: claimed(place, b"\x00" * 9))),
    Attack(name="from-the-future", command="cache_dataset", code=0, says=("waiting up to", "took over"),
           words=found_there("cache_dataset", lambda place: claimed(place, age=-86400, since="2099-01-01"))),
    Attack(name="not-a-folder", command="train_lm", code=2, says=("/proc/none/run: cannot be written",),
           words=lambda folder: [*words("train_lm", folder), "--trainer.checkpointer.base_path", "/proc/none"]),
    Attack(name="lease-is-a-file", command="train_lm", code=2, says=("nothing can be written there",),
           words=found_there("train_lm", lambda place: (place.mkdir(parents=True), (place / LEASE).touch()))),
    Attack(name="stale-train", command="train_lm", code=0, says=("took over the lease", "done after 4 of 4"),
           words=found_there("train_lm", lambda place: claimed(place, age=3600))),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=("two-memorize", "stale", "damaged", "not-a-folder")))
def test_somebody_was_there_before(attack, tmp_path, caplog):
    outcome = strike(attack, tmp_path)
    judge(attack, type(outcome)(outcome.code, outcome.text + caplog.text, outcome.seconds))
    if attack.code == 0:
        assert not list(tmp_path.rglob(LEASE)), "the lease is given back"


def test_a_run_whose_lease_was_taken_over_writes_no_more(tmp_path):
    """Whatever it has saved before is complete; what the other one has saved since is not touched."""
    with (
        leased(str(tmp_path), what="training run mine", advice="") as lease,
        Checkpointer(
            str(tmp_path), keep=[], save_interval_seconds=60.0, keep_last_temporary=9, leases=[lease]
        ) as checkpointer,
    ):
        checkpointer.save(1, {"a": jnp.arange(4.0)}, {})
        checkpointer.wait()
        claim = Holder(**{**vars(Holder.here("training run other")), "id": "0" * 16})
        (tmp_path / LEASE / "000002.json").write_bytes(claim.content())
        (tmp_path / "step-2" / "arrays-00000000").mkdir(parents=True)
        with pytest.raises(LeaseLostError, match="taken over by training run other"):
            checkpointer.save(2, {"a": jnp.arange(4.0)}, {})
    assert [ref.step for ref in find_checkpoints(str(tmp_path))] == [1]
    assert (tmp_path / "step-2" / "arrays-00000000").is_dir(), "what another run is writing is swept by no one"


@pytest.mark.slow
def test_a_training_run_that_is_taken_over_stops(tmp_path):
    """A process that looks like another host takes the folder after the first checkpoint."""
    place = tmp_path / PLACES["train_lm"]

    def take_over() -> None:
        while not (place / "step-2" / "metadata.json").exists():
            time.sleep(0.01)
        claim = Holder(**{**vars(Holder.here("training run other")), "id": "0" * 16, "host": "elsewhere"})
        (place / LEASE / "000002.json").write_bytes(claim.content())

    threading.Thread(target=take_over, daemon=True).start()
    attack = Attack(
        name="taken-over",
        command="train_lm",
        words=lambda folder: [*words("train_lm", folder), "--trainer.num_train_steps", "400"],
        code=2,
        says=("was taken over by training run other", "on elsewhere"),
        seconds=120,
    )
    judge(attack, strike(attack, tmp_path))
    assert find_checkpoints(str(place))[-1].step < 400


@pytest.mark.slow
def test_two_runs_at_the_same_time(tmp_path):
    """Of two identical commands one trains to its end; the other says who that is."""
    command = [sys.executable, "-m", "levanter.main.train_lm", *words("train_lm", tmp_path)]
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = {process.pid: process.communicate(timeout=300)[0] for process in both}
    codes = sorted(process.returncode for process in both)
    assert codes in ([0, 2], [0, 0]), said
    if codes == [0, 2]:  # else one had ended before the other began
        won, lost = sorted(both, key=lambda process: process.returncode)
        assert f"process {won.pid} " in said[lost.pid] and "another process is writing here" in said[lost.pid]
    assert [ref.step for ref in find_checkpoints(str(tmp_path / PLACES["train_lm"]))] == [2, 4]
    assert not list(tmp_path.rglob(LEASE))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_memorization_run_that_is_killed_is_begun_again_at_once(tmp_path, number):
    attack = Attack(
        name="killed",
        command="eval_careless_lm",
        words=lambda folder: words("eval_careless_lm", folder),
        code=-number,
        seconds=120,
    )
    place = tmp_path / PLACES["eval_careless_lm"]

    def kill(process: subprocess.Popen[str]) -> None:
        while not (place / "parts" / "run.json").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)

    judge(attack, strike_apart(attack, tmp_path, during=kill))
    left = list(place.glob(f"{LEASE}/*"))
    assert bool(left) == (number == signal.SIGKILL), "who is told to end gives its lease back"
    again = Attack(
        name="again",
        command="eval_careless_lm",
        words=["--config_path", str(tmp_path / "eval_careless_lm.yaml")],
        code=0,
        says=("that process is gone",) if left else (),
        seconds=120,
    )
    judge(again, strike_apart(again, tmp_path))
    assert not list(tmp_path.rglob(LEASE))
