"""The registry of model families by name: this project's, and those of installed packages.

`model: {type: …}` names a subclass of `LmConfig`. Its family, and so how to build its model, is looked up here, by the
name under which the class is registered:

* This project's families are in `BUILTIN`; one is imported when it is first used. Upstream's others are in
  `levanter.models.unsupported`.
* A third party's family is an entry point of the group `levanter.families` in its package's metadata:

      [project.entry-points."levanter.families"]
      foo = "foo_models.family:FOO"

Only metadata is read to list entry points, and nothing is imported: a package that fails to import breaks only the runs
that use it. A config.json whose `model_type` is not among ours loads the families of all packages.
"""

import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import draccus

from haliax_ext.errors import nearest
from levanter.models.architecture import Architecture

if TYPE_CHECKING:
    import jax
    from haliax import Axis

    from haliax_ext.rules import WeightRules
    from levanter.models.base import LmHeadModel
    from levanter.models.config_json import ConfigJson
    from levanter.models.family import Family
    from levanter.models.flops import FlopsPerToken

GROUP = "levanter.families"
"""The entry-point group of model families."""

BUILTIN: Mapping[str, str] = MappingProxyType(
    {
        "llama": "levanter.models.llama.family:LLAMA",
        "gpt2": "levanter.models.gpt2.family:GPT2",
        "gpt_neox": "levanter.models.gpt_neox.family:GPT_NEOX",
        "mistral": "levanter.models.mistral.family:MISTRAL",
        "mixtral": "levanter.models.mixtral.family:MIXTRAL",
        "qwen": "levanter.models.qwen.family:QWEN_2",
        "qwen3": "levanter.models.qwen.family:QWEN_3",
        "qwen3_moe": "levanter.models.mixtral.family:QWEN_3_MOE",
        "gemma": "levanter.models.gemma.family:GEMMA_1",
        "gemma2": "levanter.models.gemma.family:GEMMA_2",
        "gemma3": "levanter.models.gemma.family:GEMMA_3",
        "olmo2": "levanter.models.olmo.family:OLMO_2",
        "olmo3": "levanter.models.olmo.family:OLMO_3",
        "phi3": "levanter.models.phi.family:PHI_3",
        "smollm3": "levanter.models.smollm3.family:SMOLLM3",
        "nanochat": "levanter.models.nanochat.family:NANOCHAT",
    }
)
"""This project's families: name → `module:attribute`."""

_MODEL_TYPES: Mapping[str, str] = MappingProxyType(
    {"qwen2": "qwen", "gemma3_text": "gemma3", "levanter_nanochat": "nanochat"}
)
"""Families of ours whose `model_type` in config.json is not their name."""

ABSENT = "levanter.models.unsupported"
"""The module that registers the names of upstream's families that this project does not have."""


class FamilyError(ValueError):
    """A family that an installed package declares cannot be loaded."""


@dataclass(frozen=True, kw_only=True)
class LmConfig(Architecture, draccus.ChoiceRegistry):
    """The config of a causal language model, of one of the families."""

    @classmethod
    def choice_names(cls) -> tuple[str, ...]:
        """Every valid name for `model: {type: …}`, including those of packages that are not imported yet."""
        # Imported late: the module subclasses LmConfig, and importing it registers upstream's missing families.
        importlib.import_module(ABSENT)
        return tuple(dict.fromkeys((*cls.get_known_choices(), *family_names())))

    @classmethod
    def get_choice_class(cls, name: str) -> "type[LmConfig]":
        """The config class of a name; imports the package of its family.

        Raises:
            FamilyError: the package cannot be imported.
            ValueError: no family has the name.
        """
        known = cls.get_known_choices()
        if name not in known:
            names = cls.choice_names()
            if name not in names:
                close = nearest(name, names)
                hint = f"; did you mean {' or '.join(close)}?" if close else ""
                raise ValueError(f"model.type: {name!r} is not a model family ({', '.join(sorted(names))}){hint}")
            # `known` is draccus's live registry: `choice_names` may have
            # added the name meanwhile, and `family_named` adds it below.
            if name not in known:
                family_named(name)
        return known[name]

    def build(self, Vocab: "Axis", *, key: "jax.Array") -> "LmHeadModel":
        """A freshly initialized model; call it inside `jit` or `eval_shape`."""
        return family_for_config(type(self)).build(Vocab, self, key=key)

    def weight_rules(self, Vocab: "Axis | None" = None) -> "WeightRules":
        """The mapping between the model's leaves and Hugging Face tensors.

        Args:
            Vocab: the model's vocabulary axis; if it is longer than `vocab_size`, a checkpoint may lack the added
                rows.
        """
        return family_for_config(type(self)).weight_rules(self, Vocab)

    def flops(self, *, vocab_size: int, context_length: int, attention: Literal["causal", "full"]) -> "FlopsPerToken":
        """Operations a token in sequences of `context_length`; see `models.flops.flops_per_token`."""
        count = family_for_config(type(self)).flops
        return count(self, vocab_size=vocab_size, context_length=context_length, attention=attention)


def family_names() -> tuple[str, ...]:
    """The names of all families: this project's, then those of packages. Imports none of them."""
    # A package cannot replace a built-in family: its name is listed once, and `family_named` looks in BUILTIN first.
    return (*BUILTIN, *(name for name in _third_party() if name not in BUILTIN))


