"""Preflight: will it load, will it fit, how fast, and why; before the first chip is rented.

`preflight` checks one run on one target in five stages and returns a `Verdict`: the bytes of the plan (`hbm_budget`,
`load_budget`), the compiler's figures, the step time, and the reason of a refusal (`oom_report`). `aot` compiles a
run's own Programs for devices that are absent, in a process of its own (`compile_worker`); `comms` models the duration
of a collective on a pod's links, and `step_time_model` turns the figures of a compiled program into a step time.
Nothing here holds a device, and every time is modelled, not measured.

A real run imports `local_hbm_check` only; the names below are imported when they are first used.
"""

from typing import TYPE_CHECKING

from haliax_ext.lazy_imports import export_on_demand

if TYPE_CHECKING:
    from levanter.plan.aot import CompileCrash as CompileCrash
    from levanter.plan.aot import Compiled as Compiled
    from levanter.plan.aot import CompilerMissing as CompilerMissing
    from levanter.plan.aot import Refused as Refused
    from levanter.plan.aot import WorkerBadInput as WorkerBadInput
    from levanter.plan.aot import compile_programs as compile_programs
    from levanter.plan.comms import Network as Network
    from levanter.plan.preflight.state import Question as Question
    from levanter.plan.step_time_model import StepTime as StepTime
    from levanter.plan.step_time_model import mfu as mfu
    from levanter.plan.step_time_model import step_time as step_time
    from levanter.plan.target_from_name import device_target as device_target
    from levanter.plan.target_from_name import pod_target as pod_target
    from levanter.plan.verdict import ProgramVerdict as ProgramVerdict
    from levanter.plan.verdict import Stage as Stage
    from levanter.plan.verdict import Verdict as Verdict

export_on_demand(__name__)
