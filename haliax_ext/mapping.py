"""`AxisMapping`: which logical axis goes to which mesh axes, as a checked, hashable value.

It is a `Mapping[str, str | tuple[str, ...]]`, so `haliax.axis_mapping(mapping)` takes it as it is. Four mappings stay
four: *params* (weights and optimizer state), *compute* (activations at named constraint points), *residual* (the
residual stream at block boundaries) and *attention* (queries, keys and values inside attention);
`Mappings` holds them with per-path parameter overrides.

Path patterns: segments are separated by dots, `*` stands for one segment, `**` for any number; a pattern also matches
everything below what it matches, so `**.self_attn.*` covers `layers.self_attn.q_proj.weight`.
"""

# pyright: reportMissingTypeStubs=false
import contextlib
import contextvars
import functools
import math
import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

import haliax as hax
import jax
from haliax.partitioning import current_thread_local_mapping
from jax.sharding import PartitionSpec

from haliax_ext.errors import ShardingError, UnknownAxisError, nearest
from haliax_ext.meshspec import MeshAxes, MeshSpec, mesh_in_scope


class AxisMapping(Mapping[str, MeshAxes]):
    """An immutable, hashable mapping from logical axis names to mesh axis names.

    Values are a mesh axis or a tuple of them (major first). A one-element list is unwrapped. `None` and an empty list
    mean "not mapped": such a name is not an item of the mapping, but it is remembered in `unmapped`, so that merging
    this mapping over another one removes that one's rule.

    >>> mapping = AxisMapping({"embed": "data", "mlp": ["model"], "vocab": None})
    >>> mapping["mlp"], "vocab" in mapping, mapping.unmapped
    ('model', False, frozenset({'vocab'}))
    """

    __slots__ = ("_entries", "unmapped")

    _entries: dict[str, MeshAxes]
    unmapped: frozenset[str]

    def __init__(self, entries: Mapping[str, str | Iterable[str] | None] | None = None):
        normalized = {name: _as_mesh_axes(name, value) for name, value in (entries or {}).items()}
        self._entries = {name: axes for name, axes in normalized.items() if axes is not None}
        self.unmapped = frozenset(name for name, axes in normalized.items() if axes is None)
        if isinstance(entries, AxisMapping):
            self.unmapped |= entries.unmapped

    def __getitem__(self, name: str) -> MeshAxes:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        # Equal mappings may list their rules in another order, and must have one hash.
        rules = sorted((k, v if isinstance(v, tuple) else (v,)) for k, v in self._entries.items())
        return hash((tuple(rules), self.unmapped))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, AxisMapping):
            return self._entries == other._entries and self.unmapped == other.unmapped
        # A plain mapping cannot record that a name is unmapped.
        plain = isinstance(other, Mapping) and not self.unmapped
        return plain and self._entries == dict(cast("Mapping[object, object]", other))

    def __repr__(self) -> str:
        return f"AxisMapping({self})"

    def __str__(self) -> str:
        def show(value: MeshAxes) -> str:
            return value if isinstance(value, str) else f"[{', '.join(value)}]"

        rules = [f"{name}: {show(value)}" for name, value in self._entries.items()]
        return "{" + ", ".join(rules + [f"{name}: null" for name in sorted(self.unmapped)]) + "}"

    def merged(self, other: Mapping[str, str | Iterable[str] | None]) -> "AxisMapping":
        """This mapping with `other`'s entries over it; what `other` unmaps (a `None`) is removed.

        The order of rules stays this mapping's; new names come last.

        >>> print(AxisMapping({"embed": "data", "mlp": "model"}).merged({"mlp": None, "vocab": "model"}))
        {embed: data, vocab: model}
        """
        over = AxisMapping(other)
        merged = {**self._entries, **over}
        # A name that `other` unmaps has no rule in the result, and is not unmapped there either.
        return AxisMapping({name: axes for name, axes in merged.items() if name not in over.unmapped})

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """The mesh axes of a logical axis, `()` if it is not mapped.

        >>> AxisMapping({"batch": ["replica", "data"]}).mesh_axes("batch")
        ('replica', 'data')
        """
        value = self._entries.get(name, ())
        return (value,) if isinstance(value, str) else value

    @property
    def used_mesh_axes(self) -> frozenset[str]:
        """Every mesh axis that some rule names."""
        return frozenset(axis for name in self for axis in self.mesh_axes(name))

    def spec(self, axis_names: Iterable[str]) -> PartitionSpec:
        """The `PartitionSpec` of an array with these axes. Rules are not checked here (see `planner`).

        >>> tuple(AxisMapping({"embed": "data"}).spec(["embed", "mlp"]))
        ('data', None)
        """
        return PartitionSpec(*(self._entries.get(name) for name in axis_names))

    def check(self, *, known: Collection[str], used: Collection[str], mesh: MeshSpec, where: str) -> list[str]:
        """Refuses unknown axis names; returns a note for each known name that this model does not use.

        Args:
            known: every logical axis name of the glossary.
            used: the logical axis names of this model.
            mesh: the mesh whose axes may appear on the right-hand side.
            where: the mapping's name in messages (`trainer.mesh.param_mapping`).

        Raises:
            UnknownAxisError: with all unknown logical and mesh axes and their near matches.
        """
        problems: list[str] = []
        notes: list[str] = []
        known_names = set(known) | set(used)
        strangers = [name for name in (*self, *sorted(self.unmapped)) if name not in known_names]
        for name in strangers:
            problems.append(
                f"{where}: {name!r} is neither an axis of this model nor a known axis name{_hint(name, known_names)}"
            )
        for name in self:
            if name not in used and name not in strangers:
                notes.append(
                    f"{where}: {name!r} is a known axis, but this model does not have it; the rule has no effect"
                )
            problems.extend(unknown_mesh_axes(where, name, self.mesh_axes(name), mesh))
        if problems:
            suggestion = f"axes of this model: {', '.join(sorted(set(used)))}" if strangers else None
            raise UnknownAxisError("\n".join(problems), suggestion=suggestion)
        return notes


