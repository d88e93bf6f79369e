"""Parser of the command line of `plan`: splits it into options of `plan` and arguments of the entry point."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from levanter.commands.catalog import ENTRY_POINTS, EntryPointRef
from levanter.config import HelpRequested
from levanter.config.errors import COMMAND_LINE, Problem, did_you_mean
from levanter.config.loader import HELP_ALL

if TYPE_CHECKING:
    from levanter.plan.preflight.state import Scope

LOCAL, FULL = "local", "full"


class PlanUsageError(ValueError):
    """The command line is not a valid request."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The parsed command line.

    Attributes:
        entry_point: which run.
        argv: its own arguments: files and overrides.
        targets: accelerators' names and `local`.
        json: a file for the verdicts, `-` for standard output.
        html: a file for the page.
        compile: whether to compile.
        scope: which Programs the verdict covers (`preflight.Question`).
        require_inputs: whether missing inputs are refused.
        search: whether to look for better meshes.
        keep_hlo: a folder in which the compiler's output is kept.
        cache: whether compiler results are cached, and cached ones reused.
        compare: whether the same run without adapters is planned too.
    """

    entry_point: EntryPointRef
    argv: tuple[str, ...]
    targets: tuple[str, ...]
    json: str | None = None
    html: str | None = None
    compile: bool = True
    scope: "Scope" = "run"
    require_inputs: bool = False
    search: bool = False
    keep_hlo: str | None = None
    cache: bool = True
    compare: bool = False


_OF_PLAN_BLOCK = (
    "assume_tokens",
    "assume_requests",
    "chip_hour_price",
    "goal",
    "interruptions_per_day",
    "restart_wait",
    "store_rate",
    "storage_price",
    "egress_price",
    "deadline",
    "budget",
)
"""Options that are keys of the block `plan:`. `--price` is one too, in a shorter form."""
_WITH_VALUE = ("target", "json", "html", "keep_hlo", "compare", "price", *_OF_PLAN_BLOCK)
_SWITCHES = ("no_compile", "require_inputs", "search", "all_programs", "timed_only", "no_cache")

HELP = """usage: python -m levanter.main.plan ENTRY_POINT --config_path FILE --target POD [--key value …]

Predicts whether a run loads and fits on a pod, and how fast it runs, from its own configuration. Needs no TPU, no
weights (a folder with a config.json, or a complete `model:` block, is enough) and no network.

entry points:
{entry_points}

options:
  --target POD         v4-256, v5p-128, v6e-64, 2xv5p-128, v6e:4x8, h100x8, gb200x72, or `local` for the devices
                       here; several: --target A --target B, or --target A,B
  --no-compile         lower bounds only, without compiling: takes seconds instead of a minute, and refuses a run
                       whose inputs, gradients and named activations alone exceed the memory
  --timed_only         compile only the Programs that make up the job's time; the verdict then covers no others
                       (default: all: loading, initialization, evaluation, checkpoints, exports)
  --all_programs       also compile the initialization of the weights (minutes; estimated otherwise)
  --require_inputs     refuse a checkpoint, tokenizer or text that is absent or remote (default: list it)
  --assume_tokens N    tokens of the text, if it is unavailable (also `plan: {{assume_tokens: N}}` in the file)
  --assume_requests N  requests of the lm_eval tasks, if their documents are unavailable
  --price D            dollars for a chip-hour (GPU-hour): reports dollars of the job, or of a million tokens; by
                       generation and kind of offer: --price v5p=D,v6e=D,v6e:spot=D. No price is assumed
  --chip_hour_price D  the same as --price D
  --deadline TIME      longest time of a training run, such as 7d or 36h: compares pods, and names the cheapest and the
                       fastest that meet it: the targets, or for a single one its smaller and larger pods
  --budget D           most dollars of a training run: as for --deadline
  --interruptions_per_day N  how often the pod stops (default: the rate of a published run, by its chips)
  --restart_wait TIME  from an interruption until the pod is there again (default: 0s)
  --store_rate R       10⁹ bytes a second that a host reads from storage and writes to it (default: 2, assumed)
  --storage_price D    dollars for 10⁹ bytes stored for a month
  --egress_price D     dollars for 10⁹ bytes read from storage
  --search             look for meshes that fit better or run faster
  --goal GOAL          objective of a search for runs that generate text: max_rows, latency_ms, or
                       tokens_per_second (default)
  --compare full       for runs that train adapters: also plan the same run as full fine-tuning, to compare
  --no_cache           recompile everything and write no cache
  --json FILE          the verdicts as JSON; `-` for standard output
  --html FILE          the verdicts as one self-contained page
  --keep_hlo FOLDER    folder for the compiler's output of each Program
  everything else      options of the entry point: --trainer.mesh.axes '{{model: 8}}', …

