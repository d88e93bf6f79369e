"""The `plan` command: runs preflight for every target and prints the verdicts.

The run is described from its own command line, `levanter.plan.preflight.pipeline` answers for each target, and the
compile worker describes the run again from the same command line, in the same folder (`describe`).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levanter.base.exit_codes import BAD_INPUT, COMPILER_CRASH, DOES_NOT_FIT, NOT_DECIDED, OK
from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.cli.errors import shell
from levanter.commands.cli.heartbeat import heartbeat
from levanter.commands.cli.main import load_command_line
from levanter.commands.plan_options import (
    FULL,
    LOCAL,
    PlanRequest,
    PlanUsageError,
    parse_plan_request,
    suggest_plan_option,
)
from levanter.config import ConfigError, Loaded, load_written
from levanter.config.errors import did_you_mean
from levanter.config.plan_options import PlanOptions
from levanter.io import Output, atomic_write, printable, probe, setup_logging

if TYPE_CHECKING:
    from levanter.plan.compare import Comparison
    from levanter.plan.preflight.state import Question
    from levanter.plan.search.space import Searched
    from levanter.plan.verdict import ProgramVerdict, Verdict
    from levanter.runplan import EntryPoint, RunPlan, Target


KINDS = ("on_demand", "reserved", "spot")
"""Kinds of offers that a generation has prices for."""
ENDLESS = ("serve", "inference_repl")
"""Entry points that run until somebody stops them."""


def describe(payload: Mapping[str, Any], target: "Target") -> "RunPlan":
    """Called by the compile worker: describes the run of the same command line again.

    Args:
        payload: `entry_point`, `argv`, for a searched layout `candidate`, and `compare` for the run without adapters.
        target: as the worker sees it.
    """
    # Imported here, since only the worker calls this function.
    from levanter.commands.cli.devices import set_jax_options
    from levanter.plan.search.space import with_candidate

    entry_point = ENTRY_POINTS[payload["entry_point"]].load()
    loaded = load_written(entry_point.config, payload["argv"])
    # JAX options of the run change what its Programs compile to.
    set_jax_options(loaded.config.trainer)
    if payload.get("compare"):
        assert entry_point.describe_full_finetune is not None
        return entry_point.describe_full_finetune(loaded.config, target, written=loaded.written)
    return entry_point.describe(with_candidate(loaded.config, payload), target, written=loaded.written)


def main(argv: Sequence[str] | None = None) -> int:
    """Plans for every target and prints the verdicts."""
    return shell(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def _main(argv: Sequence[str]) -> int:
    setup_logging("WARNING")
    request = parse_plan_request(argv)
    # Planning does not use the network; what would need it is listed as not checked.
    with nullcontext() if request.require_inputs else _environment(HF_HUB_OFFLINE="1", LEVANTER_OFFLINE="1"):
        return _planned(request)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Temporarily sets environment variables of this process and its children."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            # Removed first, so that a variable that did not exist before does not exist afterwards.
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _planned(request: PlanRequest) -> int:
    show = sys.stderr
    with heartbeat(show) as say:
        say(f"reading the configuration of {request.entry_point.name}")
        # A misspelt target is reported before anything is done for the others.
        targets = _checked(request.targets)
        # Before minutes of compilation: are the output paths writable?
        _try_outputs(request)
        name = request.entry_point.name
        program = f"python -m levanter.main.plan {name}"
        try:
            loaded = load_command_line(name, request.argv, program=program)
        except ConfigError as error:
            raise ConfigError(map(suggest_plan_option, error.problems)) from error
        check_prices(loaded.config.plan, targets)
        # Only now, after the configuration was parsed: importing the entry point takes seconds.
        entry_point = request.entry_point.load()
        import jax

        from levanter.plan.aot import devices_here
        from levanter.plan.compile_cache import CompileCache
        from levanter.plan.preflight.pipeline import preflight
        from levanter.plan.preflight.state import Question

        # This process computes nothing: an available accelerator is left to the worker.
        jax.config.update("jax_platforms", "cpu")
        question = Question(
            target=LOCAL,
            describe=lambda target: entry_point.describe(loaded.config, target, written=loaded.written),
            # The provider is named by text, since the worker is another process.
            provider="levanter.commands.planning:describe",
            payload={"entry_point": request.entry_point.name, "argv": list(request.argv)},
            local=devices_here,
            compile=request.compile,
            scope=request.scope,
            require_inputs=request.require_inputs,
            kept=CompileCache.here() if request.cache else None,
            options=loaded.config.plan,
        )

        def varied(words: tuple[str, ...]) -> Question:
            """The question of the run with more words on its command line."""
            argv = (*request.argv, *words)
            changed = load_written(request.entry_point.config_class(), list(argv), program=program)
            return replace(
                question,
                describe=lambda target: entry_point.describe(changed.config, target, written=changed.written),
                payload={"entry_point": request.entry_point.name, "argv": list(argv)},
            )

        question = replace(question, varied=varied)
        if request.compare and entry_point.describe_full_finetune is None:
            raise PlanUsageError(f"--compare {FULL}: {name} trains no adapters, so there is nothing to compare")
        named, options = targets, loaded.config.plan
        limited = options.deadline is not None or options.budget is not None
        if limited:
            targets = _compared_pods(request, targets)
        verdicts: list[Verdict] = []
        comparisons: list[Comparison] = []
        searches: dict[str, Searched] = {}
        # One target after another; the verdicts are printed together at the end.
        for target in targets:
            folder = None if request.keep_hlo is None else Path(request.keep_hlo) / target.replace(":", "_")
            say(f"planning {request.entry_point.name} for {target}")
            one = replace(question, target=target, keep_text=folder)
            verdicts.append(preflight(one, progress=say))
            # Pods that are only compared get no further answers.
            if target not in named:
                continue
            if request.compare:
                comparisons += _compared(one, entry_point, loaded, verdicts[-1], say)
            if request.search:
                searches |= _searched(one, entry_point, loaded, verdicts[-1], say)
    # With prices, several targets are compared by dollars, too.
    priced = len(verdicts) > 1 and bool(options.price or options.chip_hour_price)
    _report(request, verdicts, searches, comparisons, named=named, options=options if limited or priced else None)
    codes = {verdict.exit_code for verdict in verdicts if _name(verdict) in named}
    # The order of severity: a run that does not fit outweighs a crash, which outweighs bad input.
    return next((code for code in (DOES_NOT_FIT, COMPILER_CRASH, BAD_INPUT, NOT_DECIDED) if code in codes), OK)


def _name(verdict: "Verdict") -> str:
    """The target of a verdict as it is listed."""
    return LOCAL if verdict.accelerator is None else verdict.accelerator.name


def _compared_pods(request: PlanRequest, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The pods to compare for a deadline or a budget: the targets, or those of a single target's kind.

    Raises:
        PlanUsageError: the run has no end, or there is no pod to compare.
    """
    from levanter.hardware import parse_accelerator
    from levanter.plan.pod_choice import pods_of_kind

    if request.entry_point.name in ENDLESS:
        raise PlanUsageError(
            f"--deadline, --budget: {request.entry_point.name} has no end; --price D gives dollars for an hour and for "
            "a million tokens"
        )
    if LOCAL in targets:
        raise PlanUsageError("--deadline, --budget compare pods, and `local` is none: name a target such as v5p-8")
    # Several targets are the list that the user wants compared.
    if len(targets) > 1:
        return targets
    target = next(iter(targets))
    kin = [pod.name for pod in pods_of_kind(parse_accelerator(target))]
    # A topology that is not the default one of its size is no member of the list.
    return tuple(kin) if target in kin else (target, *kin)