def unknown_mesh_axes(where: str, name: str, mesh_axes: Iterable[str], mesh: MeshSpec) -> list[str]:
    """A line for each of the mesh axes in the rule `name → mesh_axes` that `mesh` does not have."""
    return [
        f"{where}: {name} → {axis}, but the mesh has only {list(mesh.names)}{_hint(axis, mesh.names)}"
        for axis in mesh_axes
        if axis not in mesh.names
    ]


def _hint(word: str, known: Iterable[str]) -> str:
    close = nearest(word, known)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _as_mesh_axes(name: str, value: str | Iterable[str] | None) -> MeshAxes | None:
    if value is None or isinstance(value, str):
        return value or None
    values = tuple(cast("Iterable[object]", value))  # YAML may hold anything.
    axes = tuple(axis for axis in values if isinstance(axis, str))
    if len(axes) != len(values):
        raise ShardingError(f"mapping of {name!r}: expected a mesh axis or a list of mesh axes, got {value!r}")
    if len(set(axes)) != len(axes):
        raise ShardingError(f"mapping of {name!r} names a mesh axis twice: {list(axes)}")
    return axes[0] if len(axes) == 1 else axes or None


@dataclass(frozen=True, kw_only=True)
class DeclaredReplication:
    """Arrays with axis `has` but without axis `lacks` are replicated over `mesh_axes` on purpose.

    Grouped-query attention is the case: query groups are sharded over a mesh axis that K/V heads cannot be sharded
    over.
    """

    has: str
    lacks: str
    mesh_axes: tuple[str, ...]
    reason: str = "the mapping implies it"

    def applies(self, axis_names: Collection[str]) -> bool:
        """Whether the rule applies to an array with these axes."""
        return self.has in axis_names and self.lacks not in axis_names


