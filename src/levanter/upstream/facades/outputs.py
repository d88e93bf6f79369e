"""`model(ids, attn_mask=mask)` as logits, which it is upstream: `outputs.array`, `outputs["vocab", 3]`, `outputs * 2`.

A call returns `ModelOutputs`, which have activations, and logits on demand. What only logits have is looked up in them.
"""

from collections.abc import Callable
from typing import Any

from haliax import NamedArray

from levanter.models.base import ModelOutputs
from levanter.upstream.imports import warn_once

MEMBERS = (
    "array axes axis_size argmax astype broadcast_axis broadcast_to dot dtype flatten_axes imag max mean min ndim "
    "rearrange real rename resolve_axis scalar select shape size slice std sum take unbind var"
)
"""Members of logits that outputs have."""


def _logits(outputs: ModelOutputs, stacklevel: int) -> NamedArray:
    warn_once("ModelOutputs", "model(…) as logits: the current call is model(…).logits", stacklevel=stacklevel)
    return outputs.logits


def __getattr__(name: str) -> Callable[[ModelOutputs], Any]:
    """The function of outputs that reads a member of their logits."""
    if name not in MEMBERS.split():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda outputs: getattr(_logits(outputs, 6), name)


def operator(outputs: ModelOutputs) -> Callable[..., Any]:
    """An operator of logits, called with its name and the other operand."""
    logits = _logits(outputs, 7)
    return lambda name, *operand: getattr(logits, name)(*operand)
