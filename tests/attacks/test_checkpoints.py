"""Damaged checkpoints: nothing but what was saved is taken for it, whoever reads, and the error says what next."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.saved_run import TEXT, write_checkpoint, write_tokenizer
from helpers.tiny_runs import make_inputs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from levanter.checkpoint import (
    Checkpointer,
    CheckpointSource,
    MissingCheckpointError,
    RestoreTarget,
    UnreadableCheckpointError,
    checkpoint_at,
    restore,
)

BAD = 2
SEED, BITS = 20261122, 3


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {
        "model.matrix": rng.standard_normal((16, 24)).astype(np.float32),
        "model.norm": rng.standard_normal(40).astype(np.float32),
        "step": np.asarray(4, np.int32),
    }


@pytest.fixture(name="saved", scope="module")
def saved_fixture(tmp_path_factory):
    """Checkpoints of steps 2 and 4, from eight devices, in chunks of at most 64 bytes."""
    base = tmp_path_factory.mktemp("saved")
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "model"))
    places = {"model.matrix": P("data", "model"), "model.norm": P("data"), "step": P()}
    with Checkpointer(str(base), keep=[(1, None)], save_interval_seconds=None, chunk_bytes=64) as checkpointer:
        for step in (2, 4):
            arrays = {name: jax.device_put(x, NamedSharding(mesh, places[name])) for name, x in values().items()}
            checkpointer.save(step, arrays, {"note": "said"})
    return base


def consumed(base: Path) -> dict[str, bytes]:
    """Everything that is read of the newest checkpoint: onto another mesh, and by slices."""
    ref = checkpoint_at(str(base))
    mesh = Mesh(np.asarray(jax.devices()), ("data",))
    spec = {"model.matrix": P(None, "data"), "model.norm": P("data"), "step": P()}
    targets = {
        name: RestoreTarget(shape=x.shape, dtype=x.dtype, sharding=NamedSharding(mesh, spec[name]))
        for name, x in values().items()
    }
    found = {name: np.asarray(x).tobytes() for name, x in restore(ref, targets).items()}
    source = CheckpointSource(ref, prefix="model.")
    sliced = source.read("matrix", (slice(3, 11), slice(5, 20)))
    return {**found, "sliced": sliced.tobytes(), "metadata": json.dumps([ref.step, dict(ref.metadata)]).encode()}


def expected() -> dict[str, bytes]:
    own = values()
    sliced = own["model.matrix"][3:11, 5:20].tobytes()
    return {
        **{name: x.tobytes() for name, x in own.items()},
        "sliced": sliced,
        "metadata": json.dumps([4, {"note": "said"}]).encode(),
    }


def refused(base: Path) -> bool:
    """Whether the newest checkpoint is refused, the one before being named; otherwise it must be what was saved."""
    try:
        found = consumed(base)
    except (UnreadableCheckpointError, MissingCheckpointError) as error:
        said = str(error)
    else:
        assert found == expected()
        return False
    assert f"{base}/step-4" in said and "of step 4" in said
    assert f"the newest intact one beside it is of step 2: name {base}/step-2" in said
    return True


def files(base: Path) -> list[Path]:
    return sorted(path.relative_to(base) for path in (base / "step-4").rglob("*") if path.is_file())


def attacked(saved: Path, scratch: Path, change: Callable[[Path], object]) -> dict[str, int]:
    """Each file of the checkpoint is changed in turn: how often that was refused, by the kind of file."""
    counts: dict[str, int] = {}
    for file in files(saved):
        base = scratch / "copy"
        shutil.copytree(saved, base)
        change(base / file)
        kind = "arrays" if "d" in file.parts else file.name
        counts[kind] = counts.get(kind, 0) + refused(base)
        shutil.rmtree(base)
    return counts


def flip(bit: int) -> Callable[[Path], object]:
    """Flips a bit, `bit` counted around the file's end."""

    def change(path: Path) -> object:
        data = bytearray(path.read_bytes())
        if data:
            at = bit % (8 * len(data))
            data[at // 8] ^= 1 << at % 8
        return path.write_bytes(bytes(data))

    return change


def test_what_is_whole_is_read(saved):
    assert consumed(saved) == expected()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_a_flipped_bit(saved, tmp_path, seed):
    counts = attacked(saved, tmp_path, flip(random.Random(SEED + seed).randrange(1 << 40)))
    assert counts["metadata.json"] == 1 and counts["arrays"] >= 1
    # Also of the files that Orbax writes for other readers: how many there are is its affair.
    others = [file.name for file in files(saved) if "d" not in file.parts]
    assert len(others) >= 5 and all(counts[name] == others.count(name) for name in others), (counts, others)


@pytest.mark.parametrize("part", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_a_truncated_file(saved, tmp_path, part):
    def change(path: Path) -> object:
        return path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])

    counts = attacked(saved, tmp_path, change)
    assert counts["metadata.json"] == 1 and counts["manifest.ocdbt"] >= 1 and counts["arrays"] >= 1


