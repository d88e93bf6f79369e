"""Precision policies: the dtypes of stored weights, of computation and of results.

Configs hold a policy as a string, in the spelling of the `jmp` package: `f32`, `bfloat16`, `p=f32,c=bf16`,
`params=float32,compute=bfloat16,output=float32`. The key `m=` is an addition: how matrix products of float32 numbers
are computed (`default`, `high`, `highest`). TPUs and recent GPUs round their inputs by default; without `m=`, float32
compute uses `highest`, so that f32 means f32 on every platform.
"""

import re
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from haliax_ext.errors import nearest

T = TypeVar("T")
Matmul = Literal["default", "high", "highest"]

_DTYPES = {
    "f32": "float32",
    "float32": "float32",
    "full": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "f16": "float16",
    "float16": "float16",
    "half": "float16",
}
_KEYS = {
    "p": "params",
    "params": "params",
    "c": "compute",
    "compute": "compute",
    "o": "output",
    "output": "output",
    "m": "matmul",
    "matmul": "matmul",
}
_MATMULS = ("default", "high", "highest")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision policy.

    Attributes:
        params: dtype of stored weights and optimizer state.
        compute: dtype of weights and activations while computing.
        output: dtype of results.
        matmul: JAX's matmul precision.
    """

    params: np.dtype
    compute: np.dtype
    output: np.dtype
    matmul: Matmul

    @classmethod
    def parse(cls, text: str) -> "Precision":
        """Reads a policy string.

        Raises:
            ValueError: lists everything in it that is not understood.
        """
        import jax.numpy as jnp

        policy = _read(text)
        params = policy.get("params", "float32")
        # As in jmp: what is not given follows from the one before it, params → compute → output.
        compute = policy.get("compute", params)
        return cls(
            params=jnp.dtype(params),
            compute=jnp.dtype(compute),
            output=jnp.dtype(policy.get("output", compute)),
            matmul=policy.get("matmul", "highest" if compute == "float32" else "default"),  # pyright: ignore
        )

    def __str__(self) -> str:
        return f"p={self.params.name},c={self.compute.name},o={self.output.name},m={self.matmul}"

    def cast_to_param(self, tree: T) -> T:
        """Floating-point arrays of `tree` in the storage dtype."""
        return cast_floating(tree, self.params)

    def cast_to_compute(self, tree: T) -> T:
        """Floating-point arrays of `tree` in the compute dtype; call it inside `jit`."""
        return cast_floating(tree, self.compute)

    def cast_to_output(self, tree: T) -> T:
        """Floating-point arrays of `tree` in the output dtype."""
        return cast_floating(tree, self.output)


class PolicyText(str):
    """A policy as text, such as `p=f32,c=bf16`; the type of `TrainerConfig.mp`."""

    __slots__ = ()

    @classmethod
    def of(cls, policy: object) -> "PolicyText":
        """The text of a policy, which may be text, a `Precision` or a policy of `jmp`."""
        if isinstance(policy, str | Precision):
            return cls(policy)
        import jax.numpy as jnp

        # Duck-typed: jmp is not a dependency, but upstream's users construct `jmp.Policy` in Python.
        dtype_fields = {"p": "param_dtype", "c": "compute_dtype", "o": "output_dtype"}
        if missing := [name for name in dtype_fields.values() if not hasattr(policy, name)]:
            raise TypeError(f"{policy!r} is not a precision policy: it lacks {', '.join(missing)}")
        return cls(",".join(f"{key}={jnp.dtype(getattr(policy, name)).name}" for key, name in dtype_fields.items()))

    def check(self) -> None:
        """Raises a `ValueError` if the text is not a valid policy."""
        _read(self)

    @property
    def precision(self) -> Precision:
        """The parsed policy.

        Raises:
            ValueError: the text is not a valid policy.
        """
        return Precision.parse(self)


def cast_floating(tree: T, dtype: np.dtype) -> T:
    """`tree` with its floating-point arrays in `dtype`."""
    import jax
    import jax.numpy as jnp

    def cast(x):
        # Integers (ids, int8 weights, counters) and PRNG keys keep their dtype.
        floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(dtype) if floating else x

    return jax.tree.map(cast, tree)


def _read(text: str) -> dict[str, str]:
    """The fields of a policy, by their names in `Precision`; raises a `ValueError` that lists every problem."""
    policy: dict[str, str] = {}
    problems: list[str] = []
    items = [part.strip() for part in text.split(",")]
    # A lone dtype means all three, as in jmp.
    if len(items) == 1 and "=" not in text:
        name = _lookup(items[0], _DTYPES, "dtype", problems)
        policy = {"params": name, "compute": name, "output": name}
    else:
        for part in items:
            match = re.fullmatch(r"(\w+)\s*=\s*(\w+)", part)
            if match is None:
                problems.append(f"{part!r} is not of the form key=dtype")
                continue
            key = _lookup(match[1], _KEYS, "key", problems)
            # A repeated key would otherwise silently take its last value.
            if key in policy:
                problems.append(f"{key} is given twice")
            if key == "matmul":
                policy[key] = _lookup(match[2], {m: m for m in _MATMULS}, "matmul precision", problems)
            else:
                policy[key] = _lookup(match[2], _DTYPES, "dtype", problems)
    if problems:
        raise ValueError(f"precision policy {text!r}: " + "; ".join(problems) + "; an example: p=f32,c=bf16")
    return policy


def _lookup(word: str, known: dict[str, str], what: str, problems: list[str]) -> str:
    if word not in known:
        close = nearest(word, known)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        problems.append(f"{word!r} is not a {what} ({', '.join(known)}){hint}")
    return known.get(word, word)
