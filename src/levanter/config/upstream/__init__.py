"""Translates documents of upstream and of earlier versions into the current keys.

`translate(document)` returns a document with the current keys and a list of changes, one for each old key (and for each
old default that differs from the current one). Every translation is reported, and nothing is overwritten: an old key
that contradicts a current one is a problem that names both.

A document is *old-style* when its `trainer:` holds any key of `TRAINER_KEYS` (`wandb`, which both generations accept,
aside). An old-style document means what it meant to the generation it was written for: the old defaults of the mesh
are spelled out too. With a `mesh:` block in it the new defaults hold and only the old keys that are there are
translated. Without old keys everything has the new meaning. `model:` and `data:` are judged by their own keys, so
documents may mix.

To accept another old key, add a row to a table and a line to the function beside it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from levanter.config.errors import Mark, Problem
from levanter.config.upstream.changes import Change, Draft, OldKey
from levanter.config.upstream.data import CHAT_SLICE, DATA_KEYS, FLAT_KEYS, FORMAT_KEYS, translate_data
from levanter.config.upstream.entry_points import ENTRY_POINT_KEYS, translate_entry_points
from levanter.config.upstream.memorization import MEMORIZATION_KEYS, translate_memorization
from levanter.config.upstream.model import INNER_MODEL_KEYS, MODEL_KEYS, translate_model, translate_row_length
from levanter.config.upstream.preferences import PREFERENCE_KEYS, translate_preferences
from levanter.config.upstream.serving import AT_THE_TOP, SERVER_KEYS, translate_server
from levanter.config.upstream.sft import SFT_KEYS, translate_sft
from levanter.config.upstream.supervised import SUPERVISED, translate_supervised
from levanter.config.upstream.trainer import TRAINER_KEYS, translate_trainer
from levanter.config.yaml_nodes import MapNode, from_plain, to_plain

TABLE: tuple[OldKey, ...] = (
    *TRAINER_KEYS,
    *MODEL_KEYS,
    *INNER_MODEL_KEYS,
    *DATA_KEYS,
    *FLAT_KEYS,
    *FORMAT_KEYS,
    CHAT_SLICE,
    *MEMORIZATION_KEYS,
    *ENTRY_POINT_KEYS,
    *SERVER_KEYS,
    SUPERVISED,
    *SFT_KEYS,
    *PREFERENCE_KEYS,
)
"""Every old key that is accepted, for the documentation and for hints about misspelt ones."""


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A document in the new spelling, what was changed, and what contradicts."""

    document: MapNode
    changes: tuple[Change, ...] = ()
    problems: tuple[Problem, ...] = ()


def translate(document: MapNode, takes: Collection[str] = (), earlier: str = "") -> Translation:
    """Translates every old key of a document.

    Args:
        document: as it was written.
        takes: the keys that the entry point takes at the top, where it is known.
        earlier: the upstream command whose keys it may also have, for an entry point that has replaced one
            (`EARLIER` of its class).
    """
    draft = Draft(document)
    # The order matters: the first two translate whole documents of other commands, whose result has keys that the
    # later ones translate again.
    translate_sft(draft, earlier)
    translate_preferences(draft, earlier)
    translate_memorization(draft)
    translate_trainer(draft)
    translate_row_length(draft, takes)
    translate_model(draft)
    translate_data(draft)
    translate_supervised(draft, takes)
    translate_entry_points(draft)
    translate_server(draft, takes)
    return Translation(
        document=draft.document, changes=tuple(draft.changes), problems=tuple(dict.fromkeys(draft.problems))
    )


def translate_plain(document: dict[str, Any], source: str = "document") -> tuple[dict[str, Any], Translation]:
    """`translate` for a document that is already dicts and lists (its marks name `source`, without lines)."""
    node = from_plain(document, Mark(source=source))
    assert isinstance(node, MapNode)
    translation = translate(node)
    return to_plain(translation.document), translation


def old_keys(path: tuple[str, ...]) -> tuple[str, ...]:
    """The old keys that are accepted in the mapping at `path`."""
    # These rows are keys of other commands, which would be wrong hints here.
    other_commands = (*AT_THE_TOP, *SFT_KEYS, *PREFERENCE_KEYS)
    return tuple(row.name for row in TABLE if row not in other_commands and _matches(row.block, path))


def _matches(block: str, path: tuple[str, ...]) -> bool:
    components = block.split(".") if block else []
    # `*` in a row's block stands for any one key (the name of a component).
    return len(components) == len(path) and all(a in ("*", b) for a, b in zip(components, path, strict=True))


__all__ = ["TABLE", "Change", "OldKey", "Translation", "old_keys", "translate", "translate_plain"]
