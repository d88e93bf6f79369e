"""Preflight: will it load, will it fit, how fast, and why; before the first chip is rented.

`preflight` asks one run on one target in five stages and answers with a `Verdict`: what the plan says (`budget`,
`load_budget`), what the compiler says, how long it would take, and why not (`why_not`). `aot` compiles a run's own
Programs for devices that are not there, in a process of its own (`worker`); `comms` knows how long a collective takes
on a pod's wires, `cost` turns a compiled program's figures into a step time. Nothing here holds a device, and every
time is modelled, not measured.
"""

from levanter.plan.aot import CompileCrash as CompileCrash
from levanter.plan.aot import Compiled as Compiled
from levanter.plan.aot import LibtpuMissing as LibtpuMissing
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
