"""Writes a report on finished memorization runs: one run, or several compared, with thresholds from control texts.

    python -m levanter.main.memorization_report RUN... [--output report.html] [--no_text] [--name NAME]...
        [--control RUN]... [--false_positive_rate 0.01] [--threshold 0.001] [--cover suffix] [--scheme k40]

A RUN is the folder of a scored book, or a folder of such folders. Nothing is scored: everything is derived from their
`windows.parquet`. With `--control`, the threshold is the smallest p_z that at most `--false_positive_rate` of the
control texts' windows reach; control texts are ones that the model cannot have seen.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from levanter.commands.cli.errors import shell
from levanter.commands.cli.outputs import write_or_keep, write_or_show
from levanter.html.format import exact_percent, integer_text, probability_text
from levanter.io import Output, exists, join, printable, probe, setup_logging
from levanter.io.paths import base_name, filesystem
from levanter.memorization.calibration import Calibration, calibrate
from levanter.memorization.compare import cautions, labels, model_name
from levanter.memorization.coverage import DEFAULT_THRESHOLD, Cover
from levanter.memorization.measurement import Measurement, measure, windows_block
from levanter.memorization.outputs import REPORT
from levanter.memorization.partial_results import require_unchanged
from levanter.memorization.published import published_coverages
from levanter.memorization.report import report_html
from levanter.memorization.results import MANIFEST, TEXT, WINDOWS, BookResult, Scheme
from levanter.runplan import OK


@dataclass(frozen=True, kw_only=True)
class ReportRequest:
    """The parsed command line; see the module.

    Attributes:
        runs: folders.
        output: file for the page.
        names: of the runs, in order; empty for names by what distinguishes them.
        with_text: whether the texts may be in the page.
        controls: folders of control texts.
        false_positive_rate: of control windows.
        threshold: τ without controls.
        cover: which characters a window covers.
        scheme: None for each run's own.
        passages: how many to list per run.
        json: file for the numbers.
    """

    runs: tuple[str, ...]
    output: str
    names: tuple[str, ...] = ()
    with_text: bool = True
    controls: tuple[str, ...] = ()
    false_positive_rate: float = 0.01
    threshold: float = DEFAULT_THRESHOLD
    cover: Cover = "suffix"
    scheme: Scheme | None = None
    passages: int = 20
    json: str | None = None


class NoRunError(ValueError):
    """A path has no scored book; the message lists what it contains."""


def main(config: ReportRequest) -> int:
    """Reads the runs, measures them, writes the page and prints a summary of it."""
    books = _books(config.runs)
    # Before the runs are read: can the page and the numbers be written?
    files = {"--output": config.output, "--json": config.json}
    probe(Output(key=key, path=path, kind="file") for key, path in files.items() if path is not None)
    if config.names and len(config.names) != len(books):
        raise ValueError(
            f"--name: {len(config.names)} names for {len(books)} runs ({', '.join(b.title for b in books)})"
        )
    # By object identity: several runs may be of the same book.
    scheme_of = {id(book): book.scheme if config.scheme is None else config.scheme for book in books}
    thresholds = _calibrations(config, {scheme_of[id(book)] for book in books})
    runs = [
        measure(
            book,
            scheme=scheme_of[id(book)],
            threshold=config.threshold,
            cover=config.cover,
            # Control texts give a threshold for each scheme that some run uses.
            calibration=thresholds.get(scheme_of[id(book)]),
        )
        for book in books
    ]
    names = list(config.names) or labels(runs)
    page = report_html(runs, with_text=config.with_text, passages=config.passages, names=names)
    # The table of the terminal comes first, so that it is seen even if a file cannot be written.
    for name, run in zip(names, runs, strict=True):
        print(printable(_line(name, run)))
    for caution in cautions(runs):
        print(printable(f"note: {caution}"))
    print(f"report in {config.output}", flush=True)
    if config.json is not None:
        numbers = {name: run.summary() for name, run in zip(names, runs, strict=True)}
        write_or_show(config.json, json.dumps(numbers, indent=2, ensure_ascii=False) + "\n")
    write_or_keep(config.output, page.encode("utf-8"))
    return OK


def parse(argv: Sequence[str]) -> ReportRequest:
    """Parses the command line; exits with 2 and the usage if it is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m levanter.main.memorization_report",
        description="Reports on finished memorization runs, on one page for any number of runs.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of one scored book or of several")
    parser.add_argument("--output", help=f"file for the page (default: {REPORT} in the first RUN)")
    parser.add_argument("--name", action="append", default=[], help="name of a run in the page, once per run")
    parser.add_argument("--no_text", action="store_true", help="show positions and numbers only, no text of the books")
    parser.add_argument(
        "--control", action="append", default=[], metavar="RUN", help="run over texts that the model has never seen"
    )
    parser.add_argument(
        "--false_positive_rate",
        type=float,
        default=0.01,
        help="share of control windows that may count (default: 0.01)",
    )
    parser.add_argument(
        "--threshold", type=float, default=DEFAULT_THRESHOLD, help="smallest p_z that counts (default: 0.001)"
    )
    parser.add_argument("--cover", choices=get_args(Cover), default="suffix", help="which characters a window covers")
    parser.add_argument("--scheme", help="decoding scheme: full, k40, greedy, … (default: each run's own)")
    parser.add_argument("--passages", type=int, default=20, help="how many to list per run (default: 20)")
    parser.add_argument("--json", help="file for all numbers as JSON")
    arguments = parser.parse_args(list(argv))
    return ReportRequest(
        runs=tuple(arguments.runs),
        output=arguments.output or join(arguments.runs[0], REPORT),
        names=tuple(arguments.name),
        with_text=not arguments.no_text,
        controls=tuple(arguments.control),
        false_positive_rate=arguments.false_positive_rate,
        threshold=arguments.threshold,
        cover=arguments.cover,
        scheme=None if arguments.scheme is None else Scheme.parse(arguments.scheme),
        passages=arguments.passages,
        json=arguments.json,
    )