@pytest.mark.slow
def test_a_file_that_is_gone(saved, tmp_path):
    def change(path: Path) -> object:
        return path.unlink()

    for file in files(saved):
        base = tmp_path / "copy"
        shutil.copytree(saved, base)
        change(base / file)
        if file.name == "metadata.json":
            # As if its saving had not ended: the one before is the newest.
            assert checkpoint_at(str(base)).step == 2
            with pytest.raises(MissingCheckpointError, match="is of step 2: name"):
                checkpoint_at(str(base / "step-4"))
        else:
            refused(base)
        shutil.rmtree(base)


NONSENSE = {
    "step": [-1, 4.5, "4", None, True, 5],
    "kind": ["forever", None, 3],
    "saved_at": ["now", None, True],
    "arrays": ["../step-2", "", None, "/etc", "arrays-../x"],
    "metadata": [None, [], "x"],
    "leaves": [{}, [], None, {"step": 3}, {"step": {"shape": [-1], "dtype": "int32"}}, {"step": {"shape": []}}],
    "version": [0, 3, "1", None, True],
    "format": ["orbax", None, 1],
    "files": [["_METADATA"], {"../x": "00"}, {"/etc/passwd": "00"}, {"_METADATA": 3}, None],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, them in NONSENSE.items() for value in them])
@pytest.mark.parametrize("version", [1, 2])
def test_nonsense_in_metadata(saved, tmp_path, key, value, version):
    """Also where somebody has made the digest right again, or where there was none."""
    from levanter.checkpoint.metadata import _digest

    path = tmp_path / "step-4" / "metadata.json"
    path.parent.mkdir()
    (tmp_path / "step-4" / "arrays-x").mkdir()
    content = json.loads((saved / "step-4" / "metadata.json").read_text())
    del content["digest"]
    content["version"] = version
    content[key] = value
    if version == 2:
        content["digest"] = _digest(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UnreadableCheckpointError) as caught:
        checkpoint_at(str(tmp_path))
    assert f"{path}: " in str(caught.value) and key in str(caught.value)


def test_a_checkpoint_without_digests_is_read_and_said_to_be_unverified(saved, tmp_path, caplog):
    base = tmp_path / "old"
    shutil.copytree(saved, base)
    path = base / "step-4" / "metadata.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["version"] = 1
    for leaf in content["leaves"].values():
        del leaf["digests"], leaf["chunk"]
    path.write_text(json.dumps(content))
    assert consumed(base) == expected()
    assert "step 4" in caplog.text and "unverified" in caplog.text


