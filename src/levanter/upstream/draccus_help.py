"""Makes draccus work with our config classes, for upstream's scripts that call `draccus.parse` themselves.

For its help text, draccus looks for a docstring after each field. Our classes document fields under `Attributes:` in
the class docstring, whose lines draccus takes for fields: after the last one it reads past the end of the class
(IndexError, draccus 0.11). So it is given the text of that section; for other classes its own search runs, with an
empty result if it fails.

Documents of our entry points are read by our own reader: their keys may be of any generation, and draccus, which knows
only the current fields, would refuse older ones.
"""

import sys
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

MODULE = "draccus.wrappers.docstring"
"""The module of draccus that reads docstrings."""


def patch_docstrings(module: ModuleType) -> None:
    """Patches `module` to read our docstrings; a second call changes nothing."""
    original = module.get_attribute_docstring
    # The mark on the replacement makes the patch idempotent.
    if getattr(original, "of_attributes_sections", False):
        return

    @wraps(original)
    def get_attribute_docstring(some_dataclass: type, field_name: str) -> Any:
        documented = import_module("levanter.config.help").attribute_docs(some_dataclass)
        if field_name in documented:
            # argparse formats help texts with `%`.
            return module.AttributeDocString(docstring_below=documented[field_name].replace("%", "%%"))
        try:
            return original(some_dataclass, field_name)
        except IndexError:
            return module.AttributeDocString()

    vars(get_attribute_docstring)["of_attributes_sections"] = True
    vars(module)["get_attribute_docstring"] = get_attribute_docstring


PARSER = "draccus.argparsing"
"""The module of draccus that reads documents and command lines."""


def patch_parsing(module: ModuleType) -> None:
    """Patches draccus's `parse` to read documents of our entry points, with their older keys; idempotent."""
    original = module.parse
    if getattr(original, "of_entry_points", False):
        return

    @wraps(original)
    def parse(config_class: type, config_path: object = None, args: object = None, **keys: object) -> object:
        # Only configs of entry points; a script's own dataclass is parsed by draccus as ever.
        ours = config_class.__module__.startswith("levanter.commands.")
        if not ours or keys or config_path is None:
            return original(config_class, config_path, args, **keys)
        argv = sys.argv[1:] if args is None else list(args)  # pyright: ignore[reportArgumentType]
        return import_module("levanter.config").load(config_class, ["--config_path", str(config_path), *argv])

    vars(parse)["of_entry_points"] = True
    # `draccus` re-exports `parse`, so the name must be replaced in both modules.
    for holder in (module, sys.modules.get("draccus")):
        if holder is not None and vars(holder).get("parse") is original:
            vars(holder)["parse"] = parse
