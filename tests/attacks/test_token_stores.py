"""Token stores whose sources or whose own files are not what they were: told, and never trained on."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.tiny_runs import make_inputs

STORE = "tokens/numbers/train"
SOURCES, DAMAGED = "have changed since it was built", "this token store is damaged"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A store of two files, its sources and the configuration, in a folder that is copied for each attack."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "texts").mkdir()
    for file in "ab":
        texts = [" ".join(str((7 * n + each + ord(file)) % 61) for n in range(60)) for each in range(20)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"texts/{file}.jsonl").write_text(lines.ljust(4000))
    made = make_inputs(folder / "inputs")
    words = made.train_lm(folder, steps=2, data=made.stored_text(folder, folder / "texts"))[1:]
    attack = Attack(name="build", command="cache_dataset", words=words, code=0, says=("2,400 tokens",))
    judge(attack, strike(attack, folder))
    return folder


def edit(path: Path, *, keep_time: bool) -> None:
    """Another text of the same length: a number becomes another one."""
    before = path.stat()
    text = path.read_text()
    changed = text.replace(" 17 ", " 18 ", 1)
    assert changed != text and len(changed) == len(text)
    path.write_text(changed)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


def swap(one: Path, other: Path) -> None:
    """Two files exchange names, and keep their times."""
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def exchange_times_too(folder: Path) -> None:
    a, b = folder / "texts/a.jsonl", folder / "texts/b.jsonl"
    times = {path: path.stat().st_mtime_ns for path in (a, b)}
    swap(a, b)
    for path, time in times.items():
        os.utime(path, ns=(time, time))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def chunk(folder: Path, array: str, shard: int = 0) -> Path:
    """The file that holds the first values of an array."""
    return next(
        path for path in sorted((folder / STORE / f"shards/{shard:05d}/{array}/c").rglob("*")) if path.is_file()
    )


def exchanged(folder: Path, array: str) -> None:
    """The first two shards' files of an array exchange places; each is whole by its own checksums."""
    one, other = chunk(folder, array), chunk(folder, array, 1)
    assert one.read_bytes() != other.read_bytes()
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def an_old_store(folder: Path) -> None:
    """As versions before this one wrote it: no digests, no versions."""
    path = folder / STORE / "manifest.json"
    value = json.loads(path.read_text())
    for source in value["identity"]["sources"]:
        del source["version"]
    for mark in value["shards"]:
        del mark["digests"], mark["source_digests"]
    path.write_text(json.dumps(value))


def manifest(change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / STORE / "manifest.json").write_text(
        change((folder / STORE / "manifest.json").read_text())
    )


A = "texts/a.jsonl"
ROWS: list[tuple[str, str, Callable[[Path], object], int, tuple[str, ...]]] = [
    ("nothing", "verify", lambda folder: None, 0, ("2 sources match the store", "verified: every")),
    ("edited", "verify", lambda folder: edit(folder / A, keep_time=False), 2, (SOURCES, "a.jsonl: the text has "
                                                                                        "changed")),
    ("edited-with-its-time", "verify", lambda folder: edit(folder / A, keep_time=True), 2, (SOURCES, "a.jsonl")),
    ("edited-then-cached", "cache", lambda folder: edit(folder / A, keep_time=False), 2, (SOURCES, "a.jsonl")),
    ("edited-then-trained", "train", lambda folder: edit(folder / A, keep_time=False), 2, (SOURCES, "a.jsonl")),
    ("touched", "cache", lambda folder: touch(folder / A), 0, ("nothing was missing",)),
    ("sources-swapped", "cache", lambda folder: swap(folder / A, folder / "texts/b.jsonl"), 2, (SOURCES,)),
    ("sources-swapped-with-times", "verify", exchange_times_too, 2, (SOURCES, "a.jsonl", "b.jsonl")),
    ("source-longer", "cache", lambda folder: (folder / A).write_text((folder / A).read_text() + " "), 2,
     ("built from something else", "4,000 bytes, has 4,001")),
    ("source-gone", "verify", lambda folder: (folder / A).unlink(), 2, ("in the store, not configured",)),
    ("ids-flipped", "verify", lambda folder: flip(chunk(folder, "ids")), 2, (DAMAGED, "its content has changed")),
    ("ids-cut", "cache", lambda folder: cut(chunk(folder, "ids")), 2, (DAMAGED, "were written")),
    ("ids-gone", "train", lambda folder: chunk(folder, "ids").unlink(), 2, (DAMAGED, ": missing")),
    ("offsets-flipped", "cache", lambda folder: flip(chunk(folder, "offsets")), 2, ("offsets: damaged",)),
    ("ids-exchanged", "verify", lambda folder: exchanged(folder, "ids"), 2, (DAMAGED,)),
    ("shard-gone", "cache", lambda folder: shutil.rmtree(folder / STORE / "shards/00001"), 2, (DAMAGED, ": missing")),
    ("manifest-cut", "cache", manifest(lambda text: text[:-40]), 2, ("manifest.json: damaged", "delete the folder")),
    ("manifest-of-nothing", "cache", manifest(lambda text: "[]"), 2, ("expected version 1 of a token store",)),
    ("manifest-of-text", "cache", manifest(lambda text: text.replace('"files": {', '"files": "x", "y": {')), 2,
     ("manifest.json: damaged",)),
    ("old", "verify", an_old_store, 0, ("unverified: the store has no digests of 2", "verified: every token")),
    ("old-and-cut", "cache", lambda folder: (an_old_store(folder), cut(chunk(folder, "ids"))), 2, (DAMAGED,)),
]  # fmt: skip
ATTACKS = [
    Attack(name=name, command="train_lm" if how == "train" else "cache_dataset", words=(), code=code, says=says)
    for name, how, _, code, says in ROWS
]
HOW = {name: (how, damage) for name, how, damage, _, _ in ROWS}
QUICK = ("edited", "edited-with-its-time", "sources-swapped", "ids-exchanged", "old")


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=QUICK))
def test_a_store_that_is_not_what_it_was(attack, built, tmp_path):
    # Where it was built: a store knows its sources by their paths.
    kept = tmp_path / "kept"
    shutil.copytree(built, kept)
    how, damage = HOW[attack.name]
    try:
        damage(built)
        verify = ["--verify", "true"] if how == "verify" else []
        words = ["--config_path", str(built / "train_lm.yaml"), *verify]
        judge(attack, strike(Attack(**{**vars(attack), "words": words}), tmp_path))
    finally:
        shutil.rmtree(built)
        shutil.copytree(kept, built)