@dataclass(frozen=True, kw_only=True)
class Mappings:
    """The mappings of one run.

    Attributes:
        params: for weights and optimizer state.
        compute: for activations.
        residual: for the residual stream at block boundaries, over `compute`.
        attention: for queries, keys and values between their projections and the output's, over `compute`.
        zigzag: axes in zigzag order over their n parts inside attention: of 2n runs of consecutive entries, part i has
            the runs i and 2n − 1 − i.
        overrides: pairs (path pattern, mapping merged over `params` for matching leaves); later ones win.
        declared: replication that the mapping implies on purpose.
        allow_replicated: path patterns or mesh axes whose replication the user accepts.
        on_conflict: when two axes of one parameter want the same mesh axis: an error, or the one whose rule comes first
            in the mapping keeps it.
    """

    params: AxisMapping = field(default_factory=AxisMapping)
    compute: AxisMapping = field(default_factory=AxisMapping)
    residual: AxisMapping = field(default_factory=AxisMapping)
    attention: AxisMapping = field(default_factory=AxisMapping)
    zigzag: tuple[str, ...] = ()
    overrides: tuple[tuple[str, AxisMapping], ...] = ()
    declared: "tuple[DeclaredReplication, ...]" = ()
    allow_replicated: tuple[str, ...] = ()
    on_conflict: Literal["error", "first_wins"] = "error"

    def params_at(self, path: str) -> AxisMapping:
        """The parameter mapping that applies to the leaf at `path`.

        >>> overrides = (("embeddings", AxisMapping({"embed": None})),)
        >>> mappings = Mappings(params=AxisMapping({"embed": "data", "vocab": "model"}), overrides=overrides)
        >>> print(mappings.params_at("embeddings.weight"))
        {vocab: model}
        """
        mapping = self.params
        for _, override in self.overrides_at(path):
            mapping = mapping.merged(override)
        return mapping

    def overrides_at(self, path: str) -> "tuple[tuple[str, AxisMapping], ...]":
        """The overrides that apply to the leaf at `path`, in order."""
        return tuple((pattern, override) for pattern, override in self.overrides if path_matches(pattern, path))

    @property
    def residual_stream(self) -> AxisMapping:
        """The mapping of the residual stream at block boundaries: `residual` over `compute`."""
        return self.compute.merged(self.residual)

    @property
    def inside_attention(self) -> AxisMapping:
        """The mapping in force inside attention: `attention` over `compute`."""
        return self.compute.merged(self.attention)


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    regex = ""
    for segment in pattern.split("."):
        if segment == "**":
            # Zero or more segments, each with its dot: the path is matched with a dot behind it.
            regex += r"(?:[^.]+\.)*"
        else:
            regex += re.escape(segment).replace(r"\*", r"[^.]*") + r"\."
    # Whatever lies below the last segment matches too.
    return re.compile(regex + r"(?:[^.]+\.)*")


def path_matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches `path` or one of its parents.

    >>> path_matches("**.self_attn.*", "layers.self_attn.q_proj.weight")
    True
    >>> path_matches("layers.*.weight", "layers.mlp.up.weight")
    False
    """
    return _compiled(pattern).fullmatch(path + ".") is not None


_residual: contextvars.ContextVar[AxisMapping | None] = contextvars.ContextVar("residual_mapping", default=None)
_params: contextvars.ContextVar[AxisMapping | None] = contextvars.ContextVar("parameter_mapping", default=None)
_attention: contextvars.ContextVar[AxisMapping | None] = contextvars.ContextVar("attention_mapping", default=None)
_zigzag: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("zigzag_axes", default=())


@contextlib.contextmanager
def mappings_in_scope(mappings: Mappings) -> Generator[None]:
    """Puts the compute mapping in Haliax's scope and the other ones in ours, for tracing."""
    # A mapping that only unmaps axes counts: the attention mapping is then `compute` without those axes.
    has_attention = bool(mappings.attention or mappings.attention.unmapped)
    residual, params = _residual.set(mappings.residual_stream), _params.set(mappings.params)
    attention, zigzag = (
        _attention.set(mappings.inside_attention if has_attention else None),
        _zigzag.set(mappings.zigzag),
    )
    # Reset by token, so that nested scopes restore what they replaced.
    try:
        with compute_mapping(mappings.compute):
            yield
    finally:
        _residual.reset(residual)
        _params.reset(params)
        _attention.reset(attention)
        _zigzag.reset(zigzag)


def shard_residual(x: hax.NamedArray) -> hax.NamedArray:
    """Constrains the residual stream at a block boundary; the identity where no mapping is in scope."""
    mapping = _residual.get()
    return hax.auto_sharded(x) if mapping is None else hax.shard(x, mapping)


def into_residual(x: hax.NamedArray) -> hax.NamedArray:
    """Constrains a branch that will be added to the residual stream, first as the computation and then as the stream.

    The two constraints matter where both shard an axis and the stream shards it further (positions over `context` in
    the computation, over `context` and `model` in the stream). With the stream's constraint alone the compiler goes
    from partial sums to the stream's shards through whole positions: it gathers the operands over `context` and reduces
    the entire product over `model`. With the computation's constraint in between it scatters the sums. In every other
    case this is the identity.
    """
    return shard_residual(hax.auto_sharded(x)) if _refined(x) else x


