"""Checks of a plan on layers: how many are compiled separately, and whether sharded positions suit the kernel."""

from haliax_ext.errors import IndivisibleError
from levanter.layers.attention.splash_blocks import LANES
from levanter.mesh import ResolvedMesh
from levanter.mesh.context_parallel import num_runs
from levanter.models.registry import LmConfig
from levanter.runplan import Check

MANY_BODIES = 24
"""With more separately compiled layers than this, compilation takes minutes longer than necessary."""


def layer_checks(model: LmConfig, resolved: ResolvedMesh, *, positions: int) -> tuple[Check, ...]:
    """The checks of `body_checks` and of `splash_position_checks`."""
    return (*body_checks(model), *splash_position_checks(model, resolved, positions=positions))


def body_checks(model: LmConfig) -> tuple[Check, ...]:
    """Reports how many layers are compiled separately; empty if all are alike and scanned."""
    if model.bodies == 1:
        return ()
    status = "note" if model.bodies > MANY_BODIES else "ok"
    return (Check(name="layers", status=status, message=f"{model.stacking}: {model.bodies} are compiled"),)


def splash_position_checks(model: LmConfig, resolved: ResolvedMesh, *, positions: int) -> tuple[Check, ...]:
    """Checks sharded positions against the block size of the TPU kernel; empty if the kernel is not used.

    Args:
        model: the architecture, resolved for its platform.
        resolved: mesh and mappings.
        positions: tokens in a sequence.

    Raises:
        IndivisibleError: in ring attention, a run of consecutive positions that is no multiple of a block.
    """
    ways, method = resolved.query_ways, resolved.method
    if method in (None, "heads") or ways == 1 or getattr(model, "attn_backend", None) != "splash":
        return ()
    # Positions of a sequence on one device.
    shard_length = positions // ways
    if method == "gather":
        # `gather`: every device attends with its own queries, whose block may be smaller than a lane tile.
        padded = -(-shard_length // LANES) * LANES
        text = f"a device has {shard_length} positions of a sequence, and the kernel pads them to {padded}: its blocks "
        return (
            (Check(name="kernels", status="note", message=f"{text}are {LANES} at least"),)
            if shard_length < LANES
            else ()
        )
    # In zigzag order a device has an early and a late run of positions, so there are two runs for each device.
    runs = num_runs(ways, "zigzag" if resolved.mappings.zigzag else "natural")
    if positions % (runs * LANES) == 0:
        return ()
    # The nearest lengths below and above that are whole blocks on every run.
    unit, run = runs * LANES, positions // runs
    near = [n for n in (positions // unit * unit, -(-positions // unit) * unit) if n]
    raise IndivisibleError(
        f"trainer.mesh: attention_mapping: in a ring of {ways} devices {positions} positions are {runs} runs of {run}, "
        f"and the kernel for TPUs takes runs of whole blocks of {LANES}",
        suggestion=f"make it {' or '.join(map(str, near))} positions, use fewer devices in the ring, "
        "attention_mapping: gather, or model.attn_backend: blockwise",
    )
