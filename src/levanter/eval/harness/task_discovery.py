"""The tasks of a run and the number of their requests: process 0 determines them with lm_eval, all processes agree."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from levanter.data.chat import ChatTemplate
from levanter.distributed.agreement import ONE_FOR_ALL_SECONDS, agreed, current_peers, is_process_0
from levanter.eval.harness.batch_shapes import RowLimits, fit_shapes
from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.encoding import HarnessError, Query, QueryEncoder
from levanter.eval.harness.packing import RowShape
from levanter.eval.harness.request_table import RequestCount, Table
from levanter.eval.harness.tasks import (
    FEWSHOT_SEED,
    TASK_FAILURES,
    LmTask,
    LoadedTasks,
    UnavailableTaskError,
    load_tasks,
    seed_everything,
    task_code,
    task_error_message,
)
from levanter.runplan import Check

if TYPE_CHECKING:
    from levanter.eval.harness.lm import HarnessLM

SAMPLED_DOCUMENTS = 128
"""Maximum number of documents of a task that are read to count requests."""


@dataclass(frozen=True, kw_only=True)
class DiscoveredTasks:
    """The tasks as they are known on every process.

    Attributes:
        kinds: kinds of requests.
        documents: task → number of documents; empty if they are not known.
        error: why the tasks cannot be evaluated; None for no error.
        unavailable: whether the reason is only that something is not available on this machine.
        loaded: the tasks themselves, on process 0.
    """

    kinds: frozenset[str] = frozenset()
    documents: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str | None = None
    unavailable: bool = False
    loaded: LoadedTasks | None = field(default=None, compare=False, repr=False)

    @property
    def generates(self) -> bool:
        """Whether a task requests generated text."""
        return "generate_until" in self.kinds

    @property
    def check(self) -> Check:
        """The result as a check of the plan."""
        if self.error is not None:
            error = (UnavailableTaskError if self.unavailable else HarnessError)(self.error)
            return Check(
                name="tasks", status="unchecked" if self.unavailable else "error", message=self.error, error=error
            )
        listed = ", ".join(f"{name} ({count:,} documents)" for name, count in self.documents.items())
        return Check(name="tasks", status="ok", message=listed)


def discover_tasks(config: HarnessConfig, include_path: Sequence[str]) -> DiscoveredTasks:
    """Loads the tasks on process 0 and describes them on all processes.

    Args:
        config: the tasks.
        include_path: folders with tasks in addition to lm_eval's.
    """
    loaded = None
    message: dict[str, object] = {}
    # Loading reads data sets and takes minutes: it happens once for all processes.
    if is_process_0():
        try:
            loaded = load_tasks(config, include_path)
            message = {"kinds": sorted(loaded.kinds), "documents": loaded.documents(config.max_examples)}
        except HarnessError as error:
            # Sent instead of raised, so that all processes refuse the run with the same message.
            message = {"error": str(error), "unavailable": isinstance(error, UnavailableTaskError)}
        except TASK_FAILURES as error:
            # The documents of a task may be read only where they are counted.
            if (reason := task_error_message(error)) is None:
                raise
            message = {"error": f"eval_harness.task_spec: {reason}"}
    received = json.loads(from_process_0("the tasks", json.dumps(message)))
    return DiscoveredTasks(**{**received, "kinds": frozenset(received.get("kinds", ()))}, loaded=loaded)


def count_requests(
    tasks: DiscoveredTasks,
    config: HarnessConfig,
    encoder: QueryEncoder | None,
    template: ChatTemplate | None,
    shapes: Sequence[RowShape],
    cost: Callable[[RowShape], float],
    limits: RowLimits | None = None,
) -> tuple[RequestCount | None, Check | None]:
    """The number of executions of each Program; None if the documents or a tokenizer are not available.

    Args:
        tasks: the tasks.
        config: how requests are built.
        encoder: texts to tokens; None if there is no tokenizer.
        template: renders conversations; None if the tokenizer has no chat template.
        shapes: shapes of the rows.
        cost: cost of a batch.
        limits: limits within which rows are fitted to the requests if all are known; None to keep the shapes.

    Returns:
        The count, and a check with the error of a request; None for no error.
    """
    message: dict[str, object] = {}
    if tasks.loaded is not None and encoder is not None:
        try:
            message = count_documents(tasks.loaded, config, encoder, template, shapes, cost, limits).message()
        # As above: an invalid request is an error of all processes.
        except ValueError as error:
            message = {"error": str(error)}
    received = json.loads(from_process_0("the requests", json.dumps(message)))
    if "error" in received:
        error = HarnessError(received["error"])
        return None, Check(name="requests", status="error", message=str(error), error=error)
    return (RequestCount.from_message(received) if received else None), None


def from_process_0(name: str, value: str) -> str:
    """Process 0's value on all processes; waits as long as it takes to read documents."""
    peers = current_peers()
    return agreed(name, value) if peers is None else peers.meet(name, value=value, seconds=ONE_FOR_ALL_SECONDS)[0]


