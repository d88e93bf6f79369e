"""`levanter X …` is `python -m levanter.main.X …`; without a command, the list of them. It imports none of them."""

import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from textwrap import shorten

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
    """The list of commands; those that are not implemented yet by name only."""
    summaries = commands()
    width = max(map(len, summaries))
    lines = ["usage: levanter COMMAND [--config_path FILE] [--KEY VALUE …]", ""]
    lines += [
        f"  {name:<{width}}  {shorten(summary, WIDTH - width - 4, placeholder=' …')}"
        for name, summary in summaries.items()
    ]
    lines += ["", f"not implemented yet: {', '.join(sorted(ABSENT))}"]
    lines += ["", "`levanter COMMAND --help` lists its keys; `levanter --version` prints the version.",
              "Runs on pods are launched by `python -m levanter.infra.launch`."]  # fmt: skip
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by the command that the first word names; returns an exit code only without one."""
    # Modules are imported where they are needed, so that `levanter --help` imports no more than it uses.
    import_module("levanter.io.stdout").prepare_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(listed(), file=sys.stderr)
        return 2
    if words[0] in ("-h", "--help", "help"):
        print(listed())
        return 0
    if words[0] == "--version":
        print(f"levanter {import_module('levanter.io.package_version').version()}")
        return 0
    # Commands are modules, so `eval-lm` is accepted for `eval_lm`.
    name = words[0].replace("-", "_")
    known = commands().keys() | ABSENT.keys()
    if name not in known:
        near = import_module("levanter.config.errors").did_you_mean(name, sorted(known))
        print(f"error: unknown command {words[0]!r}{near}\n\n{listed()}", file=sys.stderr)
        return 2
    # `execv` replaces the process without flushing Python's buffers.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", f"levanter.main.{name}", *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
