"""The environment variables of a run, which hosts receive in a file with mode 600, never on a command line.

One `NAME=value` a line, as `docker run --env-file` reads it. The file is copied to each host by scp; the script there
reads it line by line and evaluates nothing in it.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from levanter.infra.errors import UsageError

FORWARDED = ("WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_BASE_URL", "WANDB_MODE", "HF_TOKEN",
             "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN")  # fmt: skip
"""Variables that are forwarded by default, if they are set in this process."""

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|COOKIE|SESSION", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_|github_pat_|AKIA|ya29\.|eyJ)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The variables of a run.

    Attributes:
        values: name → value.
        forwarded: names that were forwarded by default.
    """

    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    forwarded: tuple[str, ...] = ()

    def secrets(self) -> tuple[str, ...]:
        """The values that are never shown, recognized by the variable's name or the value's prefix."""
        return tuple(
            value
            for name, value in self.values.items()
            if value and (_SECRET_NAME.search(name) or _SECRET_VALUE.match(value))
        )

    def with_values(self, values: Mapping[str, str]) -> "Environment":
        """The environment with more variables, which take precedence."""
        return Environment(values={**self.values, **values}, forwarded=self.forwarded)

    def text(self) -> str:
        """The file's text."""
        return "".join(f"{name}={value}\n" for name, value in sorted(self.values.items()))

    def write(self, path: Path) -> None:
        """Writes the file so that nobody else can ever read it, not even for a moment."""
        # O_EXCL with mode 600: an existing file could have wider permissions, or be open in another process.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(self.text())


def collect(
    pairs: Sequence[Sequence[str]],
    files: Iterable[str] = (),
    *,
    here: Mapping[str, str],
    defaults: Mapping[str, str] | None = None,
) -> Environment:
    """Builds the environment of a run from the command line.

    Later sources override earlier ones: forwarded variables, `defaults` (of a settings file), `files`, `pairs`.

    Args:
        pairs: `-e NAME=value`, `-e NAME value`, or `-e NAME` (its value here).
        files: files of `NAME=value` lines; `#` begins a comment line, `export ` and quotes around a value are dropped.
        here: this process's environment.
        defaults: values of a settings file.

    Raises:
        UsageError: lists everything that cannot be parsed; values are not shown.
    """
    problems: list[str] = []
    forwarded = {name: here[name] for name in FORWARDED if here.get(name)}
    # Later entries win, so the order of these updates is the documented precedence.
    values = {**forwarded, **(defaults or {})}
    for file in files:
        values.update(_read(file, problems))
    for pair in pairs:
        # Only the first `=` separates; values such as base64 have more of them.
        name, equals, value = pair[0].partition("=")
        if len(pair) > 2 or (len(pair) == 2 and equals):
            problems.append(f"-e {name}: expected NAME=value, NAME value, or NAME alone (its value here)")
        elif not equals and len(pair) == 1 and name not in here:
            problems.append(f"-e {name}: is not set here; give its value in a file (--env_file)")
        else:
            values[name] = pair[1] if len(pair) == 2 else value if equals else here[name]
    for name, value in values.items():
        if not _NAME.fullmatch(name):
            problems.append(f"{name!r} is not a valid name of an environment variable")
        # The format has one variable a line and no quoting, so such a value would become further variables.
        if "\n" in value or "\0" in value:
            problems.append(f"{name}: its value has a line break, which an environment file cannot hold")
    if problems:
        raise UsageError("\n".join(problems))
    return Environment(
        values=values, forwarded=tuple(name for name, value in forwarded.items() if values[name] == value)
    )


def _read(file: str, problems: list[str]) -> dict[str, str]:
    variables: dict[str, str] = {}
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--env_file {file}: cannot be read ({getattr(error, 'strerror', None) or error})")
        return variables
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--env_file {file}:{number}: expected NAME=value")
            continue
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            # `docker --env-file` would keep the quotes; files written for a shell have them.
            value = value[1:-1]
        variables[name.strip()] = value
    return variables
