"""Converts rotary embeddings between config.json, in both of its spellings, and `RotaryConfig`.

transformers 4 writes `rope_theta` beside `rope_scaling: {rope_type | type, factor, …}`; transformers 5 puts everything
into `rope_parameters: {rope_theta, rope_type, factor, …}`. A file may hold both if they agree. Reading only one of
them would silently give a base of 10000, so the two are merged key by key and a contradiction is an error.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from haliax_ext.errors import nearest
from levanter.layers.rotary import (
    DefaultRotaryConfig,
    DynamicRotaryConfig,
    LinearRotaryConfig,
    Llama3RotaryConfig,
    LongRotaryConfig,
    RotaryConfig,
    YarnRotaryConfig,
)
from levanter.models.config_json import ConfigJsonReader, FieldFinding, Spelling

DEFAULT_THETA = 10000.0
_ORIGINAL = "original_max_position_embeddings"

FLAT: Mapping[str, str] = MappingProxyType({})
"""The default of `flat`: a family whose flat parameters have the same names as in `rope_parameters`."""

# Parameters that a document must have for each rope type. The original
# context is not among them: it may follow from max_position_embeddings.
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {
    "default": ("factor", _ORIGINAL),
    "linear": (_ORIGINAL,),
    "dynamic": (_ORIGINAL,),
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": (_ORIGINAL, "factor", "attention_factor"),
}


def read_rope(
    fields: ConfigJsonReader,
    *,
    max_position_embeddings: int,
    theta: float = DEFAULT_THETA,
    partial: bool = False,
    original: int | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
    only: Sequence[str] = (),
    share: float = 1.0,
    flat: Mapping[str, str] = FLAT,
) -> RotaryConfig | None:
    """The rotary embeddings of a config.json; None after a problem, which is then in `fields`.

    Args:
        fields: the document.
        max_position_embeddings: the field of that name.
        theta: the family's base, if the document has none.
        partial: whether the family can rotate a part of each head.
        original: the family's original context, if the document has none; default `max_position_embeddings`.
        renamed: the family's own names of rope types → ours.
        only: the rope types that the family can have beside `default`; empty for all.
        share: `partial_rotary_factor`, if the document has none.
        flat: the family's names of the parameters that transformers 4 writes beside `rope_scaling`.
    """
    # Earlier fields may have problems of their own; only new ones concern the rotary embeddings.
    before = len(fields.problems)
    merged = _merge(fields, flat)
    if len(fields.problems) > before:
        return None
    kind = merged.pop("rope_type", "default")
    kind = renamed.get(kind, kind)
    if kind not in _REQUIRED:
        close = nearest(str(kind), _REQUIRED)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        fields.problems.append(f"rope type {kind!r} is not one of {', '.join(_REQUIRED)}{hint}")
        return None
    if only and kind not in ("default", *only):
        fields.problems.append(f"rope type {kind!r} is not supported by this family: default, {', '.join(only)}")
        return None
    theta = _number(fields, "rope_theta", merged.pop("rope_theta", theta))
    share = _number(fields, "partial_rotary_factor", merged.pop("partial_rotary_factor", share))
    if share != 1.0 and not partial:
        fields.problems.append("partial_rotary_factor is not 1: this family rotates full heads")
    for name in _REQUIRED[kind]:
        if name not in merged:
            fields.problems.append(f"rope type {kind!r} needs {name!r}")
    known = {*_REQUIRED[kind], *_OPTIONAL[kind]}
    # An unknown parameter is refused, not ignored: it may be a variant that changes the frequencies.
    for name in sorted(merged.keys() - known):
        fields.problems.append(f"rope type {kind!r} has no parameter {name!r} ({', '.join(sorted(known)) or 'none'})")
    numbers = {name: _value(fields, name, value) for name, value in merged.items() if name in known}
    if len(fields.problems) > before:
        return None
    # Only a default: a document that has the original context keeps it.
    if original is not None:
        numbers.setdefault(_ORIGINAL, original)
    rope = _build(fields, kind, theta, numbers, max_position_embeddings)
    return rope if rope is None or share == 1.0 else dataclasses.replace(rope, partial_rotary_factor=share)


def _value(fields: ConfigJsonReader, name: str, value: object) -> object:
    if name == "truncate":
        return fields.check(f"rope.{name}", value, bool)
    if name in ("short_factor", "long_factor"):
        return tuple(_number(fields, name, number) for number in fields.check(f"rope.{name}", value, list, []))
    return _number(fields, name, value)


def _number(fields: ConfigJsonReader, name: str, value: object) -> float:
    return fields.check(f"rope.{name}", value, int if name == _ORIGINAL else float)


def _merge(fields: ConfigJsonReader, flat: Mapping[str, str]) -> dict[str, Any]:
    """All rope parameters of the document under their transformers-5 names, null ones left out."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def put(name: str, value: object, where: str) -> None:
        if value is None:
            return
        if name in merged and merged[name] != value:
            fields.problems.append(f"{origin[name]} is {merged[name]!r} but {where} is {value!r}; they must agree")
            return
        merged.setdefault(name, value)
        origin.setdefault(name, where)

    # `type` is transformers 4's older key for `rope_type`.
    for block in ("rope_parameters", "rope_scaling"):
        for name, value in fields.get(block, dict, {}).items():
            if isinstance(value, dict):
                fields.problems.append(f"{block}.{name} is a block of its own: rotary embeddings that differ by layer")
                continue
            put("rope_type" if name == "type" else name, value, f"{block}.{name}")
    for name in ("rope_theta", _ORIGINAL, "partial_rotary_factor"):
        spelled = flat.get(name, name)
        # Marks the field as read even if it is absent, so that `forbid_foreign` does not refuse it.
        fields.seen.add(spelled)
        put(name, fields.document.get(spelled), spelled)
    return merged