def count_documents(
    tasks: LoadedTasks,
    config: HarnessConfig,
    encoder: QueryEncoder,
    template: ChatTemplate | None,
    shapes: Sequence[RowShape],
    cost: Callable[[RowShape], float],
    limits: RowLimits | None = None,
) -> RequestCount:
    """The number of executions of each Program, counted from the tasks' documents or from a sample of them.

    Args:
        tasks: the tasks.
        config: how requests are built.
        encoder: texts to tokens.
        template: renders conversations; None if the tokenizer has no chat template.
        shapes: shapes of the rows.
        cost: cost of a batch.
        limits: limits within which rows are fitted to the requests where all are known; None to keep the shapes.

    Raises:
        HarnessError: a request is invalid.
    """
    # Only process 0 counts, and only it may import lm_eval.
    from levanter.eval.harness.lm import HarnessLM, continuations

    # It only encodes and renders: without a scorer it cannot execute a request.
    model = HarnessLM(
        encoder=encoder, scorer=None, template=template, generation={}, stops={}, watch=lambda *_: lambda _: None
    )
    documents = tasks.documents(config.max_examples)
    exact, requests = True, 0
    kinds: dict[str, list[Query]] = {"loglikelihood": [], "loglikelihood_rolling": []}
    sampled: list[tuple[list[Query], float]] = []
    for name, task in tasks.tasks.items():
        num_documents = documents[name]
        num_read = min(num_documents, SAMPLED_DOCUMENTS)
        instances = _instances(task, num_read, config, model)
        queries = _queries(instances, encoder)
        # Only validates generation keys, so that errors are reported before weights are read.
        texts = [instance for instance in instances if instance.request_type == "generate_until"]
        continuations(texts, encoder, config.generation_kwargs, tasks.stops)
        requests += len(instances) * num_documents // max(num_read, 1)
        if num_read < num_documents:
            # Executions are extrapolated from the sample, task by task.
            exact = False
            sampled.append((queries, num_documents / num_read))
        else:
            # lm_eval passes requests of one kind at once, so those of one kind are one table over all tasks.
            rolling = bool(instances) and instances[0].request_type == "loglikelihood_rolling"
            kinds["loglikelihood_rolling" if rolling else "loglikelihood"] += queries
    shapes = fit_shapes(list(kinds.values()), shapes, cost, limits) if exact and limits is not None else tuple(shapes)
    rows: dict[RowShape, float] = {}
    for queries, factor in sampled:
        for packed in Table.from_queries(queries, shapes, cost).packed if queries else ():
            rows[packed.shape] = rows.get(packed.shape, 0) + len(packed.rows) * factor
    executions = {shape.name: -(-int(count) // shape.rows) for shape, count in rows.items()}
    for queries in kinds.values():
        for name, factor in (Table.from_queries(queries, shapes, cost).executions if queries else {}).items():
            executions[name] = executions.get(name, 0) + factor
    return RequestCount(executions=executions, requests=requests, exact=exact, shapes=tuple(shapes))


def _instances(task: LmTask, limit: int, config: HarnessConfig, model: "HarnessLM") -> list[Any]:
    """The requests of a task's first documents."""
    seed_everything()
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with task_code():
            task.build_all_requests(
                limit=limit,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.fewshot_as_multiturn and config.apply_chat_template,
                chat_template=model.apply_chat_template if config.apply_chat_template else None,
                tokenizer_name=model.tokenizer_name,
            )
    except TASK_FAILURES as error:
        if (message := task_error_message(error)) is None:
            raise
        raise HarnessError(message) from error
    return list(task.instances)


def _queries(instances: list[Any], encoder: QueryEncoder) -> list[Query]:
    from levanter.eval.harness.lm import context_pairs

    scored = [instance for instance in instances if instance.request_type == "loglikelihood"]
    names = [f"{instance.task_name}, document {instance.doc_id}" for instance in scored]
    windows = [instance.args[0] for instance in instances if instance.request_type == "loglikelihood_rolling"]
    return [
        *encoder.encode_pairs(context_pairs(scored), names),
        *(q for text in windows for q in encoder.rolling_windows(text)),
    ]