def _compared(
    question: "Question",
    entry_point: "EntryPoint[Any, Any, Any]",
    loaded: Loaded[Any],
    verdict: "Verdict",
    say: Callable[[str], None],
) -> list["Comparison"]:
    """Compares the run with the same run without adapters; empty if the run cannot be described."""
    from levanter.plan.compare import compare
    from levanter.plan.preflight.pipeline import preflight

    assert entry_point.describe_full_finetune is not None
    describe_full = entry_point.describe_full_finetune
    say(f"planning full fine-tuning for {question.target}")
    full = replace(
        question,
        describe=lambda target: describe_full(loaded.config, target, written=loaded.written),
        payload={**question.payload, "compare": FULL},
        # A comparison of step times needs only the timed Programs.
        scope="timed",
        keep_text=None if question.keep_text is None else question.keep_text / FULL,
        require_inputs=False,
    )
    comparison = compare(verdict, preflight(full, progress=say))
    return [] if comparison is None else [comparison]


def _searched(
    question: "Question",
    entry_point: "EntryPoint[Any, Any, Any]",
    loaded: Loaded[Any],
    verdict: "Verdict",
    say: Callable[[str], None],
) -> dict[str, "Searched"]:
    """Searches other layouts of the run on the same pod; empty without a pod or a describable run."""
    from levanter.plan.oom_report import decode_cost
    from levanter.plan.search import NothingToSearch
    from levanter.plan.search.space import LayoutCompiler, search_run_decode, search_run_layouts

    pod = verdict.accelerator
    if verdict.plan is None or pod is None:
        say(f"{verdict.target}: no layout search: it needs a pod and a run that can be described")
        return {}
    try:
        run = LayoutCompiler(
            # The layouts of a search would overwrite each other's files.
            question=replace(question, keep_text=None),
            config=loaded.config,
            describe=lambda config, target: entry_point.describe(config, target, written=loaded.written),
            plan=verdict.plan,
            say=say,
        )
        is_text = decode_cost(verdict.plan) is not None
        searched = (
            search_run_decode(run, pod)
            if is_text
            else search_run_layouts(run, pod, configured=_configured_program(verdict))
        )
    except NothingToSearch as error:
        say(f"{verdict.target}: no layout search: {error}")
        return {}
    return {verdict.target: searched}


