"""The map of the package: each noun that is a class is one, in the module that the map says."""

import importlib
import re
from pathlib import Path

import haliax_ext

README = Path(haliax_ext.__file__).parent / "README.md"


def test_each_noun_is_a_class_where_the_map_says():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    checked = 0
    for nouns, places in rows:
        modules = [importlib.import_module(f"haliax_ext.{place.replace('/', '.')}") for place in _modules(places)]
        for noun in nouns.replace("(s)", "").split(", "):
            if re.fullmatch(r"(?:[A-Z][a-z0-9]+){1,}", noun):
                assert any(isinstance(getattr(module, noun, None), type) for module in modules), (noun, places)
                checked += 1
    assert checked >= 25


def _modules(places: str) -> list[str]:
    return [name for name in re.findall(r"`([\w/.]+)`", places) if name != "haliax"]