def out_of_residual(x: hax.NamedArray) -> hax.NamedArray:
    """Constrains what was read from the residual stream: `into_residual` reversed, which is what its gradients need."""
    return hax.auto_sharded(shard_residual(x)) if _refined(x) else x


def _refined(x: hax.NamedArray) -> bool:
    """Whether the computation shards an axis of `x` and the residual stream shards that axis further."""
    residual, compute = _residual.get(), compute_mapping_in_scope()
    if residual is None:
        return False
    for axis in x.axes:
        inside, between = compute.mesh_axes(axis.name), residual.mesh_axes(axis.name)
        # Exactly the case of `into_residual`: the stream adds mesh axes behind those that the computation uses.
        if inside and len(between) > len(inside) and between[: len(inside)] == inside:
            return True
    return False


def shard_attention(x: hax.NamedArray) -> hax.NamedArray:
    """Constrains queries, keys or values by the attention mapping; by the compute mapping where there is none."""
    mapping, mesh = _attention.get(), mesh_in_scope()
    if mapping is None or mesh is None:
        return hax.auto_sharded(x)
    return _pinned(x, mapping)


@contextlib.contextmanager
def inside_attention() -> Generator[None]:
    """Puts the attention mapping in Haliax's scope, where there is one."""
    mapping = _attention.get()
    with contextlib.nullcontext() if mapping is None else compute_mapping(mapping):
        yield


def in_one_mapping() -> bool:
    """Whether attention has no mapping of its own."""
    return _attention.get() is None


def zigzag_parts(axis_name: str) -> int:
    """The number of parts over which an axis is in zigzag order; 1 where it is in natural order."""
    if axis_name not in _zigzag.get():
        return 1
    # The order is defined by the cuts inside attention, which its own mapping decides.
    with inside_attention():
        return ways_in_scope(axis_name)


def shard_like_parameter(x: hax.NamedArray) -> hax.NamedArray:
    """Constrains an array with a parameter's axes by the parameter mapping; the identity where no mapping is in scope.

    Overrides by path do not apply, and a mesh axis that two axes are mapped to shards the first of them.
    """
    mapping = _params.get()
    if mapping is None:
        return x
    taken: set[str] = set()
    free: dict[str, tuple[str, ...]] = {}
    for axis in x.axes:
        # A mesh axis can shard an array only once: the first axis of the array keeps it.
        free[axis.name] = tuple(m for m in mapping.mesh_axes(axis.name) if m not in taken)
        taken |= set(free[axis.name])
    return hax.shard(x, AxisMapping(free))


def shard_as_computed(x: hax.NamedArray) -> hax.NamedArray:
    """Constrains an array by the mapping in scope, also where that leaves it whole on every device.

    `haliax.auto_sharded` omits constraints that shard nothing: a sharded array then stays sharded, and a loop that
    reads it gathers it in every step.
    """
    mapping, mesh = mapping_in_scope(), mesh_in_scope()
    if mapping is None or mesh is None:
        return x
    return _pinned(x, mapping)


def _pinned(x: hax.NamedArray, mapping: AxisMapping) -> hax.NamedArray:
    spec = mapping.spec(axis.name for axis in x.axes)
    array = jax.lax.with_sharding_constraint(x.array, spec)  # pyright: ignore[reportUnknownMemberType]
    return hax.NamedArray(array, x.axes)


@contextlib.contextmanager
def compute_mapping(mapping: AxisMapping) -> Generator[None]:
    """Puts `mapping` in Haliax's scope, where `haliax.auto_sharded` finds it."""
    with hax.axis_mapping(mapping):  # pyright: ignore[reportUnknownMemberType]
        yield


def mapping_in_scope() -> AxisMapping | None:
    """The mapping of `haliax.axis_mapping`; None outside of it."""
    resources = cast("Mapping[str, str | Iterable[str] | None] | None", current_thread_local_mapping())
    return None if resources is None else AxisMapping(resources)


def compute_mapping_in_scope() -> AxisMapping:
    """The mapping that activations are constrained by while tracing; empty where none is in scope."""
    return mapping_in_scope() or AxisMapping()


def ways_in_scope(axis_name: str) -> int:
    """The number of shards of an activation's axis under the mapping and mesh in scope; 1 where there is none."""
    # The abstract mesh is in scope while tracing and under `jax.set_mesh` alike.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    return math.prod(mesh.shape.get(name, 1) for name in compute_mapping_in_scope().mesh_axes(axis_name))
