"""A finished memorization run whose results were deleted, cut short or changed: they are made again, the same bytes."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.tiny_runs import make_inputs

pytestmark = pytest.mark.optimized

AGAIN, REWRITTEN, NOTHING = "its windows are scored again", "rewritten from its scores", "nothing to do"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run, beside its configuration."""
    folder = tmp_path_factory.mktemp("finished")
    made = make_inputs(folder / "inputs").eval_careless_lm(folder)[1:]
    attack = Attack(name="finish", command="eval_careless_lm", words=made, code=0, seconds=120)
    judge(attack, strike(attack, folder))
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def older(path: Path) -> None:
    """As versions before this one left it."""
    value = json.loads(path.read_text())
    del value["results"]
    path.write_text(json.dumps(value))


def without_digests(path: Path) -> None:
    older(path)
    (path.parent / "windows.parquet").unlink()


DAMAGE: list[tuple[str, str, Callable[[Path], object], tuple[str, ...]]] = [
    ("nothing", "report.html", Path.read_bytes, (NOTHING,)),
    ("report-deleted", "report.html", Path.unlink, (REWRITTEN, "report.html: missing", NOTHING)),
    ("picture-flipped", "heatmap.png", flip, (REWRITTEN, "heatmap.png: its content has changed", NOTHING)),
    ("curve-cut", "pz_data.npz", cut, (REWRITTEN, "pz_data.npz:", "were written", NOTHING)),
    ("summary-emptied", "summary.json", empty, (REWRITTEN, "summary.json: 0 bytes", NOTHING)),
    ("text-changed", "text.txt", flip, (REWRITTEN, "text.txt: its content has changed", NOTHING)),
    ("scores-deleted", "windows.parquet", Path.unlink, (AGAIN, "windows.parquet: missing")),
    ("scores-cut", "windows.parquet", cut, (AGAIN, "windows.parquet:", "were written")),
    ("scores-flipped", "windows.parquet", flip, (AGAIN, "windows.parquet: its content has changed")),
    ("manifest-deleted", "manifest.json", Path.unlink, (AGAIN, "manifest.json: missing")),
    ("of-an-earlier-version", ".success", older, (NOTHING, "not verified")),
    ("of-an-earlier-version-without-scores", ".success", without_digests, (AGAIN, "windows.parquet: missing")),
]
ATTACKS = [
    Attack(name=name, command="eval_careless_lm", words=(), code=0, says=says, seconds=60)
    for name, _, _, says in DAMAGE
]
HOW = {name: (file, damage) for name, file, damage, _ in DAMAGE}


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=("nothing", "report-deleted", "scores-flipped")))
def test_results_that_are_not_what_was_written(attack, finished, tmp_path, caplog):
    before = {path.name: path.read_bytes() for path in (finished / "out").iterdir()}
    shutil.copytree(finished / "out", tmp_path / "out")
    file, damage = HOW[attack.name]
    damage(tmp_path / "out" / file)
    command = ["--config_path", str(finished / "eval_careless_lm.yaml"), "--output_base_path", str(tmp_path / "out")]
    outcome = strike(Attack(**{**vars(attack), "words": command}), tmp_path)
    judge(attack, type(outcome)(outcome.code, outcome.text + caplog.text, outcome.seconds))
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    if "an-earlier-version" not in attack.name:
        assert sorted(before) == sorted(after)
        assert [name for name in before if before[name] != after[name]] == []


def report(words: list[str], capsys) -> str:
    """Runs the command that draws a report, which must refuse; what it printed."""
    from levanter.commands.memorize.memorization_report import run

    assert run(words) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.out + printed.err


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 30))])
def test_the_report_draws_nothing_that_has_changed(seed, finished, tmp_path, capsys):
    """A flipped bit or a cut in each of the files that it reads, drawn by a seed."""
    draw = random.Random(20261128 + seed)
    for name in ("text.txt", "windows.parquet", "manifest.json"):
        folder = tmp_path / name
        shutil.copytree(finished / "out", folder)
        content = bytearray((folder / name).read_bytes())
        at = draw.randrange(len(content))
        if draw.random() < 0.3:
            del content[at:]
        else:
            content[at] ^= 1 << draw.randrange(8)
        (folder / name).write_bytes(content)
        page = tmp_path / f"{name}.html"
        printed = report([str(folder), "--output", str(page)], capsys)
        assert f"{folder}/{name}: " in printed and "start the command of that run again" in printed
        assert not page.exists()


@pytest.mark.parametrize("name", ["windows.parquet", "manifest.json"])
def test_the_report_names_a_truncated_file_without_its_record(name, finished, tmp_path, capsys):
    shutil.copytree(finished / "out", tmp_path / "out")
    (tmp_path / "out" / ".success").unlink()
    cut(tmp_path / "out" / name)
    printed = report([str(tmp_path / "out")], capsys)
    assert (
        f"{tmp_path}/out/{name}: damaged or cut off (" in printed and "start the command of that run again" in printed
    )