exit codes: 0 fits, or NOT COMPILED (the known bytes fit; only a compiler knows the rest);
2 bad input (unknown key or axis, indivisible size, missing file with --require_inputs); 3 does not fit; 4 the compiler
crashed; 6 undecided (no compiler, and the memory of a device or the Programs are unknown); 130 Ctrl-C.
With several targets: the worst exit code (3 before 4 before 2 before 6).

examples:
  python -m levanter.main.plan eval_lm --config_path config/eval/demo.yaml --target local
  python -m levanter.main.plan train_lm --config_path config/train/llama2_7b_v4-32.yaml --target v4-32,v6e-16
  python -m levanter.main.plan train_lm --help
"""


def help_text() -> str:
    """The text of `--help`."""
    width = max(map(len, ENTRY_POINTS)) + 2
    rows = "\n".join(f"  {entry.name:<{width}}{entry.summary}" for entry in ENTRY_POINTS.values())
    return HELP.format(entry_points=rows)


def parse_plan_request(argv: Sequence[str]) -> PlanRequest:
    """Splits a command line into the options of `plan` and the entry point's own arguments.

    Raises:
        HelpRequested: `--help` alone; after an entry point it shows that one's keys.
        PlanUsageError: lists a missing or unknown entry point, a missing target, flags without values.
    """
    words = list(argv)
    if not words or words[0] in ("-h", "--help"):
        if words:
            raise HelpRequested(help_text())
        raise PlanUsageError(f"no entry point given; known: {', '.join(ENTRY_POINTS)}\n\n{help_text()}")
    split = _split(words)
    problems, values, switches, rest, names = split.problems, split.values, split.switches, split.rest, split.names
    # `--help` behind an entry point shows that entry point's keys, so no target is needed then.
    wants_help = any(word in ("-h", "--help", *HELP_ALL) for word in rest)
    entry = ENTRY_POINTS.get(names[0]) if names else None
    if entry is None:
        what = f"unknown entry point {names[0]!r}" if names else "the entry point must come first"
        hint = did_you_mean(names[0], ENTRY_POINTS) if names else ""
        problems.append(f"{what}{hint} (known: {', '.join(ENTRY_POINTS)})")
    # `--target A,B` and repeated flags are equal.
    targets = [name.strip() for value in values["target"] for name in value.split(",") if name.strip()]
    if not targets and not wants_help:
        problems.append("no target: give --target v4-256 (any accelerator; several are planned in turn) or local")
    if any(value != FULL for value in values["compare"]):
        problems.append(f"--compare {values['compare'][0]}: what a run is compared with is `{FULL}`, full fine-tuning")
    if {"all_programs", "timed_only"} <= switches:
        problems.append("--all_programs and --timed_only contradict each other")
    # A repeated option is most likely a mistake; only targets may be repeated.
    for name in ("json", "html", *_OF_PLAN_BLOCK, "keep_hlo", "compare", "price"):
        if len(values[name]) > 1:
            problems.append(f"--{name} is given {len(values[name])} times")
    prices: tuple[str, ...] = ()
    if values["price"]:
        try:
            prices = price_words(values["price"][0])
        except PlanUsageError as error:
            problems.append(str(error))
    if prices and values["chip_hour_price"] and prices[0].startswith("--plan.chip_hour_price"):
        problems.append("--price and --chip_hour_price both give the price of every target; keep one")
    if problems:
        raise PlanUsageError("\n".join(problems))
    assert entry is not None

    def first_value(name: str) -> str | None:
        return values[name][0] if values[name] else None

    return PlanRequest(
        entry_point=entry,
        # Options of the block `plan:` become overrides of the entry point's configuration.
        argv=(*rest, *(f"--plan.{name}={first_value(name)}" for name in _OF_PLAN_BLOCK if values[name]), *prices),
        targets=tuple(dict.fromkeys(targets)),
        json=first_value("json"),
        html=first_value("html"),
        compile="no_compile" not in switches,
        scope="all" if "all_programs" in switches else "timed" if "timed_only" in switches else "run",
        require_inputs="require_inputs" in switches,
        search="search" in switches,
        keep_hlo=first_value("keep_hlo"),
        cache="no_cache" not in switches,
        compare=bool(values["compare"]),
    )


def price_words(text: str) -> tuple[str, ...]:
    """The words for the entry point's command line that mean `--price TEXT`.

    >>> price_words("4.2"), price_words("v5p=4, v6e:spot=1.5")
    (('--plan.chip_hour_price=4.2',), ('--plan.price={"v5p": 4, "v6e:spot": 1.5}',))

    Raises:
        PlanUsageError: the text is neither a number nor a list of generations with one.
    """
    # One number is the price of every target.
    if "=" not in text:
        return (f"--plan.chip_hour_price={text.removeprefix('$')}",)
    entries: dict[str, str] = {}
    for entry in text.split(","):
        name, equals, dollars = (part.strip() for part in entry.partition("="))
        if not equals or not name or not dollars:
            raise PlanUsageError(f"--price {text}: expected dollars, or a list such as v5p=4,v6e:spot=1.5")
        if name in entries:
            raise PlanUsageError(f"--price {text}: {name} has two prices")
        entries[name] = dollars.removeprefix("$")
    # YAML, with quoted keys because of the colon in `v6e:spot`; numbers are checked by the configuration.
    inner = ", ".join(f"{json.dumps(name)}: {dollars}" for name, dollars in entries.items())
    return (f"--plan.price={{{inner}}}",)


@dataclass(frozen=True)
class _Split:
    """The words of a command line: the entry point, options of `plan` by name, and the entry point's own words."""

    names: list[str] = field(default_factory=list[str])
    values: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _WITH_VALUE})
    switches: set[str] = field(default_factory=set[str])
    rest: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])


