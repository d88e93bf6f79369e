"""Which mesh sizes divide which axes, and the nearest that do.

JAX ends silently replicated inside `jit`, and with a raw traceback outside it, when a size does not divide; so this is
checked before JAX is called, by arithmetic.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from haliax_ext.meshspec import MeshSpec


def divisors(n: int) -> tuple[int, ...]:
    """All positive divisors of `n`, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])


def nearest_divisors(size: int, wanted: int) -> tuple[int, ...]:
    """The largest divisor of `size` below `wanted` and the smallest above, where there are such.

    >>> nearest_divisors(48, 10)
    (8, 12)
    """
    below = [d for d in divisors(size) if d < wanted]
    above = [d for d in divisors(size) if d > wanted]
    return (*below[-1:], *above[:1])


def describe_indivisible(name: str, size: int, axes: Sequence[str], mesh: MeshSpec) -> tuple[str, str]:
    """The problem and the way out, when `size` of axis `name` is not a multiple of the mesh axes' product."""
    ways = mesh.ways(tuple(axes))
    sizes = " × ".join(f"{axis} {mesh.shape[axis]}" for axis in axes)
    noun, verb = ("mesh axis", "does") if len(axes) == 1 else ("mesh axes", "do")
    problem = f"axis {name!r} has size {size}, which {noun} {sizes} {verb} not divide ({size} % {ways} = {size % ways})"
    legal = ", ".join(map(str, nearest_divisors(size, ways)))
    suggestion = f"nearest mesh sizes that divide {size}: {legal}; or unmap the axis: {{{name}: null}}"
    return problem, suggestion


@dataclass(frozen=True, kw_only=True)
class SizeVerdict:
    """Whether a mesh axis may have this size, which axes forbid it, and what would help.

    Attributes:
        size: the size of the mesh axis.
        blockers: triples (axis name, its size, remainder) that do not divide.
        remark: what would make it legal, or what it costs where it is.
    """

    size: int
    blockers: tuple[tuple[str, int, int], ...]
    remark: str = ""

    @property
    def ok(self) -> bool:
        """Whether the size divides every axis it would shard."""
        return not self.blockers

    def __str__(self) -> str:
        remark = f"; {self.remark}" if self.remark else ""
        if self.ok:
            return f"{self.size} OK{remark}"
        why = "; ".join(f"{name} {size} % {self.size} = {rest}" for name, size, rest in self.blockers)
        return f"{self.size} NO ({why}){remark}"


def legal_sizes(axes: Iterable[tuple[str, int]], candidates: Iterable[int]) -> tuple[SizeVerdict, ...]:
    """Judges each candidate size of a mesh axis against every (axis name, size) mapped to it.

    >>> for verdict in legal_sizes([("mlp", 64), ("vocab", 96)], [32, 64]):
    ...     print(verdict)
    32 OK
    64 NO (vocab 96 % 64 = 32)
    """
    pairs = tuple(axes)
    return tuple(
        SizeVerdict(
            size=candidate,
            blockers=tuple((name, size, size % candidate) for name, size in pairs if size % candidate),
        )
        for candidate in candidates
    )


def render_verdicts(verdicts: Iterable[SizeVerdict], *, mesh_axis: str = "model") -> str:
    """One line for each verdict, sizes aligned, under a heading with the name of the mesh axis.

    >>> print(render_verdicts(legal_sizes([("mlp", 64)], [8, 12])))
    model
        8  OK
       12  NO (mlp 64 % 12 = 4)
    """
    lines = [str(verdict).partition(" ") for verdict in verdicts]
    width = max([len(mesh_axis), *(len(size) for size, _, _ in lines)])
    return "\n".join([mesh_axis, *(f"{size:>{width}}  {rest}" for size, _, rest in lines)])
