"""The inputs of `resolve`: `MeshConfig`, the keys of `trainer.mesh:` with their defaults, and the axes of a model.

A `MeshConfig` holds what the user wrote: sizes may be -1, mappings may use `heads` and other spellings of axis names.
`resolve` turns it into a `MeshSpec` and `Mappings` once the number of devices and the model's axes are known.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from levanter.config.validators import PositiveFloat, PositiveOrAll, Ranged

if TYPE_CHECKING:
    # A configuration is read without importing Haliax and JAX.
    from haliax_ext.abstract import Leaf

Word = Literal["gather", "heads", "ring", "auto"]
"""Names that `attention_mapping` may have in place of a mapping; see `context_parallel`."""

MappingValue = str | list[str] | None
"""A mesh axis, a list of mesh axes (major first), or null to remove a default."""

DEFAULT_AXES: Mapping[str, int] = {"data": -1, "replica": 1, "model": 1}
DEFAULT_DCN_AXES: Mapping[str, int] = {"replica_dcn": -1}
DEFAULT_SHARED: Mapping[str, str] = {"mlp": "model", "heads": "model"}
TABLE_ROW = "table_row"
"""Rows of tables that have no axis `embed`: by default they are sharded by the rule for `embed` of parameters."""
DEFAULT_BATCH_AXES = ("replica_dcn", "replica", "data")


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Ranged):
    """Mesh axes and the mappings of logical axes to them.

    Attributes:
        axes: mesh axes inside a slice (ICI) and their sizes, merged over `{data: -1, replica: 1, model: 1}`; one may be
            -1, which takes the remaining devices.
        dcn_axes: mesh axes across granules (DCN), merged over `{replica_dcn: -1}`; one may be -1.
        batch_axis_name: logical name of the batch axis.
        shared_mapping: logical axis → mesh axis or list, for parameters and compute, merged over
            `{mlp: model, heads: model}`; null removes a default.
        compute_mapping: for activations only, merged over the shared mapping.
        param_mapping: for parameters and optimizer state only, merged over the shared mapping.
        granule: what a DCN axis counts: slices, or processes where devices have no slices.
        residual_mapping: for the residual stream at block boundaries only, merged over the compute mapping.
        attention_mapping: for queries, keys and values inside attention only, merged over the compute mapping; or a
            context-parallel strategy by name: `gather` (all-gather of K/V), `heads` (Ulysses), `ring` (ring attention),
            or `auto`, which chooses one.
        position_order: how positions are ordered over the devices that shard them: `natural`, or `zigzag`, where each
            device has an early and a late range, which balances a causal mask. Default: `zigzag` where
            `attention_mapping` is set and is not `heads`.
        allow_dcn: whether `position` may be sharded over mesh axes between slices, where each layer exchanges keys and
            values over DCN; only with `ring`.
        overrides: path pattern → mapping merged over the parameter mapping for matching parameters.
        split_heads: `auto` factors a mesh axis mapped to `heads` that exceeds the KV heads into itself × `group`.
        allow_replicated: path patterns or mesh axes for which large replication is accepted.
        allow_idle_axes: mesh axes that may shard nothing, so that the devices along them do the same work; any other
            such mesh axis is an error.
        on_conflict: what happens if two logical axes of one array map to one mesh axis: an error, or the first in the
            mapping is sharded.
        hbm_gib: memory of one device in GiB, used by the replication check; default: the accelerator's.
    """

    axes: dict[str, PositiveOrAll] = field(default_factory=dict)
    dcn_axes: dict[str, PositiveOrAll] = field(default_factory=dict)
    batch_axis_name: str | None = "batch"
    shared_mapping: dict[str, MappingValue] = field(default_factory=dict)
    compute_mapping: dict[str, MappingValue] = field(default_factory=dict)
    param_mapping: dict[str, MappingValue] = field(default_factory=lambda: {"embed": "data"})
    granule: Literal["slice", "process"] = "slice"
    residual_mapping: dict[str, MappingValue] = field(default_factory=dict)
    attention_mapping: dict[str, MappingValue] | Word = field(default_factory=dict)
    position_order: Literal["natural", "zigzag"] | None = None
    allow_dcn: bool = False
    overrides: dict[str, dict[str, MappingValue]] = field(default_factory=dict)
    split_heads: Literal["never", "auto"] = "never"
    allow_replicated: list[str] = field(default_factory=list)
    allow_idle_axes: list[str] = field(default_factory=list)
    on_conflict: Literal["error", "first_wins"] = "error"
    hbm_gib: PositiveFloat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rules = {
            name: getattr(self, name)
            for name in ("shared_mapping", "compute_mapping", "param_mapping", "residual_mapping")
        }
        # A word such as `ring` has no keys to check.
        if not isinstance(self.attention_mapping, str):
            rules["attention_mapping"] = self.attention_mapping
        keys = {"axes": self.axes, "dcn_axes": self.dcn_axes, "overrides": self.overrides, **rules}
        problems = [
            f"{name}: {key!r} is not a name" for name, block in keys.items() for key in block if not key.strip()
        ]
        for name, block in rules.items():
            for axis, value in block.items():
                axes = value if isinstance(value, list) else [] if value is None else [value]
                problems += [
                    f"{name}.{axis}: {mesh_axis!r} is not a valid mesh axis name"
                    for mesh_axis in axes
                    if not mesh_axis.strip()
                ]
        if problems:
            raise ValueError("\n".join(problems))

    def hbm_bytes(self, device_bytes: int | None) -> int | None:
        """The memory that replication is judged by: `hbm_gib`, else the device's own (None on CPU: not judged).

        >>> MeshConfig(hbm_gib=16.0).hbm_bytes(None) == 16 * 2**30
        True
        """
        return device_bytes if self.hbm_gib is None else int(self.hbm_gib * 2**30)


@dataclass(frozen=True, kw_only=True)
class ModelAxes:
    """The logical axes of a model, and the names that users may write for them.

    Attributes:
        sizes: every logical axis of its parameters and activations → size.
        known: every axis name of the glossary.
        aliases: other spellings → the name in the glossary.
    """

    sizes: Mapping[str, int]
    known: Collection[str] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        leaves: "Iterable[Leaf]",
        *,
        known: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
        **activations: int,
    ) -> "ModelAxes":
        """The axes of a model's leaves, and of its activations by keyword.

        >>> import numpy as np
        >>> from haliax_ext.abstract import Leaf
        >>> ModelAxes.of([Leaf("w", (("embed", 8), ("mlp", 32)), np.dtype("f4"))], position=16).sizes
        {'embed': 8, 'mlp': 32, 'position': 16}
        """
        # Axes without names (`_0`, `_1`) cannot be mapped.
        sizes = {name: size for leaf in leaves for name, size in leaf.axes if not name.startswith("_")}
        return cls(sizes={**sizes, **activations}, known=known, aliases=aliases or {})
