"""Token stores as several processes: process 0 builds them, on a shared disk or on each host; also if killed."""

import json
import random
import time
from pathlib import Path

import pytest
from helpers.processes import Run, check_named, run_together
from helpers.tiny_runs import SECONDS

from levanter.data.manifest import MANIFEST, SHARD_MARK

# Real processes on a machine that has other things to do.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FILES = 12


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Texts, one shard each."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(FILES):
        texts = [" ".join(str((n + i * i + k) % 61) for i in range(400)) for k in range(300)]
        (folder / f"{n:02d}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def train(inputs, folder: Path, files: Path) -> list[str]:
    return inputs.train_lm(folder, steps=3, data=inputs.stored_text(folder, files))


def slowly(folder: Path, command: list[str]) -> list[str]:
    """The command, writing a shard in about a second: a store that is there in two cannot be killed twice."""
    script = folder / "slowly.py"
    script.write_text(
        "import sys, time\n"
        "from levanter.data import store_write\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.train.lm.train_lm import TrainLmConfig, main\n"
        "put, write = store_write.GrowingArray._put, store_write.write_file\n"
        "store_write.GrowingArray._put = lambda *args: (time.sleep(0.4), put(*args))\n"
        "store_write.write_file = lambda *args: (time.sleep(0.4), write(*args))\n"
        "sys.exit(run_entry_point(TrainLmConfig, main))\n"
    )
    return [str(script), *command[1:]]


def losses(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "tracker" / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: each["metrics"]["train/loss"] for each in records if "train/loss" in each.get("metrics", {})}


def store(folder: Path) -> dict[str, bytes]:
    """Every file of a store."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, inputs, files):
    """The losses, and the store, of one process."""
    folder = tmp_path_factory.mktemp("alone")
    run_together(folder, 1, train(inputs, folder, files), devices=8, cache=inputs.cache)
    assert list(losses(folder)) == [0, 1, 2]
    return losses(folder), store(folder / "tokens")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("seed", range(2))
def test_killed_while_a_store_is_built(tmp_path, inputs, files, alone, count, seed):
    draw = random.Random(700 * count + seed)
    command = train(inputs, tmp_path, files)
    for attempt in range(2):
        # Who builds is killed once, and then, or before, one of those that wait.
        victim = 0 if attempt == seed % 2 else draw.randrange(1, count)
        wanted = marks(tmp_path) + draw.randrange(1, 4)
        slow = slowly(tmp_path, command)
        with Run(tmp_path / f"attempt{attempt}", count, slow, devices=8 // count, cache=inputs.cache) as run:
            deadline = time.monotonic() + 400
            while marks(tmp_path) < wanted:
                assert time.monotonic() < deadline and len(run.still_running()) == count, "no shards"
                time.sleep(0.001)
            time.sleep(draw.random())
            killed = run.kill(victim)
            ended = run.wait()
        check_named(ended, victim)
        assert max(each.at for each in ended) - killed < SECONDS
        assert all("preparing data" in ended[n].output for n in range(count) if victim == 0 and n)
        # Process 0 goes on for the second that it takes to be sure that another one is gone.
        assert marks(tmp_path) < FILES or victim
        if is_finished(tmp_path):
            assert store(tmp_path / "tokens") == alone[1]
        assert not (tmp_path / "checkpoints").exists()
    there = marks(tmp_path)
    outputs = run_together(tmp_path / "last", count, command, devices=8 // count, cache=inputs.cache)
    assert there == FILES or f"{there} of {FILES} shards already exist" in outputs[0]
    assert store(tmp_path / "tokens") == alone[1]
    assert losses(tmp_path) == pytest.approx(alone[0], abs=2e-5)


def marks(folder: Path) -> int:
    """How many shards count."""
    return len(list((folder / "tokens").rglob(SHARD_MARK)))


def is_finished(folder: Path) -> bool:
    (path,) = (folder / "tokens").rglob(MANIFEST)
    return json.loads(path.read_text()).get("shards") is not None


def test_hosts_with_disks_of_their_own_build_their_own(tmp_path, inputs, files, alone):
    """Two hosts of two processes; those of the second host build theirs once."""
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.train.lm.train_lm import TrainLmConfig, main\n"
        f"here = {str(tmp_path)!r} + f'/disk{{int(os.environ[\"LEVANTER_PROCESS_ID\"]) // 2}}'\n"
        "sys.exit(run_entry_point(TrainLmConfig, main, [*sys.argv[1:], '--data.cache_dir', here]))\n"
    )
    command = [str(script), *train(inputs, tmp_path, files)[1:]]
    run_together(tmp_path, 4, command, devices=2, cache=inputs.cache)
    assert losses(tmp_path) == pytest.approx(alone[0], abs=2e-5)
    assert store(tmp_path / "disk0") == store(tmp_path / "disk1") == alone[1]


def test_other_text_on_another_host_is_refused(tmp_path, inputs, files):
    """The same path, and another file behind it."""
    for n in (0, 1):
        (tmp_path / f"text{n}").mkdir()
        for path in sorted(files.iterdir())[: 2 + n]:
            (tmp_path / f"text{n}" / path.name).symlink_to(path)
    script = tmp_path / "one.py"
    script.write_text(
        "import os, sys\n"
        "from levanter.commands.cli.errors import run_entry_point\n"
        "from levanter.commands.train.lm.train_lm import TrainLmConfig, main\n"
        f"number, here = os.environ['LEVANTER_PROCESS_ID'], {str(tmp_path)!r}\n"
        "more = [f'--data.components.numbers.source.train_urls=[{here}/text{number}/*.jsonl]',\n"
        "        f'--data.cache_dir={here}/disk{number}']\n"
        "sys.exit(run_entry_point(TrainLmConfig, main, [*sys.argv[1:], *more]))\n"
    )
    command = [str(script), *train(inputs, tmp_path, files)[1:]]
    outputs = run_together(tmp_path, 2, command, devices=4, cache=inputs.cache, code=2)
    assert "the training data differs between processes" in outputs[0]
    assert "must be the same on all hosts" in outputs[0]


@pytest.mark.parametrize("count", [2])
def test_cache_dataset(tmp_path, inputs, files, alone, count):
    command = ["levanter.main.cache_dataset", *train(inputs, tmp_path, files)[1:], "--verify", "true"]
    outputs = run_together(tmp_path, count, command, devices=4)
    assert store(tmp_path / "tokens") == alone[1]
    assert f"{FILES} shards" in outputs[0] and "verified" in outputs[0] and "verified" not in outputs[1]
