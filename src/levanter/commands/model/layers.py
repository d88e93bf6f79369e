"""What a plan reports about layers: unlike ones, which are compiled separately, and positions cut for their kernel."""

from haliax_ext.errors import IndivisibleError
from levanter.layers.attention.splash import LANES
from levanter.mesh import ResolvedMesh
from levanter.mesh.context_parallel import num_runs
from levanter.models.registry import LmConfig
from levanter.runplan import Check

MANY_BODIES = 24
"""With more compiled layers than this, compilation takes minutes longer than necessary."""


def layer_checks(model: LmConfig, resolved: ResolvedMesh, *, positions: int) -> tuple[Check, ...]:
    """Those of `body_checks` and of `exchange_checks`."""
    return (*body_checks(model), *exchange_checks(model, resolved, positions=positions))


def body_checks(model: LmConfig) -> tuple[Check, ...]:
    """How many layers are compiled separately; empty if all are alike and scanned."""
    if model.bodies == 1:
        return ()
    status = "note" if model.bodies > MANY_BODIES else "ok"
    return (Check(name="layers", status=status, message=f"{model.stacking}: {model.bodies} are compiled"),)


def exchange_checks(model: LmConfig, resolved: ResolvedMesh, *, positions: int) -> tuple[Check, ...]:
    """What the kernel for TPUs makes of positions that are cut; empty where they are not, or where it does not run.

    Args:
        model: with the choices for its platform made.
        resolved: mesh and mappings.
        positions: tokens in a sequence.

    Raises:
        IndivisibleError: in a ring, runs of consecutive positions that are no whole blocks.
    """
    ways, method = resolved.query_ways, resolved.method
    if method in (None, "heads") or ways == 1 or getattr(model, "attn_backend", None) != "splash":
        return ()
    part = positions // ways
    if method == "gather":
        padded = -(-part // LANES) * LANES
        text = f"a device has {part} positions of a sequence, and the kernel computes {padded}: its blocks "
        return (Check(name="kernels", status="note", message=f"{text}are {LANES} at least"),) if part < LANES else ()
    runs = num_runs(ways, "zigzag" if resolved.mappings.zigzag else "natural")
    if positions % (runs * LANES) == 0:
        return ()
    unit, run = runs * LANES, positions // runs
    near = [n for n in (positions // unit * unit, -(-positions // unit) * unit) if n]
    raise IndivisibleError(
        f"trainer.mesh: attention_mapping: in a ring of {ways} devices {positions} positions are {runs} runs of {run}, "
        f"and the kernel for TPUs takes runs of whole blocks of {LANES}",
        suggestion=f"make it {' or '.join(map(str, near))} positions, use fewer devices in the ring, "
        "attention_mapping: gather, or model.attn_backend: blockwise",
    )
