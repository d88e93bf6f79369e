"""Stacks of blocks: one compiled block scanned over stacked weights, or the same blocks unrolled.

*Gradient checkpointing* determines what of a block is kept for the backward pass. Its spellings are Haliax's
`ScanCheckpointPolicy`: true keeps only the residual stream between blocks, false keeps everything, "nested" keeps the
square root of the blocks' inputs, "offload" keeps them in host memory, "recompute" and "full" keep nothing by name.
Ours is "long", for long sequences: it keeps the residual stream and attention's output (with its log-sum-exp), so that
scores, most of what a block computes there, are not recomputed.
A mapping of the policy's fields may also keep activations inside a block by name (`layers.saved`): on the device with
`save_block_internals: [query, key, value]`, in host memory with `offload_block_internals`.

Layers that differ are scanned in *periods*: the body of the scan is a few layers, each with its own static parts.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis
from haliax.nn import ScanCheckpointPolicy
from haliax.nn.scan import BlockSeq, Stacked

from haliax_ext.errors import nearest

C = TypeVar("C")

LONG = "long"
POLICY_NAMES = ("offload", "recompute", "full", "save_all", "nested", LONG)


def checkpoint_policy(
    value: bool | str | Mapping[str, Any] | ScanCheckpointPolicy, *, names: Collection[str] | None = None
) -> ScanCheckpointPolicy:
    """The checkpoint policy that a config value selects.

    Args:
        value: true, false, a policy's name, or a mapping of its fields; see the module.
        names: the activations that the layers name; None accepts any name.

    Raises:
        ValueError: an unknown name or field.
    """
    if isinstance(value, ScanCheckpointPolicy):
        return value
    if isinstance(value, Mapping):
        fields = [f.name for f in dataclasses.fields(ScanCheckpointPolicy)]
        if unknown := sorted(set(value) - set(fields)):
            close = nearest(unknown[0], fields)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            raise ValueError(f"model.gradient_checkpointing: no such fields: {unknown}{hint}; the fields are {fields}")
        for field in ("save_block_internals", "offload_block_internals") if names is not None else ():
            _check_names(field, value.get(field), names or ())
        return ScanCheckpointPolicy(**value)
    if value == LONG:
        # "attention" names attention's output and log-sum-exp in `layers`: with them the backward pass needs no
        # second forward pass of attention.
        return ScanCheckpointPolicy(save_block_internals=["attention"])
    if isinstance(value, bool) or value in POLICY_NAMES:
        return ScanCheckpointPolicy.from_bool_or_str(value)
    close = nearest(value, POLICY_NAMES)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    raise ValueError(
        f"model.gradient_checkpointing {value!r} is not true, false, one of {list(POLICY_NAMES)} or a mapping{hint}"
    )


def _check_names(field: str, value: object, names: Collection[str]) -> None:
    """Refuses names that no activation has: JAX would silently keep nothing."""
    if unknown := [name for name in value if name not in names] if isinstance(value, list | tuple) else []:
        close = nearest(str(unknown[0]), names)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ValueError(
            f"model.gradient_checkpointing.{field}: no activation of a block is named {unknown}{hint}; the names are "
            f"{list(names)}"
        )


class Period(eqx.Module):
    """Consecutive layers that differ, as the body of one scan.

    Attributes:
        places: the layers.
        policy: which values of each layer are kept for the backward pass.
    """

    places: tuple[Any, ...]
    policy: ScanCheckpointPolicy = eqx.field(static=True)

    @staticmethod
    def init(block: type[Any], specs: tuple[Any, ...], policy: ScanCheckpointPolicy, *, key: jax.Array) -> "Period":
        """Freshly initialized layers, `block.init(spec, key=…)` for each spec; `key` holds one for each."""
        places = tuple(block.init(spec, key=key[n]) for n, spec in enumerate(specs))
        return Period(places=places, policy=policy)

    def __call__(self, carry: C, *args: Any) -> C:
        """Applies the layers in order to the carry: the residual stream and the values carried with it."""

        def call(place: Callable[..., C], carry: C, *args: Any) -> C:
            # The name is what a policy with `save_carries` or
            # `offload_carries` refers to; Haliax's `Stacked` uses the same.
            return place(hax.tree_checkpoint_name(carry, "carry"), *args)

        for place in self.places:
            # Each layer is checkpointed by itself: the scan's own checkpoint would recompute the whole period at
            # once, with all its layers' activations alive.
            carry = self.policy.checkpoint("carry", "input", call)(place, carry, *args)
        return carry


def stack_builder(
    Layers: Axis,
    block: type[eqx.Module],
    *,
    scan: bool,
    gradient_checkpointing: bool | str | Mapping[str, Any] | ScanCheckpointPolicy,
) -> Callable[..., Stacked | BlockSeq]:
    """Returns the builder of a stack: call it with the block's `init` arguments, keys with the `layers` axis first."""
    policy = checkpoint_policy(gradient_checkpointing)
    return (Stacked if scan else BlockSeq).init(Layers, block, gradient_checkpointing=policy)
