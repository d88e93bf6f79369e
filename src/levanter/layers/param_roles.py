"""The *role* of a parameter in its module (matrix, bias, norm, …), declared with the field.

    class Linear(eqx.Module):
        weight: NamedArray = eqx.field(metadata=role("matrix"))

Code that treats parameters by kind (no weight decay for norms, Muon for matrices) reads the role. A role holds for all
arrays below the field, so a model may declare `head` for a whole projection. Where two fields on a path declare roles,
the inner one is the kind of the array and the outer one its use in the model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import haliax as hax

Role = Literal["matrix", "bias", "norm", "embedding", "sink", "head"]
"""`matrix`: a factor of a product; `bias`: added to the product; `norm`: scales and offsets of a norm; `embedding`: a
table whose rows are looked up; `sink`: attention scores that belong to no key; `head`: the projection from activations
to logits."""

_KEY = "role"
_OF_HALIAX: Mapping[type, Mapping[str, Role]] = {
    hax.nn.Linear: {"weight": "matrix", "bias": "bias"},
    hax.nn.Embedding: {"weight": "embedding"},
    hax.nn.LayerNorm: {"weight": "norm", "bias": "norm"},
    hax.nn.RmsNorm: {"weight": "norm", "bias": "norm"},
}
"""Roles of the fields of Haliax's own modules, which cannot declare them."""


def role(name: Role) -> Mapping[str, Role]:
    """The metadata of a dataclass field whose arrays have a role."""
    return {_KEY: name}


def declared_role(module: object, name: str) -> Role | None:
    """The role that a module declares for one of its fields; None if it declares none."""
    # The exact type: a subclass of a Haliax module may give its fields other meanings, and can declare roles itself.
    if type(module) in _OF_HALIAX:
        return _OF_HALIAX[type(module)].get(name)
    if not dataclasses.is_dataclass(module):
        return None
    # Read from the class, so a role needs no instance attribute and is not part of the pytree.
    return next((field.metadata.get(_KEY) for field in dataclasses.fields(module) if field.name == name), None)