def _build(
    fields: ConfigJsonReader, kind: str, theta: float, numbers: Mapping[str, Any], context: int
) -> RotaryConfig | None:
    original = numbers.get(_ORIGINAL)
    try:
        match kind:
            case "default":
                # transformers ignores a factor here, so only the neutral factor 1 is accepted.
                if numbers.get("factor", 1.0) != 1.0:
                    fields.problems.append(
                        f"rope type 'default' has factor {numbers['factor']}; transformers ignores it: write 'linear' "
                        "or remove it"
                    )
                    return None
                return DefaultRotaryConfig(theta=theta)
            case "linear":
                return LinearRotaryConfig(theta=theta, factor=numbers["factor"])
            case "dynamic":
                # transformers' dynamic type scales from max_position_embeddings and ignores an original context.
                if original is not None and original != context:
                    fields.problems.append(
                        f"rope type 'dynamic' grows from max_position_embeddings {context}, "
                        f"but {_ORIGINAL} is {original}"
                    )
                    return None
                return DynamicRotaryConfig(
                    theta=theta, factor=numbers["factor"], original_max_position_embeddings=context
                )
            case "llama3":
                # The context is a default for the original context, which
                # comes later in the merge and wins if it is written.
                return Llama3RotaryConfig(theta=theta, **{_ORIGINAL: context, **numbers})
            case "yarn":
                # Version 4 of transformers derived the factor from the two contexts; a file may hold another one.
                if original is not None and abs(context / original - numbers["factor"]) > 1e-6:
                    message = (
                        f"is not max_position_embeddings / {_ORIGINAL} = {context / original:g}, which transformers 4 "
                        "would compute; the given factor is used, as in transformers 5"
                    )
                    fields.findings.append(FieldFinding("rope.factor", numbers["factor"], message))
                return YarnRotaryConfig(theta=theta, **{_ORIGINAL: context, **numbers})
            case "longrope":
                # LongRoPE scales the amplitude by a function of factor;
                # without a factor it is the ratio of the two contexts.
                before = {_ORIGINAL: context, **numbers}
                return LongRotaryConfig(theta=theta, **{"factor": context / before[_ORIGINAL], **before})
    except ValueError as error:
        fields.problems.append(str(error))
        return None
    raise AssertionError(kind)


_WHOLE, _WINDOWED = "full_attention", "sliding_attention"


