"""Configurations: YAML in, frozen dataclasses out, and every mistake named with its file and line.

`load(ConfigClass, argv)` is what an entry point calls; `parse` is the same for programs and tests; `dump` writes a
configuration with every resolved value, and `parse_text` reads that back. Old spellings are translated in `legacy`.
"""

from levanter.config.dump import dump, plain
from levanter.config.errors import ConfigError, Mark, Problem
from levanter.config.explicit_keys import ExplicitKeys
from levanter.config.loader import (
    BAD_CONFIG,
    HelpRequested,
    Loaded,
    arguments_for,
    load,
    load_written,
    main,
    parse,
    parse_text,
    read,
    read_text,
)
from levanter.config.upstream import Change

__all__ = [
    "BAD_CONFIG",
    "Change",
    "ConfigError",
    "ExplicitKeys",
    "HelpRequested",
    "Loaded",
    "Mark",
    "Problem",
    "arguments_for",
    "dump",
    "load",
    "load_written",
    "main",
    "parse",
    "parse_text",
    "plain",
    "read",
    "read_text",
]
