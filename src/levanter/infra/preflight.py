"""Preflight before a launch: `python -m levanter.main.plan` on the same command, as a subprocess.

A pod is rented by the second; a plan costs seconds on a laptop. What does not fit is refused here (exit code 3), before
anything is contacted.
"""

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

from levanter.hardware import AcceleratorError, parse_accelerator
from levanter.infra.console import Console
from levanter.infra.errors import INTERRUPTED, OK, LaunchError

_MODULE = re.compile(r"levanter[./]main[./](\w+?)(?:\.py)?$")
INSTALL = "pip install 'levanter-fork[plan]'"
WAY_PAST = "--plan_first=false skips preflight"


def plan_command(command: Sequence[str], target: str) -> tuple[str, ...]:
    """The preflight of a command on a target.

    Raises:
        LaunchError: the command is not `python -m levanter.main.X …`, so it cannot be planned.
    """
    for index, word in enumerate(command):
        module = _MODULE.search(word)
        if module and (index == 0 or command[index - 1] == "-m" or word.endswith(".py")):
            # `python -m levanter.main.X` or a path to the file: the words after
            # it are the entry point's arguments.
            entry = module.group(1)
            return (sys.executable, "-m", "levanter.main.plan", entry, "--target", target, *command[index + 1 :])
    raise LaunchError(
        f"preflight needs `python -m levanter.main.ENTRY_POINT …`, got `{shlex.join(command)}`; {WAY_PAST}"
    )


def shown(command: Sequence[str], target: str) -> tuple[str, ...]:
    """The preflight command as a user would type it."""
    return ("python", *plan_command(command, target)[1:])


def require_plan(command: Sequence[str], target: str, console: Console) -> None:
    """Plans, shows the report, and returns if the run fits.

    Raises:
        LaunchError: it does not fit, its input is bad, or planning failed; with the plan's exit code.
    """
    words = plan_command(command, target)
    # Checked before the subprocess starts, for a message that says how to install them.
    # Of GPUs the plan itself says what is missing: their compiler has to be that of the installed JAX.
    needed = ("jax",) if _of_gpus(target) else ("jax", "libtpu")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"preflight compiles with the real TPU compiler, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here: {INSTALL} ({WAY_PAST})"
        )
    console.say(f"preflight for {target}, before anything is requested ({WAY_PAST})")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                console.show(line.rstrip("\n"))
        except KeyboardInterrupt:
            # The plan has its own handler, which also ends its compile workers.
            process.terminate()
            raise
    code = process.returncode
    if code == OK:
        return
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    what = {2: "its input is bad", 3: "it does not fit", 4: "the compiler crashed on it"}.get(code, "it failed")
    raise LaunchError(
        f"not launched: {what} (preflight's exit code {code}); nothing was contacted. {WAY_PAST}", exit_code=code
    )


def _of_gpus(target: str) -> bool:
    """Whether a target is of GPUs; what is no target is left to the plan to refuse."""
    try:
        return parse_accelerator(target).generation.platform == "gpu"
    except AcceleratorError:
        return False
