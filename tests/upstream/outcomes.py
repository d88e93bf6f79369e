"""A pytest plugin that `measure.py` loads: what became of each test, a JSON line each, in the file `UPSTREAM_OUTCOMES`.

    {"file": "tests/test_attention.py", "test": "test_causal_mask", "outcome": "failed", "why": "AttributeError: …"}

`why` is the line that raised, or the reason for skipping. A file that cannot be imported is one line without a test.
"""

import json
import os
from pathlib import Path

import pytest

OUTCOMES = "UPSTREAM_OUTCOMES"


def _tell(**row: str | None) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    raised = report.longrepr
    if isinstance(raised, tuple):
        return str(raised[2]).removeprefix("Skipped: ")
    crash = getattr(raised, "reprcrash", None)
    lines = [line for line in str(raised if crash is None else crash.message).splitlines() if line.strip()]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return " ".join((errors or lines)[:4])[:400]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Notes a file that cannot be imported."""
    if report.outcome != "passed" and report.nodeid.endswith(".py"):
        _tell(file=report.nodeid, test=None, outcome=report.outcome, why=_why(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes the outcome of a test: that of its call, or of its set-up where that is as far as it got."""
    if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
        file, _, test = report.nodeid.partition("::")
        _tell(file=file, test=test, outcome=report.outcome, why="" if report.outcome == "passed" else _why(report))
