"""Rotary embeddings in config.json, in both spellings, to and from `RotaryConfig`.

transformers 4 writes `rope_theta` beside `rope_scaling: {rope_type | type, factor, …}`; transformers 5 puts everything
into `rope_parameters: {rope_theta, rope_type, factor, …}`. A file may hold both if they agree. Reading only one of
them would silently evaluate with a base of 10000, so the two are merged key by key and a contradiction is an error.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from haliax_ext.errors import nearest
from levanter.compat.hf.families.base import Fields, Finding
from levanter.layers.rotary import (
    DefaultRotaryConfig,
    DynamicRotaryConfig,
    LinearRotaryConfig,
    Llama3RotaryConfig,
    RotaryConfig,
    YarnRotaryConfig,
)

Spelling = Literal["transformers4", "transformers5"]

DEFAULT_THETA = 10000.0
_ORIGINAL = "original_max_position_embeddings"

_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "default": ("factor", _ORIGINAL),
    "linear": (_ORIGINAL,),
    "dynamic": (_ORIGINAL,),
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}


def read_rope(fields: Fields, *, max_position_embeddings: int) -> RotaryConfig | None:
    """The rotary embeddings of a config.json; None after a problem, which is then in `fields`."""
    before = len(fields.problems)
    merged = _merge(fields)
    if len(fields.problems) > before:
        return None
    kind = merged.pop("rope_type", "default")
    if kind not in _REQUIRED:
        close = nearest(str(kind), _REQUIRED)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        fields.problems.append(f"rope type {kind!r} is not one of {', '.join(_REQUIRED)}{hint}")
        return None
    theta = _number(fields, "rope_theta", merged.pop("rope_theta", DEFAULT_THETA))
    if merged.pop("partial_rotary_factor", 1.0) != 1.0:
        fields.problems.append("partial_rotary_factor is not 1: this family rotates whole heads")
    for name in _REQUIRED[kind]:
        if name not in merged:
            fields.problems.append(f"rope type {kind!r} needs {name!r}")
    known = {*_REQUIRED[kind], *_OPTIONAL[kind]}
    for name in sorted(merged.keys() - known):
        fields.problems.append(f"rope type {kind!r} has no parameter {name!r} ({', '.join(sorted(known)) or 'none'})")
    numbers = {
        name: fields.check(f"rope.{name}", value, bool) if name == "truncate" else _number(fields, name, value)
        for name, value in merged.items()
        if name in known
    }
    if len(fields.problems) > before:
        return None
    return _build(fields, kind, theta, numbers, max_position_embeddings)


def _number(fields: Fields, name: str, value: Any) -> Any:
    return fields.check(f"rope.{name}", value, int if name == _ORIGINAL else float)


def _merge(fields: Fields) -> dict[str, Any]:
    """All rope parameters of the document under their transformers-5 names, null ones left out."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def put(name: str, value: Any, where: str) -> None:
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
        fields.seen.add(name)
        put(name, fields.document.get(name), name)
    return merged


def _build(fields: Fields, kind: str, theta: float, numbers: Mapping[str, Any], context: int) -> RotaryConfig | None:
    original = numbers.get(_ORIGINAL)
    try:
        match kind:
            case "default":
                # transformers ignores a factor here; only one that does nothing is believed.
                if numbers.get("factor", 1.0) != 1.0:
                    fields.problems.append(
                        f"rope type 'default' has factor {numbers['factor']}; transformers ignores it: say 'linear' "
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
                        "computes instead; the factor is used, as transformers 5 does"
                    )
                    fields.findings.append(Finding("rope.factor", numbers["factor"], message))
                return YarnRotaryConfig(theta=theta, **{_ORIGINAL: context, **numbers})
    except ValueError as error:
        fields.problems.append(str(error))
        return None
    raise AssertionError(kind)


def write_rope(rope: RotaryConfig, *, max_position_embeddings: int, spelling: Spelling) -> dict[str, Any]:
    """The config.json fields of rotary embeddings, the inverse of `read_rope`.

    Args:
        rope: what the model uses.
        max_position_embeddings: the field of that name beside it.
        spelling: whose field names.

    Raises:
        ValueError: config.json cannot say it.
    """
    if rope.partial_rotary_factor != 1.0:
        raise ValueError(f"rope.partial_rotary_factor {rope.partial_rotary_factor} cannot be exported for this family")
    kind = rope.get_choice_name(type(rope))
    parameters = {
        f.name: value
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
    if spelling == "transformers5":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **parameters}}
    return {"rope_theta": rope.theta, "rope_scaling": None if kind == "default" else {"rope_type": kind, **parameters}}
