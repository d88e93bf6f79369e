"""Which tasks a run asks: process 0 loads them, with lm_eval; the others hear of it and describe the same run."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from levanter.data.chat import ChatTemplate
from levanter.distributed.barrier import ONE_FOR_ALL_SECONDS, agreed, current_peers, is_process_0
from levanter.eval.harness.batch_shapes import Room
from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.counting import Counted
from levanter.eval.harness.encoding import HarnessError, QueryEncoder
from levanter.eval.harness.packing import RowShape
from levanter.eval.harness.tasks import AbsentTaskError, LoadedTasks, load_tasks
from levanter.runplan import Check


@dataclass(frozen=True, kw_only=True)
class FoundTasks:
    """What is known of the tasks on every process.

    Attributes:
        kinds: of requests.
        documents: of each task; empty where they are not known.
        error: what is wrong with them; None for nothing.
        absent: whether that is only because something is not available here.
        loaded: the tasks themselves, on process 0.
    """

    kinds: frozenset[str] = frozenset()
    documents: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str | None = None
    absent: bool = False
    loaded: LoadedTasks | None = field(default=None, compare=False, repr=False)

    @property
    def writes(self) -> bool:
        """Whether texts are to be written."""
        return "generate_until" in self.kinds

    @property
    def check(self) -> Check:
        """What was found."""
        if self.error is not None:
            error = (AbsentTaskError if self.absent else HarnessError)(self.error)
            return Check(name="tasks", status="unchecked" if self.absent else "error", message=self.error, error=error)
        listed = ", ".join(f"{name} ({count:,} documents)" for name, count in self.documents.items())
        return Check(name="tasks", status="ok", message=listed)


def find_tasks(config: HarnessConfig, include_path: Sequence[str]) -> FoundTasks:
    """The tasks of a run: process 0 loads them, the others hear of it.

    Args:
        config: which.
        include_path: folders of tasks beside lm_eval's own.
    """
    loaded = None
    told: dict[str, object] = {}
    if is_process_0():
        try:
            loaded = load_tasks(config, include_path)
            told = {"kinds": sorted(loaded.kinds), "documents": loaded.documents(config.max_examples)}
        except HarnessError as error:
            told = {"error": str(error), "absent": isinstance(error, AbsentTaskError)}
    heard = json.loads(from_process_0("the tasks", json.dumps(told)))
    return FoundTasks(**{**heard, "kinds": frozenset(heard.get("kinds", ()))}, loaded=loaded)


def count_requests(
    tasks: FoundTasks,
    config: HarnessConfig,
    encoder: QueryEncoder | None,
    template: ChatTemplate | None,
    shapes: Sequence[RowShape],
    cost: Callable[[RowShape], float],
    room: Room | None = None,
) -> tuple[Counted | None, Check | None]:
    """How often Programs run, by the documents; None where these, or a tokenizer, are not there.

    Args:
        tasks: what is asked.
        config: how.
        encoder: makes tokens of texts; None where there is no tokenizer.
        template: writes conversations; None where there is none.
        shapes: of the rows.
        cost: of a batch.
        room: what rows may be, if they are to suit the requests where all are known; None for the shapes given.

    Returns:
        What was counted, in which shapes, and what is wrong with a request; None for nothing.
    """
    told: dict[str, object] = {}
    if tasks.loaded is not None and encoder is not None:
        from levanter.eval.harness.subset import count

        try:
            told = count(tasks.loaded, config, encoder, template, shapes, cost, room).message()
        except ValueError as error:
            told = {"error": str(error)}
    heard = json.loads(from_process_0("the requests", json.dumps(told)))
    if "error" in heard:
        error = HarnessError(heard["error"])
        return None, Check(name="requests", status="error", message=str(error), error=error)
    return (Counted.of_message(heard) if heard else None), None


def from_process_0(name: str, value: str) -> str:
    """Process 0's value, which may take its time: it reads documents."""
    peers = current_peers()
    return agreed(name, value) if peers is None else peers.meet(name, value=value, seconds=ONE_FOR_ALL_SECONDS)[0]
