"""The devices at hand as a `Target`, and the id of a run."""

import os
import secrets

from haliax_ext.loading import hosts_of
from levanter.mesh import DeviceSet
from levanter.run import Target
from levanter.trainer.config import TrainerConfig


def local_target(found: DeviceSet) -> Target:
    """The devices that are here, described."""
    return Target(
        name="local",
        platform=found.platform,
        kind=found.kind,
        devices=len(found.devices),
        granules=found.granules,
        hosts=found.hosts,
        hbm_bytes=found.hbm_bytes,
        hosts_on=lambda spec: hosts_of(spec.build(found.devices)),
    )


def run_id(trainer: TrainerConfig) -> str:
    """The run's id: the config's, `$RUN_ID`, or eight random characters."""
    return trainer.id or os.environ.get("RUN_ID") or secrets.token_hex(4)