def family_named(name: str) -> "Family[Any]":
    """The family with a given name, one of `family_names`; registers its config class with `LmConfig`.

    Raises:
        FamilyError: its package cannot be imported or does not hold a Family, or two packages declare it.
    """
    if name in BUILTIN:
        return _builtin(name)
    points = _third_party()[name]
    point, *others = points
    if others:
        raise FamilyError(
            f"model family {name!r} comes from {len(points)} packages: {'; '.join(map(_source, points))}; "
            "uninstall all but one"
        )
    return _loaded(point)


def family_for_config(config_class: type[LmConfig]) -> "Family[Any]":
    """The family of a config class. A subclass does not inherit its parent's family, since its arithmetic may differ.

    Raises:
        ValueError: the class has no family.
    """
    # Reversed registry: draccus stores name → class.
    names = {cls: name for name, cls in LmConfig.get_known_choices().items()}
    known = family_names()
    if names.get(config_class) in known:
        return family_named(names[config_class])
    registered = f"registered as {names[config_class]!r}" if config_class in names else "not registered"
    parent = next((cls for cls in config_class.__mro__ if names.get(cls) in known), None)
    inherited = (
        f" A subclass does not inherit the family of its parent ({parent.__name__}, {names[parent]!r})."
        if parent
        else ""
    )
    raise ValueError(
        f"{config_class.__name__} has no model family: it is {registered}, and no family has it as its config class."
        f"{inherited} To register one, declare an entry point of the group {GROUP!r} whose value is a "
        f"levanter.models.family.Family with config_class={config_class.__name__} (docs/porting-models.md); "
        f"registered families: {', '.join(known)}"
    )


def family_of_config_json(model_type: str) -> "tuple[Family[Any], ConfigJson[Any]] | None":
    """The family whose config.json has this `model_type`, and its kind; None where no family knows it.

    Of our families, it imports only this one.
    """
    name = _MODEL_TYPES.get(model_type, model_type)
    if name in BUILTIN:
        family = _builtin(name)
        for kind in family.config_json:
            # A family may have several kinds of config.json; a name of ours need not be a `model_type`.
            if kind.model_type == model_type:
                return family, kind
    return families_of_config_json(model_type).get(model_type)


def families_of_config_json(model_type: str | None) -> "Mapping[str, tuple[Family[Any], ConfigJson[Any]]]":
    """The known kinds of config.json by `model_type`: ours, and if `model_type` is not among them, packages' too."""
    builtin = {kind.model_type: (family, kind) for family in map(_builtin, BUILTIN) for kind in family.config_json}
    if model_type in builtin:
        return builtin
    attempts = [_attempted(name) for name in family_names() if name not in BUILTIN]
    loaded = [family for family in attempts if not isinstance(family, FamilyError)]
    # A broken package is skipped here; `broken_families` reports it if
    # no family fits. Ours win over packages' (the right side of `|`).
    return {kind.model_type: (family, kind) for family in loaded for kind in family.config_json} | builtin


def broken_families() -> tuple[str, ...]:
    """The errors of packages' families that cannot be loaded; imports all of them."""
    attempts = [_attempted(name) for name in family_names() if name not in BUILTIN]
    return tuple(str(error) for error in attempts if isinstance(error, FamilyError))


def _attempted(name: str) -> "Family[Any] | FamilyError":
    try:
        return family_named(name)
    except FamilyError as error:
        return error


@functools.cache
def _builtin(name: str) -> "Family[Any]":
    module, _, attribute = BUILTIN[name].partition(":")
    family = getattr(importlib.import_module(module), attribute)
    assert family.name == name, f"{BUILTIN[name]} is not the family {name!r}"
    return family


def _third_party() -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points of packages, by name."""
    # The cache key is the search path: a test or a notebook that extends sys.path sees new packages.
    return _entry_points(tuple(sys.path))


@functools.cache
def _entry_points(path: tuple[str, ...]) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Entry points, read once for each value of Python's search path."""
    del path
    points: dict[str, tuple[EntryPoint, ...]] = {}
    for point in importlib.metadata.entry_points(group=GROUP):
        points[point.name] = (*points.get(point.name, ()), point)
    return MappingProxyType(points)


def _source(point: EntryPoint) -> str:
    """A package's entry point, as messages name it."""
    # Metadata without the file that has the name is empty, and None where a package has installed the backport of
    # `importlib.metadata` as Python's finder.
    metadata = None if point.dist is None else point.dist.metadata
    if metadata is None or metadata["Name"] is None:
        return f"an unnamed package ({point.value})"
    package = f"{metadata['Name']} {metadata['Version']}"
    return f"{package} ({point.value})"


@functools.cache
def _loaded(point: EntryPoint) -> "Family[Any]":
    """The family of an entry point."""
    from levanter.models.family import Family

    prefix = f"model family {point.name!r} comes from the package {_source(point)}"
    try:
        family = point.load()
    # Anything may happen while foreign code is imported; only the
    # first line of its message is shown, the rest is chained.
    except Exception as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise FamilyError(f"{prefix}, which cannot be imported: {type(error).__name__}: {reason}") from error
    if not isinstance(family, Family):
        raise FamilyError(f"{prefix}, which is a {type(family).__name__}; expected a levanter.models.family.Family")
    if family.name != point.name:
        raise FamilyError(f"{prefix}, whose own name is {family.name!r}; they must be the same")
    if not issubclass(family.config_class, LmConfig):
        raise FamilyError(f"{prefix}, whose config {family.config_class.__name__} is not an LmConfig")
    try:
        LmConfig.register_subclass(point.name, family.config_class)
    # draccus refuses a name that another class has.
    except ValueError as error:
        raise FamilyError(f"{prefix}: {error}") from error
    return family
