"""Loads a model and starts its engine: shared by `generate`, its terminal and `inference_repl`."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from jax.sharding import Mesh

from haliax_ext.abstract import with_arrays
from haliax_ext.load_progress import LoadReport
from levanter.commands.generate.plan import GenerateWork
from levanter.commands.model.pretrained import load_pretrained
from levanter.commands.model.text_generator import process_engine
from levanter.distributed.compile_barrier import jit_together
from levanter.inference.engine import DeviceRunner, Engine
from levanter.inference.programs import PromptScorer, ScorePromptFn
from levanter.inference.prompts import PromptReader
from levanter.inference.scheduler import Schedule


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
    engine = process_engine(rows, schedule, constraints=reader.constraints, scorer=scorer, following=following)
    with engine as started:
        yield LoadedEngine(loading=loaded.report, engine=started.engine, score=started.score)
