"""Rotary embeddings in config.json, in both spellings, to and from `RotaryConfig`.

transformers 4 writes `rope_theta` beside `rope_scaling: {rope_type | type, factor, …}`; transformers 5 puts everything
into `rope_parameters: {rope_theta, rope_type, factor, …}`. A file may hold both if they agree. Reading only one of
them would silently evaluate with a base of 10000, so the two are merged key by key and a contradiction is an error.
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
"""No other names for parameters beside `rope_scaling` than those in `rope_parameters`."""

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
        theta: the family's base, where the document does not say it.
        partial: whether the family can rotate a part of each head.
        original: the family's original context, where the document does not say it; default
            `max_position_embeddings`.
        renamed: rope types by another name that this family knows them by.
        only: the rope types that the family can have beside `default`; empty for all.
        share: `partial_rotary_factor`, where the document does not say it.
        flat: what the family calls the parameters that transformers 4 writes beside `rope_scaling`.
    """
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
    for name in sorted(merged.keys() - known):
        fields.problems.append(f"rope type {kind!r} has no parameter {name!r} ({', '.join(sorted(known)) or 'none'})")
    numbers = {name: _value(fields, name, value) for name, value in merged.items() if name in known}
    if len(fields.problems) > before:
        return None
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

    for block in ("rope_parameters", "rope_scaling"):
        for name, value in fields.get(block, dict, {}).items():
            if isinstance(value, dict):
                fields.problems.append(f"{block}.{name} is a block of its own: rotary embeddings that differ by layer")
                continue
            put("rope_type" if name == "type" else name, value, f"{block}.{name}")
    for name in ("rope_theta", _ORIGINAL, "partial_rotary_factor"):
        spelled = flat.get(name, name)
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
                # transformers ignores a factor here; only one that does nothing is believed.
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
                return Llama3RotaryConfig(theta=theta, **{_ORIGINAL: context, **numbers})
            case "yarn":
                if original is not None and abs(context / original - numbers["factor"]) > 1e-6:
                    message = (
                        f"is not max_position_embeddings / {_ORIGINAL} = {context / original:g}, which transformers 4 "
                        "would compute; the given factor is used, as in transformers 5"
                    )
                    fields.findings.append(FieldFinding("rope.factor", numbers["factor"], message))
                return YarnRotaryConfig(theta=theta, **{_ORIGINAL: context, **numbers})
            case "longrope":
                # The stretch that the amplitude follows from is a ratio of contexts where it is not written.
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
    """The rotary embeddings of layers that see everything, and of layers with a window.

    transformers 5 writes `rope_parameters` with a block for each; in a flat spelling scaling is of the first only.

    Args:
        fields: the document.
        max_position_embeddings: the field of that name.
        theta: base of the first, where the document does not say it.
        theta_of_windows: base of the second, where `rope_parameters` does not say it.
    """
    fields.seen |= {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _ORIGINAL}
    by_type = fields.document.get("rope_parameters") or {}
    nested = {kind: by_type[kind] for kind in (_WHOLE, _WINDOWED) if isinstance(by_type.get(kind), dict)}
    flat = {name: value for name, value in fields.document.items() if name != "rope_parameters"}

    def read(document: Mapping[str, Any], theta: float) -> RotaryConfig | None:
        inner = ConfigJsonReader(document, problems=fields.problems, findings=fields.findings)
        return read_rope(inner, max_position_embeddings=max_position_embeddings, theta=theta)

    if not nested:
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
    """The inverse of `read_rope_by_layer_type`; in the transformers-4 spelling, the base of `windowed` is the caller's.

    Raises:
        ValueError: config.json cannot say it.
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
        max_position_embeddings: the field of that name beside it.
        spelling: whose field names.
        partial: whether the family can rotate a part of each head.

    Raises:
        ValueError: config.json cannot say it.
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
        # Positions divided by a factor are what the others call linear.
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
    # A reader of transformers 4's names only would otherwise take a scaled model for an unscaled one, without a word.
    # Where both are there version 5 goes by these, and they have no place for a share that is rotated.
    return document if scaling is None or partial else document | flat
