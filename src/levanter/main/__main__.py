"""`levanter X …` is `python -m levanter.main.X …`; without a command, the list of them. It imports none of them.

`python -m levanter` is the same program.
"""

import ast
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import wrap

from levanter.commands.guides import GROUPS, GUIDES, OTHER_NAMES, Guide
from levanter.upstream.unsupported.entry_points import ABSENT

WIDTH = 120


def commands(folder: Path = Path(__file__).parent) -> dict[str, str]:
    """Every available command, with the first line of its module. The modules are read, not imported."""
    summaries = {}
    # Modules whose names begin with an underscore are no commands.
    for path in sorted(folder.glob("[!_]*.py")):
        text = path.read_text(encoding="utf-8")
        # Only modules that run as programs are commands; `listed` shows the first line of their docstrings.
        if 'if __name__ == "__main__":' in text:
            summaries[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return summaries


def listed() -> str:
    """The commands by group; those that are not implemented yet by name only."""
    summaries = commands()
    width = max(map(len, summaries))
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    # In the order of the guides, which is that of a reader; commands without a guide follow.
    for name in [*(name for name in GUIDES if name in summaries), *(summaries.keys() - GUIDES.keys())]:
        summary, *more = wrap(summaries[name], WIDTH - width - 4)
        lines = [f"  {name:<{width}}  {summary}", *(" " * (width + 4) + line for line in more)]
        groups[GUIDES.get(name, Guide(GROUPS[-1])).group] += lines
    text = ["usage: levanter COMMAND [--config_path FILE] [--KEY VALUE …]"]
    text += [line for group, lines in groups.items() if lines for line in ("", f"{group}:", *lines)]
    text += ["", *wrap(f"not implemented yet: {', '.join(sorted(ABSENT))}", WIDTH)]
    text += [
        "",
        "`levanter COMMAND --help` lists its keys, `levanter --version` prints the version, and",
        "`levanter --completion bash` (or zsh) a script that completes commands, keys and choices.",
        "Runs on pods are launched by `python -m levanter.infra.launch`.",
    ]
    return "\n".join(text)


def hint(name: str, known: Collection[str]) -> str:
    """What to run instead of a word that is no command."""
    other = OTHER_NAMES.get(name)
    return f"; here it is `{other}`" if other else import_module("levanter.config.errors").did_you_mean(name, known)


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by the command that the first word names; returns an exit code only without one."""
    # Modules are imported where they are needed, so that `levanter --help` imports no more than it uses.
    import_module("levanter.io.stdout").prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(listed(), file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help", "help"):
        try:
            print(listed(), flush=True)
        except BrokenPipeError as error:
            # `levanter --help | head`: whoever reads has seen enough.
            import_module("levanter.io.stdout").output_is_lost(error)
        return 0
    if words[0] == "--version":
        print(f"levanter {import_module('levanter.io.package_version').version()}")
        return 0
    if words[0] in ("--completion", "--complete"):
        return import_module("levanter.commands.cli.completion").main(words, sorted(commands()))
    # Commands are modules, so `eval-lm` is accepted for `eval_lm`.
    name = words[0].replace("-", "_")
    known = commands().keys() | ABSENT.keys()
    if name not in known:
        print(f"error: unknown command {words[0]!r}{hint(name, sorted(known))}\n\n{listed()}", file=sys.stderr)
        return 2
    # `execv` replaces the process without flushing Python's buffers.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"levanter.main.{name}", *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
