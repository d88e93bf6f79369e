"""The model on its devices, ready to be asked: what `generate`, its terminal and `inference_repl` share of a run."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.model.pretrained import load_pretrained
from levanter.distributed.barrier import current_peers
from levanter.distributed.compile_barrier import jit_together
from levanter.inference.engine import DeviceRunner, Engine
from levanter.inference.multihost import LeaderRunner, run_follower
from levanter.inference.programs import PromptScorer, ScorePromptFn
from levanter.inference.prompts import PromptReader
from levanter.inference.scheduler import Schedule

WAIT_SECONDS = 30 * 24 * 3600.0
"""How long a process waits for process 0 to call something: nobody may be asking. A process that is lost is noticed
otherwise."""
_CALLS = "the next call"


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEngine:
    """What answers requests.

    Attributes:
        loading: how loading went.
        engine: the engine, on process 0; the others have called what it called, and nothing is left to do.
        score: scores prompts; None where the plan has no Programs for that.
    """

    loading: LoadReport
    engine: Engine | None
    score: ScorePromptFn | None


@contextmanager
def running(
    work: GenerateWork,
    mesh: Mesh,
    *,
    schedule: Schedule,
    reader: PromptReader,
    show: bool,
    following: AbstractContextManager[object] | None = None,
) -> Iterator[LoadedEngine]:
    """Loads the model and gives what answers requests; on other processes than the first, when all are answered.

    Args:
        work: the run's.
        mesh: the devices.
        schedule: of the rows.
        reader: of the requests, for what texts have to conform to.
        show: whether progress is shown.
        following: surrounds what other processes than the first call.
    """
    loaded = load_pretrained(work.pretrained, mesh, show=show)
    model = with_arrays(work.pretrained.abstract, loaded.arrays)
    rows = DeviceRunner(work.programs, mesh, model, jit=jit_together)
    scorer = PromptScorer(work.programs.score, mesh, model, jit=jit_together) if work.programs.score else None
    peers = current_peers()
    if peers is None:
        engine = Engine(rows, schedule, constraints=reader.constraints)
        yield LoadedEngine(loading=loaded.report, engine=engine, score=scorer)
    elif peers.process == 0:
        leading = LeaderRunner(rows, lambda text: peers.follow(_CALLS, lambda: text), scorer)
        engine = Engine(leading, schedule, constraints=reader.constraints)
        yield LoadedEngine(loading=loaded.report, engine=engine, score=leading.score if scorer else None)
        leading.end()
    else:
        with following or nullcontext():
            run_follower(rows, lambda: peers.follow(_CALLS, lambda: "", seconds=WAIT_SECONDS), scorer)
        yield LoadedEngine(loading=loaded.report, engine=None, score=None)
