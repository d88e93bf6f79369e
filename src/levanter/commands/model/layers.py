"""What a plan reports about unlike layers: each kind and place of them is compiled separately."""

from levanter.models.registry import LmConfig
from levanter.run import Check

MANY_BODIES = 24
"""With more compiled layers than this, compilation takes minutes longer than necessary."""


def layer_checks(model: LmConfig) -> tuple[Check, ...]:
    """How many layers are compiled separately; empty if all are alike and scanned."""
    if model.bodies == 1:
        return ()
    status = "note" if model.bodies > MANY_BODIES else "ok"
    return (Check(name="layers", status=status, message=f"{model.stacking}: {model.bodies} are compiled"),)
