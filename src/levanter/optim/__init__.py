"""Optimizers and learning-rate schedules; importing this package registers every `optimizer.type`."""

from levanter.optim.config import AdafactorConfig as AdafactorConfig
from levanter.optim.config import AdamConfig as AdamConfig
from levanter.optim.config import LionConfig as LionConfig
from levanter.optim.config import OptimizerConfig as OptimizerConfig
from levanter.optim.config import RmsPropConfig as RmsPropConfig
from levanter.optim.config import SgdConfig as SgdConfig
from levanter.optim.groups import GroupConfig as GroupConfig
from levanter.optim.muon import MomentumSchedule as MomentumSchedule
from levanter.optim.muon import MuonConfig as MuonConfig
from levanter.optim.schedules import LrSchedule as LrSchedule
from levanter.optim.schedules import Schedule as Schedule
from levanter.optim.schedules import build_schedule as build_schedule
from levanter.optim.skip_steps import SkipStepConfig as SkipStepConfig
from levanter.optim.sophia import SophiaHConfig as SophiaHConfig
from levanter.optim.unsupported import register_absent
from levanter.optim.update_clipping import ClipUpdateNormConfig as ClipUpdateNormConfig

register_absent()  # what no optimizer above has taken