def _configured_program(verdict: "Verdict") -> "ProgramVerdict | None":
    """The verdict on the searched Program in the configured layout; None if it was not compiled."""
    assert verdict.plan is not None
    name = next((work.program for work in verdict.plan.workloads), None)
    return next((p for p in verdict.programs if p.name == name and p.outcome is not None), None)


def _checked(targets: Sequence[str]) -> tuple[str, ...]:
    """The targets under their canonical names.

    Raises:
        PlanUsageError: lists every unknown name.
    """
    from levanter.hardware import AcceleratorError, parse_accelerator

    # All names are checked before the first target is planned.
    names, problems = [], []
    for target in targets:
        try:
            names.append(LOCAL if target.lower() == LOCAL else parse_accelerator(target).name)
        except AcceleratorError as error:
            problems.append(f"--target {target}: {error} (or `local` for the devices here)")
    if problems:
        raise PlanUsageError("\n".join(problems))
    return tuple(dict.fromkeys(names))


def check_prices(options: PlanOptions, targets: Sequence[str]) -> None:
    """Refuses prices of unknown generations and kinds, and of the devices of this machine.

    Raises:
        PlanUsageError: lists all of them, with the nearest known name.
    """
    from levanter.hardware import GENERATIONS

    # Users write `v5e` as well as `v5litepod`.
    names = [name for generation in GENERATIONS for name in (generation.name, *generation.aliases)]
    problems = []
    # Beside other targets the price is theirs; alone it would mean nothing.
    if tuple(targets) == (LOCAL,) and (options.price or options.chip_hour_price is not None):
        problems.append("--price: `local` is not rented by the hour: name a target such as v5p-8")
    for key in options.price:
        name, colon, kind = key.partition(":")
        if name not in names:
            problems.append(f"plan.price: unknown generation {name!r}{did_you_mean(name, names)}")
        if colon and kind not in KINDS:
            problems.append(
                f"plan.price: unknown kind of offer {kind!r}{did_you_mean(kind, KINDS)} (known: {', '.join(KINDS)})"
            )
    if problems:
        raise PlanUsageError("\n".join(problems))


def _report(
    request: PlanRequest,
    verdicts: Sequence["Verdict"],
    searches: Mapping[str, "Searched"],
    comparisons: Sequence["Comparison"],
    *,
    named: Sequence[str],
    options: PlanOptions | None,
) -> None:
    """Prints the verdicts, and writes them to the requested files.

    Args:
        request: the command line.
        verdicts: of all targets.
        searches: by target.
        comparisons: with full fine-tuning.
        named: the targets that the user named; the text has no details of the others.
        options: prices and limits by which pods are compared; None for no comparison.
    """
    from levanter.plan.pod_choice import choose_pods
    from levanter.plan.report import (
        choice_text,
        choice_values,
        compared_text,
        compared_values,
        render,
        to_html,
        to_json,
    )

    document, texts, pages = to_json(verdicts), [render([v for v in verdicts if _name(v) in named])], []
    if options is not None:
        choice = choose_pods(verdicts, options)
        texts.append(choice_text(choice, options))
        pages.append(("the pods by time and dollars", texts[-1]))
        document["choice"] = choice_values(choice)
    for compared in comparisons:
        texts.append(compared_text(compared))
        pages.append((f"beside full fine-tuning on {compared.target}", texts[-1]))
        document.setdefault("comparisons", []).append(compared_values(compared))
    for target, searched in searches.items():
        texts.append(searched.text)
        pages.append((f"search on {target}", searched.text))
        document.setdefault("searches", []).append(searched.values)
    # With the JSON on standard output, text for people goes to standard error.
    print(printable("\n".join(texts)), file=sys.stderr if request.json == "-" else sys.stdout)
    if request.json is not None:
        text = json.dumps(document, indent=2, ensure_ascii=False)
        if request.json == "-":
            print(text)
        else:
            _write("--json", request.json, text + "\n")
    if request.html is not None:
        _write("--html", request.html, to_html(verdicts, more=pages))


def _try_outputs(request: PlanRequest) -> None:
    """Tries every output path before compilers run for minutes."""
    files = {"--json": None if request.json == "-" else request.json, "--html": request.html}
    outputs = [Output(key=key, path=path, kind="file") for key, path in files.items() if path is not None]
    if request.keep_hlo is not None:
        outputs.append(Output(key="--keep_hlo", path=request.keep_hlo, kind="folder"))
    probe(outputs)


def _write(flag: str, path: str, text: str) -> None:
    try:
        with atomic_write(path) as file:
            file.write(text.encode(errors="backslashreplace"))
    except OSError as error:
        raise PlanUsageError(f"{flag}: {error}") from error
