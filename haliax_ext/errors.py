"""What can go wrong when named axes meet a mesh, each as a `ValueError` a user can act on.

A message always carries the same four things, in this order: the array's path and named shape, the rule that
applies, what is wrong with it in numbers, and the nearest thing that would work. Rules are checked on plain
values before JAX is called: inside `jit` JAX would silently replicate, outside it would raise a raw traceback.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import cast


class ShardingError(ValueError):
    """A mapping, a mesh and an array do not go together."""

    def __init__(self, message: str, *, path: str | None = None, suggestion: str | None = None):
        self.path = path
        self.suggestion = suggestion
        self.problem = message
        super().__init__(message + (f"\n  → {suggestion}" if suggestion else ""))


class MeshError(ShardingError):
    """Mesh axis sizes do not multiply to the available devices, or an axis is named twice."""


class UnknownAxisError(ShardingError):
    """A mapping names a logical axis, or a mesh axis, that does not exist."""


class AxisCollisionError(ShardingError):
    """Two logical axes of one array are mapped to the same mesh axis."""


class IndivisibleError(ShardingError):
    """An axis size is not a multiple of the mesh axes it is mapped to."""


class ReplicationError(ShardingError):
    """A large array would be replicated on devices that could share it."""


class ManyShardingErrors(ShardingError):
    """Everything that is wrong, listed together."""

    def __init__(self, errors: Iterable[ShardingError]):
        self.errors = tuple(errors)
        lines = [f"{len(self.errors)} sharding errors:"]
        lines += [f"[{i}] {error}" for i, error in enumerate(self.errors, 1)]
        super().__init__("\n".join(lines))


def raise_all(errors: Iterable[ShardingError]) -> None:
    """Raises nothing, the one error, or a `ManyShardingErrors` that lists them all."""
    collected = tuple(errors)
    # One error keeps its own type, which callers test for.
    if len(collected) == 1:
        raise collected[0]
    if collected:
        raise ManyShardingErrors(collected)


def named_shape(axes: Mapping[str, int] | Iterable[tuple[str, int]]) -> str:
    """Formats axes as `[layers 32, mlp 8192, embed 2048]`.

    >>> named_shape({"mlp": 8192, "embed": 2048})
    '[mlp 8192, embed 2048]'
    """
    items = cast("Mapping[str, int]", axes).items() if isinstance(axes, Mapping) else axes
    return "[" + ", ".join(f"{name} {size}" for name, size in items) + "]"


def gib(nbytes: float) -> str:
    """Formats bytes with two decimals and a binary unit: `1.25 GiB`.

    >>> gib(1_342_177_280), gib(512)
    ('1.25 GiB', '512 B')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


LONGEST_WORD = 200
"""Characters of a word that is compared with others: comparing takes the product of two lengths."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """The up to three known words that are closest in spelling to `word`.

    >>> nearest("embd", ["embed", "mlp", "vocab"])
    ['embed']
    """
    # Sorted, so that equal distances give the same suggestion in every process.
    if len(word) > LONGEST_WORD:
        return []
    return get_close_matches(word, sorted(set(known)), n=3, cutoff=0.5)
