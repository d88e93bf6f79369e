"""The launcher's command line: flags with `_` or `-`, the run's own command after `--`, defaults from a file.

`.levanter.yaml` in the working folder, or else in the home folder, holds defaults of the flags by name
(`zone: us-central2-b`) and environment variables of the run under `env`. The command line wins.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from levanter.config.errors import did_you_mean
from levanter.infra.errors import UsageError

SETTINGS = ".levanter.yaml"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`s, with the nearest flag for one that is not known."""

    def __init__(self, *, prog: str, usage: str):
        super().__init__(
            prog=prog,
            usage=usage,
            allow_abbrev=False,
            add_help=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("-h", "--help", action="help", help="show this text")

    def flag(self, *names: str, **keywords: Any) -> None:
        """Adds a flag in all its spellings, with `_` and with `-`."""
        spelled = [name for name in names for name in dict.fromkeys((name, _dashed(name)))]
        # `add_argument` with all spellings would print each of them in --help;
        # the others are registered silently below.
        shown = [name for name in spelled if name in names]
        action = self.add_argument(*shown, **keywords)
        for name in spelled:
            if name not in shown:
                self._option_string_actions[name] = action

    def switch(self, name: str, *, default: bool, help: str) -> None:
        """Adds `--name`, `--name=true` and `--name=false`."""
        self.flag(name, nargs="?", const=True, default=default, type=_truth, metavar="true|false", help=help)

    def error(self, message: str) -> NoReturn:
        """Raises a `UsageError` that names each unknown flag with the nearest known one."""
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        if unknown is None:
            raise UsageError(f"{message}\n{self.prog} --help lists the flags")
        # Suggestions use the spelling with `_` alone, the one that --help prints.
        known = [name for name in self._option_string_actions if name.startswith("--") and "-" not in name[2:]]
        problems = []
        # argparse joins the unknown arguments with spaces; an apostrophe in one must not begin a quotation.
        words = shlex.split(unknown.group(1).replace("'", "\\'"))
        # A word after an unknown flag is probably its value, so only one that follows no flag is reported.
        for before, word in zip(["", *words], words, strict=False):
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                problems.append(
                    f"unknown flag {flag}{did_you_mean(flag.replace('-', '_').replace('__', '--', 1), known)}"
                )
            elif not before.startswith("-"):
                problems.append(f"{word!r} is not a flag; put the run's own command after `--`")
                break
        raise UsageError("\n".join([*problems, f"{self.prog} --help lists the flags"]))


def _dashed(name: str) -> str:
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def _truth(text: str) -> bool:
    if text.lower() in ("true", "yes", "1"):
        return True
    if text.lower() in ("false", "no", "0"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def split_command(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """The launcher's own arguments, and those after the first `--`."""
    words = list(argv)
    if "--" not in words:
        return words, ()
    # The run's own command may have a `--` too: only the first one separates.
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def settings(*, folder: Path, home: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The flag defaults and the variables of the nearest `.levanter.yaml`; both empty if there is none.

    Raises:
        UsageError: the file cannot be read, or is not a mapping.
    """
    path = next((place / SETTINGS for place in (folder, home) if (place / SETTINGS).is_file()), None)
    if path is None:
        return {}, {}
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, Mapping) or not isinstance(document.get("env") or {}, Mapping):
        raise UsageError(f"{path}: expected a mapping of flags to values, and `env` a mapping of names to values")
    flags = {str(key).replace("-", "_"): value for key, value in document.items() if key != "env"}
    return flags, {str(name): str(value) for name, value in (document.get("env") or {}).items()}


def with_settings(parser: Parser, flags: Mapping[str, Any]) -> None:
    """Makes the flags of a settings file the parser's defaults; those of other commands are left alone."""
    # An alias is set under its own name too.
    by_name = {
        option[2:].replace("-", "_"): action.dest
        for option, action in parser._option_string_actions.items()
        if option.startswith("--")
    }
    parser.set_defaults(**{by_name[name]: value for name, value in flags.items() if name in by_name})