def _books(paths: Sequence[str]) -> list[BookResult]:
    """The books of all folders; their problems are reported together."""
    folders, problems = [], []
    for path in paths:
        try:
            folders += _folders(path)
        except NoRunError as error:
            problems.append(str(error))
    if problems:
        raise NoRunError("\n".join(problems))
    for folder in folders:
        # A flipped bit in a text or a score would otherwise be drawn like any other.
        require_unchanged(folder, (TEXT, WINDOWS, MANIFEST))
    return [BookResult.read(folder) for folder in folders]


def _folders(path: str) -> list[str]:
    """The folders of scored books that a path stands for."""
    if exists(join(path, WINDOWS)):
        # Not a scored book itself: perhaps a folder of several.
        return [path]
    fs, name = filesystem(path)
    if not fs.isdir(name):
        raise NoRunError(f"{path}: no such folder")
    inside = sorted(base_name(entry) for entry in fs.ls(name, detail=False))
    folders = [join(path, entry) for entry in inside if exists(join(path, entry, WINDOWS))]
    if not folders:
        shown = ", ".join(inside[:6]) or "nothing"
        raise NoRunError(
            f"{path}: no scored book: neither it nor a folder in it has a {WINDOWS}; it contains {shown}\n"
            "  → a run writes this file when it finishes: if it was interrupted, start the same command again"
        )
    return folders


def _calibrations(config: ReportRequest, schemes: set[Scheme]) -> dict[Scheme, Calibration]:
    """τ for each scheme, from the control texts."""
    if not config.controls:
        return {}
    controls = _books(config.controls)
    return {
        scheme: calibrate(
            [control.log_pz(scheme) for control in controls],
            false_positive_rate=config.false_positive_rate,
            # Overlapping windows are correlated: calibration counts blocks of windows, not single ones.
            block=max(windows_block(control) for control in controls),
        )
        for scheme in schemes
    }


def _line(name: str, run: Measurement) -> str:
    interval = run.coverage_interval
    low, high = exact_percent(interval.low), exact_percent(interval.high)
    line = (
        f"{name}: coverage {exact_percent(run.coverage)} ({low} – {high}) of {integer_text(run.characters)} "
        f"{run.unit}; {integer_text(int(run.reached.sum()))} of {integer_text(len(run.log_pz))} windows have "
        f"p_z ≥ {probability_text(run.log_threshold)} (preset {run.book.preset}, scheme {run.scheme.name})"
    )
    known = published_coverages(run.book.title, model_name(run)) if model_name(run) else {}
    return line + "".join(f"; published for {model}: {value:.2f} %" for model, value in known.items())


def run(argv: Sequence[str] | None = None) -> int:
    """The entry point: exit code 0, or 2 for bad input."""
    setup_logging()
    return shell(lambda: main(parse(sys.argv[1:] if argv is None else argv)))
