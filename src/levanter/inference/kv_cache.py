"""`CachePlan`: the pages, the sharding and the bytes of a model's decode state, computed before there is a device.

*Fixed*: every row owns one page of its maximum length; nothing is gathered and nothing shared. *Paged*: rows take short
pages from a pool as they grow, and a table lists the pages of each row. Rows are sharded like the batch, and every
shard has its own pool: tables number the pages within a shard.

Pages hold the leaves that grow with the text (`layers.decode_state`), keys and values. Leaves of a fixed size for each
row are allocated with the rows. Rows that begin alike share pages; in a model with leaves of a fixed size, up to the
last snapshot of those (`inference.row_leaves`), since such a leaf cannot be taken back to an earlier position. The
number of snapshots is planned.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from haliax_ext.abstract import abstract, leaves
from haliax_ext.mapping import Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import ShardingPlan, plan_sharding
from levanter.inference.config import Allocation
from levanter.inference.row_leaves import SNAPSHOT, with_snapshots
from levanter.layers.decode_state import EARLIER, TOKEN_IDS, DecodeState, StateSizes, kind_of_axes
from levanter.models.base import Decodes

KIND_NAMES: Mapping[str, str] = {
    "paged": "cache",
    "slot": "state of fixed size",
    "token_ids": "ids of earlier tokens",
    SNAPSHOT: "snapshots",
}
"""The kinds of decode state as reports name them."""
PAGE_SIZE = 128
"""Positions in a page of a paged cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CachePlan:
    """The planned decode state of a run.

    Attributes:
        rows: rows that can run at once, over all shards.
        max_seq_len: positions that a row may have.
        allocation: whether a row owns one page or takes pages as it grows.
        page_size: positions in a page.
        pages: pages over all shards.
        dtype: of keys and values.
        snapshots: snapshots of rows, over all shards; 0 for a model whose state is in pages.
        shards: shards of the rows and of the pages.
        abstract: the state with shapes instead of arrays.
        mappings: the mappings of the run, with rows (`batch`) and pages sharded like its batch.
        sharding: the sharding of the cache.
        repeated: number of devices that hold the same keys and values, because query heads are sharded over more
            devices than those.
    """

    rows: int
    max_seq_len: int
    allocation: Allocation
    page_size: int
    pages: int
    dtype: np.dtype
    snapshots: int
    shards: int
    abstract: DecodeState
    mappings: Mappings
    sharding: ShardingPlan
    repeated: int

    @property
    def pages_per_row(self) -> int:
        """Pages of a row of maximum length."""
        return -(-self.max_seq_len // self.page_size)

    @property
    def rows_per_shard(self) -> int:
        """Rows of a shard."""
        return self.rows // self.shards

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the whole state on a device."""
        return self.sharding.bytes_per_device

    @cached_property
    def bytes_by_kind(self) -> Mapping[str, int]:
        """Bytes on a device, of the kinds that the model has, and of `snapshot`s."""
        totals: dict[str, int] = {}
        for planned in self.sharding.leaves:
            names = planned.leaf.names
            kind = SNAPSHOT if SNAPSHOT in names else kind_of_axes(names)
            totals[kind] = totals.get(kind, 0) + planned.bytes_per_device
        return totals

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on each device that holds it."""
        # A device holds pages // shards pages.
        return self.bytes_by_kind.get("paged", 0) * self.shards // self.pages

    @property
    def slot_bytes(self) -> int:
        """Bytes of a row on each device that holds it, of whatever its length: all that is not in pages.

        With as many snapshots as there are for each row.
        """
        return (self.bytes_per_device - self.bytes_by_kind.get("paged", 0)) * self.shards // self.rows

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a row of maximum length on each device that holds it."""
        return self.page_bytes * self.pages_per_row + self.slot_bytes

    @property
    def shares_prefixes(self) -> bool:
        """Whether a row can begin with pages of another one: it also needs what is not in pages."""
        # The host knows token ids and passes them, so they hinder nothing.
        return self.allocation == "paged" and ("slot" not in self.bytes_by_kind or self.snapshots > 0)

    @property
    def earlier_token_ids(self) -> int:
        """How many ids before a token the model reads."""
        ids = self.abstract.get(TOKEN_IDS)
        return 0 if ids is None or ids[0] is None else ids[0].axis_size(EARLIER)

    def __str__(self) -> str:
        layout = (
            f"a page of {self.page_size:,} positions each"
            if self.allocation == "fixed"
            else f"{self.pages:,} pages of {self.page_size} positions"
        )
        shards = f" in {self.shards} shards" if self.shards > 1 else ""
        repetition = f"; each key and value is on {self.repeated} devices" if self.repeated > 1 else ""
        scale = next((x for x in self.abstract.get("scales", ()) if x is not None), None)
        scales = "" if scale is None else f" with a {np.dtype(scale.dtype).name} scale each"
        # Models of attention only have nothing beside the pages.
        fixed = f", {self.slot_bytes / 2**10:,.1f} KiB of them whatever its length" if self.slot_bytes else ""
        return (
            f"{self.rows} rows of {self.max_seq_len:,} positions{shards}, {self.allocation}: {layout}, "
            f"{self.dtype.name}{scales}, {self.bytes_per_row / 2**20:,.1f} MiB a row{fixed} and "
            f"{self.bytes_per_device / 2**30:,.3f} GiB a device{repetition}"
        )


def plan_cache(
    model: Decodes,
    mappings: Mappings,
    mesh: MeshSpec,
    *,
    batch_axis: str,
    rows: int,
    max_seq_len: int,
    dtype: np.dtype,
    allocation: Allocation = "fixed",
    page_size: int = PAGE_SIZE,
    pages: int | None = None,
    snapshots_per_row: int = 0,
    hbm_bytes: int | None = None,
) -> CachePlan:
    """Plans a cache.

    Args:
        model: with shapes instead of arrays.
        mappings: the mappings of the run.
        mesh: mesh axis names and sizes.
        batch_axis: the logical name of the batch axis.
        rows: rows that can run at once, over all shards.
        max_seq_len: positions that a row may have.
        dtype: dtype of keys and values; int8 for integers with scales.
        allocation: whether a row owns one page or takes pages as it grows.
        page_size: positions in a page of a paged cache.
        pages: pages of a paged cache, over all shards; None for as many as all rows need at full length.
        snapshots_per_row: snapshots, in proportion to the rows, of a paged model with leaves of a fixed size.
        hbm_bytes: memory of one device; without it replication is reported, never an error.

    Raises:
        ValueError: rows or pages are not a multiple of the batch's shards, no row of full length fits the pages, or the
            model has layers that cannot continue a text.
    """
    # Rows and pages are sharded like the batch: a row's pages are in its own shard.
    over = mappings.compute.mesh_axes(batch_axis)
    compute = mappings.compute.merged(dict.fromkeys(("batch", "page", SNAPSHOT), over or None))
    shards = mesh.ways(over)
    # A fixed cache is a paged one whose pages are as long as a row, so that each row needs one.
    slots = max_seq_len if allocation == "fixed" else page_size
    # Pages of a row at full length, rounded up.
    row_pages = -(-max_seq_len // slots)
    num_pages = rows if allocation == "fixed" else rows * row_pages if pages is None else pages
    problems = [
        f"{what} {count} is not a multiple of the {shards} shards of the batch; the nearest above is "
        f"{-(-count // shards) * shards}"
        for what, count in (("max_rows", rows), ("pages", num_pages))
        # With a fixed cache the number of pages is that of rows: one message is enough.
        if count % shards and (what == "max_rows" or allocation == "paged")
    ]
    # A row cannot use pages of other shards, so each shard alone must hold the longest row.
    if not problems and num_pages // shards < row_pages:
        problems.append(
            f"pages {num_pages}: a row of {max_seq_len} positions has {row_pages} pages of {slots}, and each of "
            f"{shards} shards would have {num_pages // shards}; at least {row_pages * shards} are needed"
        )
    if problems:
        raise ValueError("\n".join(problems))
    # Shapes only: no memory is allocated.
    sizes = StateSizes(rows=rows, pages=num_pages, page_size=slots, dtype=dtype)
    # Fixed pages are not shared, so nothing would load a snapshot.
    snapshots = rows * snapshots_per_row if allocation == "paged" else 0
    cache = abstract(lambda: with_snapshots(model.start(sizes), snapshots))
    has_snapshots = any(name.startswith(SNAPSHOT) for name in cache)
    # The cache is placed by the compute mapping, like the keys that are written into it, not like parameters; overrides
    # of the run name leaves of the model.
    sharding = plan_sharding(leaves(cache), replace(mappings, params=compute, overrides=()), mesh, hbm_bytes=hbm_bytes)
    return CachePlan(
        rows=rows,
        max_seq_len=max_seq_len,
        allocation=allocation,
        page_size=slots,
        pages=num_pages,
        dtype=dtype,
        snapshots=snapshots if has_snapshots else 0,
        shards=shards,
        abstract=cache,
        mappings=replace(mappings, compute=compute),
        sharding=sharding,
        # Query heads of one group share a key: sharding them over more devices copies the key to each.
        repeated=mesh.ways(compute.mesh_axes("q_heads_per_group")),
    )
