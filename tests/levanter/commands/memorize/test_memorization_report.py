"""The entry point: folders to a page, thresholds from controls, and what is said of wrong input."""

import json
import subprocess
import sys

import numpy as np
import pytest
from helpers.book_results import book_of_bytes

from levanter.commands.memorize.memorization_report import run
from levanter.memorization.results import FULL

TEXT = "A book that nobody knows, and yet is quoted – 字 by 字 – here and there. " * 6


@pytest.fixture
def folder(tmp_path):
    for n, name in enumerate(("one", "two")):
        book_of_bytes(TEXT, seed=n, model=f"org/{name}").write(str(tmp_path / "runs" / name))
    book_of_bytes("A control text of its own, unseen. " * 9, seed=9).write(str(tmp_path / "control"))
    return tmp_path


def test_one_run_is_reported_beside_it(folder, capsys):
    assert run([str(folder / "runs" / "one"), "--threshold", "0.01"]) == 0
    said = capsys.readouterr().out
    page = (folder / "runs" / "one" / "report.html").read_text()
    assert "A Book: coverage" in said and "report in" in said
    assert "nobody knows" in page and "org/one" in page


def test_a_folder_of_runs_is_compared(folder, capsys):
    output, numbers = folder / "page.html", folder / "numbers.json"
    options = ["--output", str(output), "--json", str(numbers), "--no_text", "--name", "first", "--name", "second"]
    assert run([str(folder / "runs"), *options]) == 0
    page = output.read_text()
    assert "nobody knows" not in page and "Overlap of the runs" in page
    found = json.loads(numbers.read_text())
    assert list(found) == ["first", "second"] and found["first"]["coverage"] != found["second"]["coverage"]
    assert capsys.readouterr().out.startswith("first: coverage")


def test_controls_give_the_threshold(folder, capsys):
    numbers = folder / "numbers.json"
    options = ["--control", str(folder / "control"), "--false_positive_rate", "0.05", "--json", str(numbers)]
    assert run([str(folder / "runs" / "one"), *options]) == 0
    found = json.loads(numbers.read_text())["A Book"]
    control = np.sort(book_of_bytes("A control text of its own, unseen. " * 9, seed=9).log_pz(FULL))
    allowed = int(0.05 * len(control))
    assert (control >= found["log_threshold"]).sum() == allowed
    assert "control windows reach" in (folder / "runs" / "one" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}/nothing", "{}/runs/three"], "no such folder"),
        (["{}/runs/one/text.txt"], "no such folder"),
        (["{}/empty"], "neither it nor a folder in it has a windows.parquet; it contains manifest.json"),
        (["{}/runs/one", "--scheme", "k41"], "did not store its normalizer"),
        (["{}/runs/one", "--scheme", "best"], "is not a scheme; examples"),
        (["{}/runs/one", "--threshold", "5"], "0.1 % is 0.001"),
        (["{}/runs", "--name", "only one"], "1 names for 2 runs"),
        (["{}/runs/one", "--control", "{}/control", "--false_positive_rate", "1"], "false_positive_rate"),
    ],
)
def test_wrong_input_is_one_error(folder, capsys, words, said):
    (folder / "empty").mkdir()
    (folder / "empty" / "manifest.json").write_text("{}")
    assert run([word.format(folder) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_line_keeps_its_errors_short(tmp_path):
    command = [sys.executable, "-m", "levanter.main.memorization_report", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 2 and found.stderr.startswith("error: ") and "Traceback" not in found.stderr
    found = subprocess.run(command[:-1], capture_output=True, text=True, check=False)
    assert found.returncode == 2 and "usage" in found.stderr
