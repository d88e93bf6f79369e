"""The tables of `docs/migrating.md`, generated from the tables that the code uses.

Each table is in the document between `<!-- table: name -->` and `<!-- end -->`; `filled` replaces it with the current
one.
"""

import re
from collections.abc import Iterable, Mapping

from levanter.commands.model.defaults import UPSTREAM, format_value
from levanter.config import plain
from levanter.config.upstream import TABLE
from levanter.config.upstream.sft import SFT_KEYS
from levanter.config.upstream.unsupported import NOT_CARRIED
from levanter.models.registry import LmConfig
from levanter.models.unsupported import AbsentModelConfig
from levanter.optim.config import OptimizerConfig
from levanter.optim.unsupported import AbsentOptimizerConfig
from levanter.upstream.names import NAMES
from levanter.upstream.unsupported.entry_points import ABSENT
from levanter.upstream.unsupported.names import GONE_IN, GONE_MODULES

_OF = {"z_loss_weight": "`train_lm`", "max_eval_length": "`eval_lm`", "drain_seconds": "`serve`"} | {
    "max_shard_bytes": "`export_lm_to_hf`"
}
"""A key of an entry point alone → the entry point; see `NotCarried.entry_point_keys`."""
# Non-greedy up to the next end marker, so that several tables of one document are replaced separately.
_PLACE = re.compile(r"(?P<begin><!-- table: (?P<name>[a-z-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


def keys() -> str:
    """Old keys of documents and their replacements."""
    rows = []
    for row in TABLE:
        new = row.new or "dropped, with a note"
        default = f" (absent: {row.default})" if row.default else ""
        of = " of `sft`, `sft_mixture`" if row in SFT_KEYS else ""
        rows.append((f"`{row.path}`{of}{default}", new, row.why))
    return _table(("old key", "new", "why"), rows)


def entry_points() -> str:
    """Entry points that are not implemented yet."""
    rows = [(f"`{name}`", row.what, row.instead) for name, row in ABSENT.items()]
    return _table(("entry point", "what it is", "today"), rows)


def families() -> str:
    """Model families and optimizers that are not implemented yet."""
    models = [name for name, cls in LmConfig.get_known_choices().items() if issubclass(cls, AbsentModelConfig)]
    optimizers = [
        name for name, cls in OptimizerConfig.get_known_choices().items() if issubclass(cls, AbsentOptimizerConfig)
    ]
    return f"- `model.type`: {_listed(models)}\n- `optimizer.type`: {_listed(optimizers)}\n"


def defaults() -> str:
    """Keys of `model:` whose default differs from upstream's."""
    rows = []
    for kind, keys in UPSTREAM.items():
        # The class's own defaults, as plain values, so that both columns are formatted alike.
        our_defaults = plain(LmConfig.get_choice_class(kind)())
        rows += [
            (f"`{kind}`", f"`{key}`", f"`{format_value(upstream_default)}`", f"`{format_value(our_defaults[key])}`")
            for key, upstream_default in keys.items()
        ]
    return _table(("model.type", "key", "upstream's default", "here"), rows)


def not_carried() -> str:
    """Keys that configurations no longer have: those that refuse a run, and those without effect."""
    rows = []
    for row in NOT_CARRIED:
        of = f" (of {' and '.join(_OF[name] for name in row.entry_point_keys)})" if row.entry_point_keys else ""
        rows.append((f"`{row.key}`{of}", "refused if set" if row.refused else "no effect", row.why))
    return _table(("key", "here", "what to do"), rows)


def imports() -> str:
    """Names in scripts and their current places."""
    rows = []
    for at, names in NAMES.items():
        by_place: dict[str, list[str]] = {}
        for name, target in names.items():
            module, _, attribute = target.partition(":")
            # A name that kept its spelling is listed by its module alone.
            place = module if attribute in (name, "") else f"{module}.{attribute}"
            by_place.setdefault(f"`{place}`", []).append(name)
        rows += [
            (f"`{at.replace(':', '.')}`", _listed(listed, sort=False), place) for place, listed in by_place.items()
        ]
    return _table(("old module or class", "names", "now"), rows)


def gone() -> str:
    """Names and modules in scripts that are not carried over."""
    rows = [
        (f"`{at.replace(':', '.')}`", _listed(names.split(), sort=False), why)
        for at, reasons in GONE_IN.items()
        for names, why in reasons.items()
    ]
    rows += [(f"`{module}`", "all of it", why) for module, why in GONE_MODULES.items()]
    return _table(("old module or class", "names", "instead"), rows)


TABLES = {
    "keys": keys,
    "defaults": defaults,
    "entry-points": entry_points,
    "families": families,
    "not-carried": not_carried,
    "imports": imports,
    "gone": gone,
}


def filled(document: str) -> str:
    """A document with its tables replaced by the current ones.

    Raises:
        KeyError: the document names a table that does not exist.
    """

    def fill(place: re.Match[str]) -> str:
        return f"{place['begin']}{TABLES[place['name']]()}{place['end']}"

    return _PLACE.sub(fill, document)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    # A bar inside a cell would end it; Markdown needs it escaped.
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _listed(names: Iterable[str] | Mapping[str, object], *, sort: bool = True) -> str:
    ordered = sorted(names) if sort else list(names)
    return ", ".join(f"`{name}`" for name in ordered) or "none"
