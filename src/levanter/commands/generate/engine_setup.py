"""Loads a model and starts its engine: shared by `generate`, its terminal and `inference_repl`."""

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
"""How long a process waits for the next call of process 0: an idle terminal sends none. Lost processes are detected
separately."""
_CALLS = "the next call"


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedEngine:
    """A loaded model and its engine.

    Attributes:
        loading: how loading went.
        engine: the engine on process 0; None on the others, which have executed all its calls by then.
        score: scores prompts; None if the plan has no Programs for it.
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
    """Loads the model and yields its engine; other processes follow process 0 first, and yield when it has finished.

    Args:
        work: the run's.
        mesh: the devices.
        schedule: of the rows.
        reader: of the requests; has the grammars of constrained texts.
        show: whether progress is shown.
        following: a context around the calls of other processes.
    """
    loaded = load_pretrained(work.pretrained, mesh, show=show)
    model = with_arrays(work.pretrained.abstract, loaded.arrays)
    rows = DeviceRunner(work.programs, mesh, model, jit=jit_together)
    scorer = PromptScorer(work.programs.score, mesh, model, jit=jit_together) if work.programs.score else None
    peers = current_peers()
    # A single process: calls go to the devices directly.
    if peers is None:
        engine = Engine(rows, schedule, constraints=reader.constraints)
        yield LoadedEngine(loading=loaded.report, engine=engine, score=scorer)
    elif peers.process == 0:
        # Each call of process 0 is broadcast as text before it runs, so that all processes execute the same Programs in
        # order.
        leading = LeaderRunner(rows, lambda text: peers.follow(_CALLS, lambda: text), scorer)
        engine = Engine(leading, schedule, constraints=reader.constraints)
        yield LoadedEngine(loading=loaded.report, engine=engine, score=leading.score if scorer else None)
        # Releases the followers; without it they would wait for another call.
        leading.end()
    else:
        # Returns when process 0 has ended; only then is the body of the `with` statement executed here.
        with following or nullcontext():
            run_follower(rows, lambda: peers.follow(_CALLS, lambda: "", seconds=WAIT_SECONDS), scorer)
        yield LoadedEngine(loading=loaded.report, engine=None, score=None)
