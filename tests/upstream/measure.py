"""How many of upstream's own tests pass here: `python tests/upstream/measure.py TREE [--markdown] [--only FILE …]`.

TREE is upstream's, as its source distribution unpacks or as its repository has it. Its `tests` and example documents
are copied into a scratch folder and run as they stand, each file in a process of its own, on 8 virtual CPU devices and
without a network. Nothing of them is edited; what makes them find this project is the path of imports alone.

A file that cannot be imported counts with the tests that are written in it. What upstream's tests skip by themselves,
and what asks for packages that neither this project nor its tests declare, is put aside and listed.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

CAUSES: tuple[tuple[str, str], ...] = (
    ("a package that is not installed", r"No module named '(?!levanter|haliax|jax)"),
    (
        "JAX, Haliax or transformers is newer than the test",
        r"No module named '(jax|haliax)|module '?'?(jax|haliax)[\w.]*'? has no attribute|query must be a NamedArray"
        r"|multiple values for argument 'mask'|PositionalSharding|unexpected keyword argument 'dim'|Axis\(name='D",
    ),
    ("it asks the Hugging Face hub", r"huggingface\.co|LocalEntryNotFound|OfflineMode|local cache|HF_HUB_OFFLINE"),
    ("a file that the distribution lacks", r"gpt2_tok"),
    ("refused by name: low-rank adapters", r"low-rank adapters"),
    ("refused by name: token caches and their shards", r"tokens live in token stores"),
    ("refused by name: a family that is not implemented", r"a family that is not implemented"),
    ("refused by name: parts of models", r"models are one decoder|is not carried over: `?levanter\.models"),
    (
        "refused by name: other",
        r"GoneError|GoneMemberError|is not carried over|not implemented yet|not supported by attention here",
    ),
    ("a key of early 2024 that is no key any more", r"unknown key|rope_scaling|failed to parse"),
    ("num_kv_heads is 32 unless it is given, and does not divide the heads", r"num_kv_heads 32 does not divide"),
    ("the default mapping has more mesh axes", r"\{'batch': \('r"),
    ("configurations of models are in levanter.models", r"levanter\.main\.\w+' has no attribute"),
    ("it took too long", r"Timeout"),
)
"""A cause and the pattern of its messages; the first that matches is the cause. What matches none is told as it is."""

ASIDE = {"skipped", "aside"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one of upstream's tests.

    Attributes:
        file: its file.
        test: its name with parameters.
        outcome: passed, failed, skipped (by upstream itself) or aside (a package is not installed).
        why: what was raised, or why it was skipped.
    """

    file: str
    test: str
    outcome: str
    why: str

    @property
    def cause(self) -> str:
        """The class of what was raised."""
        return next((cause for cause, pattern in CAUSES if re.search(pattern, self.why)), self.why[:100])


def scratch_copy(tree: Path, scratch: Path) -> Path:
    """Copies a tree's tests, and its example documents to where those look for them; the folder of the tests.

    Raises:
        ValueError: the tree has no tests.
    """
    if not (tree / "tests").is_dir():
        raise ValueError(f"{tree} has no folder `tests`: give the root of upstream's tree")
    shutil.copytree(tree / "tests", scratch / "tests")
    documents = next(
        (found for at in ("config", "src/levanter/config", "levanter/config") if (found := tree / at).is_dir()), None
    )
    if documents is not None:
        shutil.copytree(documents, scratch / "config")
    return scratch / "tests"


def files_of(folder: Path) -> list[Path]:
    """The files that pytest would collect, by name."""
    found = {path for pattern in ("test_*.py", "*_test.py") for path in folder.rglob(pattern) if path.is_file()}
    return sorted(found)


def run_file(path: Path, tests: Path, *, seconds: float) -> list[Outcome]:
    """Runs one file in a process of its own."""
    name = str(path.relative_to(tests))
    report = tests.parent / "outcomes.jsonl"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(
            # The folder above `tests` first: 2025's conftest imports `tests.test_utils`, 2024's files `test_utils`.
            (*map(str, (tests.parent, tests, HERE, ROOT / "src", ROOT)), os.environ.get("PYTHONPATH", ""))
        ),
        "UPSTREAM_OUTCOMES": str(report),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "outcomes",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tests),
    ]
    command += ["--timeout", str(seconds), "-o", "addopts=", "-W", "ignore", name]
    try:
        done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=10 * seconds)
        ended = f"the process ended: {done.stdout[-300:]} {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        ended = f"Timeout: {10 * seconds:g} s"
    rows = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return list(_outcomes(name, path, rows, ended))


def _outcomes(name: str, path: Path, rows: list[dict[str, str | None]], ended: str) -> Iterator[Outcome]:
    written = [
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    seen = {str(row["test"]).split("::")[-1].split("[")[0] for row in rows}
    broken = next((row["why"] for row in rows if row["test"] is None), None)
    for row in rows:
        if row["test"] is not None:
            yield _judged(name, row["test"], str(row["outcome"]), row["why"] or "")
    for test in written:
        if test not in seen:
            yield _judged(name, test, "failed", broken or ended)


def _judged(file: str, test: str, outcome: str, why: str) -> Outcome:
    # JAX, Haliax and this project are declared; a part of them that is missing is a failure.
    aside = outcome == "failed" and re.search(CAUSES[0][1], why) is not None
    return Outcome(file=file, test=test, outcome="aside" if aside else outcome, why=why)


def report(outcomes: Sequence[Outcome]) -> str:
    """The counts of each file, and of each cause of a failure, as Markdown."""
    lines = ["| file | collected | passed | failed | put aside |", "| --- | ---: | ---: | ---: | ---: |"]
    groups = [
        (file, [each for each in outcomes if each.file == file]) for file in dict.fromkeys(o.file for o in outcomes)
    ]
    for file, rows in (*groups, ("**all**", list(outcomes))):
        aside = sum(row.outcome in ASIDE for row in rows)
        passed, failed = (sum(row.outcome == kind for row in rows) for kind in ("passed", "failed"))
        lines.append(f"| {file} | {passed + failed} | {passed} | {failed} | {aside} |")
    failed = [row for row in outcomes if row.outcome == "failed"]
    passed = sum(row.outcome == "passed" for row in outcomes)
    lines += ["", f"{passed} of {passed + len(failed)} pass ({passed / max(1, passed + len(failed)):.0%}).", ""]
    lines += ["| failures | cause | where |", "| ---: | --- | --- |"]
    for cause, count in Counter(row.cause for row in failed).most_common():
        where = Counter(row.file for row in failed if row.cause == cause)
        told = ", ".join(f"{file} {n}" for file, n in where.items())
        lines.append(f"| {count} | {cause.replace('|', '/')} | {told} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs them and prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="upstream's tree, with a folder `tests`")
    parser.add_argument("--only", nargs="*", default=(), help="files, by name")
    parser.add_argument("--seconds", type=float, default=120, help="of a test, at most")
    parser.add_argument("--json", type=Path, help="where every outcome is written")
    asked = parser.parse_args(argv)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as scratch:
        tests = scratch_copy(asked.tree.resolve(), Path(scratch))
        for path in files_of(tests):
            if asked.only and path.name not in asked.only:
                continue
            outcomes += run_file(path, tests, seconds=asked.seconds)
            counted = Counter(each.outcome for each in outcomes if each.file == str(path.relative_to(tests)))
            sys.stderr.write(f"{path.relative_to(tests)}: {dict(counted)}\n")
    if asked.json is not None:
        asked.json.write_text("".join(json.dumps(vars(each)) + "\n" for each in outcomes))
    sys.stdout.write(report(outcomes) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