def test_an_older_damaged_one_stops_nobody(saved, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(saved, base)
    (base / "step-2" / "metadata.json").write_text("{")
    assert consumed(base) == expected()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpointer(str(base), keep=[(1, None)], save_interval_seconds=None) as checkpointer:
        checkpointer.save(6, {"step": jax.device_put(np.int32(6), one)}, {})
    assert checkpoint_at(str(base)).step == 6 and (base / "step-2" / "metadata.json").read_text() == "{"


def in_arrays(base: Path, step: int) -> None:
    """Flips a bit in the middle of the largest file of a step's arrays."""
    largest = max((base / f"step-{step}").rglob("d/*"), key=lambda path: path.stat().st_size)
    flip(4 * largest.stat().st_size + 6)(largest)


def in_metadata(base: Path, step: int) -> None:
    path = base / f"step-{step}" / "metadata.json"
    path.write_text(path.read_text().replace(f'"step": {step}', '"step": -1'))


def of_a_model(damage: Callable[[Path, int], None], words: Callable[[Path], list[str]]):
    """A folder with checkpoints of steps 5 and 7, of which the newer one is damaged; the words of a command."""

    def prepared(folder: Path) -> list[str]:
        base = write_checkpoint(folder / "run", write_tokenizer(folder / "tokenizer"))
        shutil.copytree(base / "step-7", base / "step-5")
        path = base / "step-5" / "metadata.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**{k: v for k, v in content.items() if k != "digest"}, "step": 5, "version": 1}))
        damage(base, 7)
        return words(folder)

    return prepared


def exporting(folder: Path) -> list[str]:
    return ["--checkpoint_path", str(folder / "run"), "--output_dir", str(folder / "hf")]


def evaluating(folder: Path) -> list[str]:
    (folder / "docs.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    data = {"components": {"docs": {"source": {"validation_urls": [str(folder / "docs.jsonl")]}}}}
    document = {"checkpoint_path": str(folder / "run"), "max_eval_length": 32, "data": data}
    document["trainer"] = {"tracker": {"type": "noop"}, "log_dir": str(folder / "logs")}
    (folder / "eval.yaml").write_text(json.dumps(document))
    return ["--config_path", str(folder / "eval.yaml")]


def memorizing(folder: Path) -> list[str]:
    (folder / "book.txt").write_text(TEXT)
    document = {
        "checkpoint_path": str(folder / "run"),
        "txt_path": str(folder / "book.txt"),
        "output_base_path": str(folder / "out"),
        "chunk_size": 20,
        "prompt_tokens": 12,
        "token_mode": True,
        "cursor_inc_tokens": 1,
        "eval_batch_size": 8,
        "trainer": {"tracker": {"type": "noop"}, "log_dir": str(folder / "logs")},
    }
    (folder / "book.yaml").write_text(json.dumps(document))
    return ["--config_path", str(folder / "book.yaml")]


def resuming(damage: Callable[[Path, int], None]) -> Callable[[Path], list[str]]:
    """A training run of four steps, saved at 2 and 4, of which the newer checkpoint is damaged; how it goes on."""

    def prepared(folder: Path) -> list[str]:
        (folder / "inputs").mkdir()
        inputs = make_inputs(folder / "inputs")
        module, *words = inputs.train_lm(folder, steps=4)
        first = Attack(name="first", command=module.rsplit(".", 1)[1], words=words, code=0, seconds=60)
        judge(first, strike(first, folder))
        damage(folder / "checkpoints" / "run", 4)
        return inputs.train_lm(folder, steps=6)[1:]

    return prepared


def row(name: str, command: str, words: Callable[[Path], list[str]], file: str, step: int, other: int) -> Attack:
    says = (f"step-{step}/{file}", f"the newest intact one beside it is of step {other}")
    return Attack(name=name, command=command, words=words, code=BAD, says=says, seconds=60)


ATTACKS = [
    row("export-arrays", "export_lm_to_hf", of_a_model(in_arrays, exporting), "arrays-", 7, 5),
    row("export-metadata", "export_lm_to_hf", of_a_model(in_metadata, exporting), "metadata.json", 7, 5),
    row("eval-arrays", "eval_lm", of_a_model(in_arrays, evaluating), "arrays-", 7, 5),
    row("eval-metadata", "eval_lm", of_a_model(in_metadata, evaluating), "metadata.json", 7, 5),
    row("memorization-arrays", "eval_careless_lm", of_a_model(in_arrays, memorizing), "arrays-", 7, 5),
    row("resume-arrays", "train_lm", resuming(in_arrays), "arrays-", 4, 2),
    row("resume-metadata", "train_lm", resuming(in_metadata), "metadata.json", 4, 2),
]


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=["export-arrays"]))
def test_commands(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
