"""What a plan says of layers that differ: each kind and place of them is code of its own for the compiler."""

from levanter.models.registry import LmConfig
from levanter.run import Check

MANY_BODIES = 24
"""From more compiled layers than this, compiling takes minutes more than it need."""


def layer_checks(model: LmConfig) -> tuple[Check, ...]:
    """How many layers are compiled, each by itself; nothing is said where all are alike and scanned."""
    if model.bodies == 1:
        return ()
    status = "note" if model.bodies > MANY_BODIES else "ok"
    return (Check(name="layers", status=status, message=f"{model.stacking}: {model.bodies} are compiled"),)
