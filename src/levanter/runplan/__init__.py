"""The contract between commands, the command line and preflight: `EntryPoint`, `RunPlan`, `Target`, `Session`.

A run is a value before it is an action: `config → describe(config, target) → RunPlan → execute(run_plan, mesh)`. A
`Target` describes devices without holding one: those of this machine, or a pod that the user names. The plan has the
checks that need no device, the sharding of every parameter, the bytes that each host reads, and the Programs in the
order in which they run. `execute` may run nothing that is not in the plan, and preflight compiles exactly these
Programs. The entry points are in `commands/`; `commands.cli` turns one of them into a process.
"""

from levanter.base.exit_codes import BAD_INPUT as BAD_INPUT
from levanter.base.exit_codes import COMPILER_CRASH as COMPILER_CRASH
from levanter.base.exit_codes import DOES_NOT_FIT as DOES_NOT_FIT
from levanter.base.exit_codes import INTERNAL_ERROR as INTERNAL_ERROR
from levanter.base.exit_codes import INTERRUPTED as INTERRUPTED
from levanter.base.exit_codes import NOT_DECIDED as NOT_DECIDED
from levanter.base.exit_codes import OK as OK
from levanter.base.exit_codes import PEER_LOST as PEER_LOST
from levanter.base.exit_codes import PREEMPTED as PREEMPTED
from levanter.base.exit_codes import DoesNotFitError as DoesNotFitError
from levanter.config.plan_options import PlanOptions as PlanOptions
from levanter.io import Output as Output
from levanter.runplan.entry_point import Describe as Describe
from levanter.runplan.entry_point import EntryPoint as EntryPoint
from levanter.runplan.run_plan import Check as Check
from levanter.runplan.run_plan import NonFiniteResultError as NonFiniteResultError
from levanter.runplan.run_plan import RunPlan as RunPlan
from levanter.runplan.run_plan import RunRefused as RunRefused
from levanter.runplan.run_plan import Searchable as Searchable
from levanter.runplan.run_plan import TrainingJob as TrainingJob
from levanter.runplan.run_plan import Workload as Workload
from levanter.runplan.session import Recorder as Recorder
from levanter.runplan.session import Session as Session
from levanter.runplan.target import Target as Target
