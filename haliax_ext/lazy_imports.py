"""Packages whose names are imported at first use, so that reading a configuration does not import JAX.

    if TYPE_CHECKING:
        from levanter.mesh.devices import DeviceSet as DeviceSet

    export_on_demand(__name__)

Importing a module of a package runs the package's `__init__`, so every module pays for the imports there. The imports
under `TYPE_CHECKING` list the names that the package offers, to type checkers and to `export_on_demand` alike; each is
imported when its name is first used.
"""

import ast
import sys
from functools import cache
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from types import ModuleType


def export_on_demand(package: str) -> None:
    """Makes a module offer what it imports under `if TYPE_CHECKING:`, each name imported when it is first used.

    Args:
        package: the module's `__name__`.
    """
    module = sys.modules[package]

    def import_name(name: str) -> object:
        if name not in (offers := lazy_names(package)):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(offers[name]), name)
        # From now on the name is a plain attribute, and `__getattr__` is not called for it again.
        vars(module)[name] = value
        return value

    vars(module)["__getattr__"] = (
        import_name  # unseen by type checkers, so that misspelt names are still errors to them
    )
    module.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    """A module whose names are not taken by submodules that are called like them (`levanter.mesh.resolve`)."""

    def __setattr__(self, name: str, value: object) -> None:
        # Python's import system binds a submodule in its package once it is loaded.
        submodule = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (submodule and name in lazy_names(self.__name__)):
            super().__setattr__(name, value)


@cache
def lazy_names(package: str) -> dict[str, str]:
    """The names that a module offers on demand → the module that each is imported from."""
    # The source is parsed, not imported: importing would load what this module exists to avoid.
    spec = find_spec(package)
    assert spec is not None and isinstance(spec.loader, InspectLoader), f"{package} has no source"
    source = spec.loader.get_source(package) or ""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    guarded = [block for block in blocks if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}
