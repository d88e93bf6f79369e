"""The members of `trainer.mp` that scripts of earlier generations use; it was a `jmp` policy.

model = converter.load_pretrained(LlamaLMHeadModel, dtype=trainer.mp.compute_dtype)
model = trainer.mp.cast_to_compute(model)
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from levanter.models.precision import PolicyText


def param_dtype(policy: PolicyText) -> np.dtype:
    """The dtype of stored weights."""
    return policy.precision.params


def compute_dtype(policy: PolicyText) -> np.dtype:
    """The dtype of weights and activations in computation."""
    return policy.precision.compute


def output_dtype(policy: PolicyText) -> np.dtype:
    """The dtype of results."""
    return policy.precision.output


def cast_to_param(policy: PolicyText) -> Callable[[Any], Any]:
    """`mp.cast_to_param(tree)`."""
    return policy.precision.cast_to_param


def cast_to_compute(policy: PolicyText) -> Callable[[Any], Any]:
    """`mp.cast_to_compute(tree)`."""
    return policy.precision.cast_to_compute


def cast_to_output(policy: PolicyText) -> Callable[[Any], Any]:
    """`mp.cast_to_output(tree)`."""
    return policy.precision.cast_to_output