def _split(words: list[str]) -> _Split:
    split = _Split()
    values, rest, names = split.values, split.rest, split.names
    while words:
        word = words.pop(0)
        flag, equals, text = word.removeprefix("--").partition("=")
        # `--no-compile` and `--no_compile` are the same flag.
        flag = flag.replace("-", "_")
        # Only the first bare word names the entry point.
        if not word.startswith("-") and not names and not rest:
            names.append(word)
        elif word.startswith("--") and flag in _SWITCHES and not equals:
            split.switches.add(flag)
        elif word.startswith("--") and flag in _WITH_VALUE:
            # A word that starts with `--` is the next flag, not a value.
            if not equals and (not words or words[0].startswith("--")):
                split.problems.append(f"--{flag} needs a value")
            else:
                values[flag].append(text if equals else words.pop(0))
        else:
            rest.append(word)
            if word.startswith("--") and "=" not in word:
                # The next word is the key's value, whatever it looks like.
                while words and not words[0].startswith("--"):
                    rest.append(words.pop(0))
    return split


def suggest_plan_option(problem: Problem) -> Problem:
    """Adds the nearest option of `plan` to the error for an unknown key on the command line."""
    words = re.fullmatch(r"--([\w-]+) needs a value", problem.message)
    key = words[1] if words else problem.key if problem.message.startswith("unknown key") else ""
    # Only errors of the command line: in a file an unknown key is no option of `plan`.
    here = problem.mark is not None and problem.mark.source == COMMAND_LINE
    if not here or not key or "." in key:
        return problem
    options = sorted((*_WITH_VALUE, *_SWITCHES))
    meant = did_you_mean(key.replace("-", "_"), options).removeprefix("; ")
    listed = ", ".join(f"--{name}" for name in options)
    return replace(problem, message=f"{problem.message}\noptions of plan: {listed}" + (f"; {meant}" if meant else ""))
