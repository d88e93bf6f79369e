"""What an array of a module is for: its *role*, declared where the array is declared.

    class Linear(eqx.Module):
        weight: NamedArray = eqx.field(metadata=role("matrix"))

Whoever treats parameters by their kind (no weight decay for norms, Muon for matrices) asks for the role. A role holds
for everything below the field, so a model may say `head` of a whole projection; of two, the inner one is what the array
is, and the outer one says where it stands.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import haliax as hax

Role = Literal["matrix", "bias", "norm", "embedding", "sink", "head"]
"""A matrix that is multiplied by; what is added to its product; scales and offsets of a norm; a table of rows that are
looked up; scores of attention that belong to no key; the projection from activations to logits."""

_KEY = "role"
_OF_HALIAX: Mapping[type, Mapping[str, Role]] = {
    hax.nn.Linear: {"weight": "matrix", "bias": "bias"},
    hax.nn.Embedding: {"weight": "embedding"},
    hax.nn.LayerNorm: {"weight": "norm", "bias": "norm"},
    hax.nn.RmsNorm: {"weight": "norm", "bias": "norm"},
}
"""Roles of fields of modules that cannot declare them."""


def role(name: Role) -> Mapping[str, Role]:
    """The metadata of a dataclass field whose arrays have a role."""
    return {_KEY: name}


def declared_role(module: object, name: str) -> Role | None:
    """The role that a module declares for one of its fields; None where it declares none."""
    if type(module) in _OF_HALIAX:
        return _OF_HALIAX[type(module)].get(name)
    if not dataclasses.is_dataclass(module):
        return None
    return next((field.metadata.get(_KEY) for field in dataclasses.fields(module) if field.name == name), None)