def read_rope_by_layer_type(
    fields: ConfigJsonReader, *, max_position_embeddings: int, theta: float, theta_of_windows: float
) -> tuple[RotaryConfig | None, RotaryConfig | None]:
    """The rotary embeddings of full-attention layers, and of sliding-window layers.

    transformers 5 writes `rope_parameters` with a block for each; in a flat spelling, only the first is scaled.

    Args:
        fields: the document.
        max_position_embeddings: the field of that name.
        theta: base of the first, if the document has none.
        theta_of_windows: base of the second, if `rope_parameters` has none.
    """
    # These are read through inner readers below, whose own `seen` sets are dropped.
    fields.seen |= {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _ORIGINAL}
    by_type = fields.document.get("rope_parameters") or {}
    nested = {kind: by_type[kind] for kind in (_WHOLE, _WINDOWED) if isinstance(by_type.get(kind), dict)}
    flat = {name: value for name, value in fields.document.items() if name != "rope_parameters"}

    def read(document: Mapping[str, Any], theta: float) -> RotaryConfig | None:
        inner = ConfigJsonReader(document, problems=fields.problems, findings=fields.findings)
        return read_rope(inner, max_position_embeddings=max_position_embeddings, theta=theta)

    if not nested:
        # Gemma 3 in the transformers-4 spelling: `rope_scaling` stretches global layers; local ones are never scaled.
        return read(fields.document, theta), DefaultRotaryConfig(theta=theta_of_windows)
    if other := sorted(set(by_type) - set(nested)):
        fields.problems.append(f"rope_parameters mixes layer types with {', '.join(other)}")
    return (
        read({**flat, "rope_parameters": nested.get(_WHOLE, {})}, theta),
        read({"rope_parameters": nested.get(_WINDOWED, {})}, theta_of_windows),
    )


def write_rope_by_layer_type(
    whole: RotaryConfig, windowed: RotaryConfig, *, max_position_embeddings: int, spelling: Spelling
) -> dict[str, Any]:
    """The inverse of `read_rope_by_layer_type`; in transformers-4 spelling, the caller writes the base of `windowed`.

    Raises:
        ValueError: config.json cannot express it.
    """
    context = max_position_embeddings
    if spelling == "transformers4":
        if windowed != DefaultRotaryConfig(theta=windowed.theta):
            raise ValueError(
                "scaled rotary embeddings of layers with a window can only be written in the transformers5 format"
            )
        return write_rope(whole, max_position_embeddings=context, spelling=spelling)
    blocks = {
        kind: write_rope(rope, max_position_embeddings=context, spelling=spelling)["rope_parameters"]
        for kind, rope in ((_WHOLE, whole), (_WINDOWED, windowed))
    }
    return {"rope_parameters": blocks}


def write_rope(
    rope: RotaryConfig, *, max_position_embeddings: int, spelling: Spelling, partial: bool = False
) -> dict[str, Any]:
    """The config.json fields of rotary embeddings, the inverse of `read_rope`.

    Args:
        rope: what the model uses.
        max_position_embeddings: the field of that name in the same document.
        spelling: which version's field names to write.
        partial: whether the family can rotate a part of each head.

    Raises:
        ValueError: config.json cannot express it.
    """
    share = {} if rope.partial_rotary_factor == 1.0 else {"partial_rotary_factor": rope.partial_rotary_factor}
    if share and not partial:
        raise ValueError(f"rope.partial_rotary_factor {rope.partial_rotary_factor} cannot be exported for this family")
    kind = rope.get_choice_name(type(rope))
    parameters = {
        f.name: list(value) if isinstance(value, tuple) else value
        for f in dataclasses.fields(rope)
        if f.name not in ("theta", "partial_rotary_factor") and (value := getattr(rope, f.name)) is not None
    }
    if kind == "default":
        # Our default type may divide positions by a factor, which transformers calls the type linear.
        kind = "default" if parameters["factor"] == 1.0 else "linear"
        parameters = {} if kind == "default" else parameters
    if kind == "dynamic" and parameters.pop(_ORIGINAL) != max_position_embeddings:
        raise ValueError(
            f"rope.{_ORIGINAL} {getattr(rope, _ORIGINAL)} of dynamic RoPE must be max_position_embeddings "
            f"{max_position_embeddings}: config.json has no other place for it"
        )
    scaling = None if kind == "default" else {"rope_type": kind, **parameters}
    flat = {"rope_theta": rope.theta, **share, "rope_scaling": scaling}
    if spelling == "transformers4":
        return flat
    document = {"rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **share, **parameters}}
    # Code that knows transformers 4's names only would otherwise silently take a scaled model for an unscaled one.
    # Where both are present, version 5 reads the flat ones, which cannot hold a partial share; so they are left out
    # for such families.
    return document if scaling is None or partial else document | flat
