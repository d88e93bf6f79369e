"""The import hook that maps names of earlier generations, imported by scripts, to their current places.

Nothing in the project uses this module. `levanter.upstream.install` calls it for names that do not exist, so scripts
need no change; the new place of each such name is reported once, as a `DeprecationWarning`. A name that is not carried
over raises an error that says what to use instead. The tables are in `levanter.upstream.names`.
"""

import types
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

from levanter.upstream.names import NAMES
from levanter.upstream.unsupported.entry_points import ABSENT
from levanter.upstream.unsupported.names import GONE, GONE_IN, GONE_MODULES


class GoneError(ImportError):
    """A name of an earlier generation that is not carried over."""


class GoneMemberError(AttributeError):
    """A member of a class of an earlier generation that is not carried over."""


def look_up(at: str, name: str, *instance: object, stacklevel: int = 4) -> Any:
    """The current object of a name of an earlier generation.

    Args:
        at: the module of the name, or its class as `module:Class`.
        name: the requested name.
        instance: for a class, the object whose member is requested.
        stacklevel: of the warning, so that it points at the caller's code.

    Raises:
        GoneError, GoneMemberError: the name is not carried over.
        AttributeError: the name never existed.
    """
    old = f"{at.replace(':', '.')}.{name}"
    # Refusals first: a name may also be in the table for older generations.
    if old in GONE:
        raise (GoneMemberError if instance else GoneError)(_refusal(old, GONE[old]))
    target = NAMES.get(at, {}).get(name)
    if target is None:
        raise AttributeError(f"{at.replace(':', '.')} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    # A target without an attribute is a module that moved as a whole.
    if not attribute:
        return import_module(module)
    value = getattr(import_module(module), attribute)
    if instance:
        warn_once(old, f"{old} is kept for older scripts ({module}.{attribute})", stacklevel)
        return value(*instance)
    warn_once(old, f"{old} is {module}.{attribute} now", stacklevel)
    return value


def _refusal(old: str, why: str) -> str:
    return f"{old} is not carried over: {why} (docs/migrating.md)"


_warned: set[str] = set()


def warn_once(old: str, message: str, stacklevel: int) -> None:
    """Warns about an earlier name on its first use."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


_MAIN_PREFIX = "levanter.main."
"""The prefix of the module names of entry points."""


def find_spec(name: str) -> ModuleSpec | None:
    """The spec of a module of an earlier generation, from the tables; None if they do not list it."""
    if name.removeprefix(_MAIN_PREFIX) in ABSENT and name.startswith(_MAIN_PREFIX):
        # runpy shows the spec's origin as the program's name.
        return ModuleSpec(name, _Absent(), origin=name)  # pyright: ignore[reportArgumentType]
    if (why := gone_module(name)) is not None:
        return ModuleSpec(name, _Refused(why), is_package=True)  # pyright: ignore[reportArgumentType]
    provided = {key for key in (*NAMES, *GONE_IN) if ":" not in key}
    # A package must exist for its submodules to be importable, even if no name is taken from it.
    inside = any(module.startswith(f"{name}.") for module in (*provided, *GONE_MODULES))
    if name not in provided and not inside:
        return None
    return ModuleSpec(name, _TableLoader(), is_package=inside)  # pyright: ignore[reportArgumentType]


def gone_module(name: str) -> str | None:
    """The reason why a module is not carried over, from its own entry or the nearest parent's; None if it is."""
    components = name.split(".")
    return next(
        (why for n in range(len(components), 1, -1) if (why := GONE_MODULES.get(".".join(components[:n])))), None
    )


class _Refused:
    """A module whose import fails and says why."""

    def __init__(self, why: str):
        self.why = why

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        del spec

    def exec_module(self, module: types.ModuleType) -> None:
        raise GoneError(_refusal(module.__name__, self.why))

    def get_code(self, name: str) -> types.CodeType:
        raise GoneError(_refusal(name, self.why))


class _TableLoader:
    """Creates a module whose names are looked up in the table."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        del spec

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"{name} of an earlier generation; see docs/migrating.md."
        look: Callable[[str], Any] = lambda attribute: look_up(name, attribute, stacklevel=3)  # noqa: E731
        # PEP 562: a module's `__getattr__` is called for names that it does not have.
        vars(module)["__getattr__"] = look

    def get_code(self, name: str) -> types.CodeType:
        """The code that `python -m OLD_NAME` runs: the current module."""
        targets = {"levanter.eval_harness": f"{_MAIN_PREFIX}eval_harness"}
        now = targets.get(name) or next(iter(NAMES[name].values())).partition(":")[0]
        # `alter_sys` sets `sys.argv[0]` and `sys.modules['__main__']` to those of the module that runs.
        return compile(f"import runpy; runpy.run_module({now!r}, run_name='__main__', alter_sys=True)", name, "exec")


class _Absent(_TableLoader):
    """Creates the module of an entry point that is not implemented yet."""

    def get_code(self, name: str) -> types.CodeType:
        """The code that `python -m` runs: it reads the document, then refuses it."""
        entry_point = name.removeprefix(_MAIN_PREFIX)
        source = (
            "import sys\nfrom levanter.upstream.unsupported.refusal import run_absent\n"
            f"sys.exit(run_absent({entry_point!r}))"
        )
        return compile(source, name, "exec")
