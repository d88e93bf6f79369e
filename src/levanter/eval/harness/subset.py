"""How much tasks ask, by their documents: all of them, or the first ones of each task."""

from collections.abc import Callable, Sequence

from lm_eval.api.instance import Instance

from levanter.data.chat import ChatTemplate
from levanter.eval.harness.batch_shapes import Room, fitted
from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.counting import Counted
from levanter.eval.harness.encoding import HarnessError, Query, QueryEncoder
from levanter.eval.harness.lm import HarnessLM, continuations, pairs_of
from levanter.eval.harness.packing import RowShape
from levanter.eval.harness.request_table import Table
from levanter.eval.harness.tasks import FEWSHOT_SEED, LmTask, LoadedTasks, quiet, said_of_a_task, seed_everything

LOOKED_AT = 128
"""Documents of a task that are looked at."""


def count(
    tasks: LoadedTasks,
    config: HarnessConfig,
    encoder: QueryEncoder,
    template: ChatTemplate | None,
    shapes: Sequence[RowShape],
    cost: Callable[[RowShape], float],
    room: Room | None = None,
) -> Counted:
    """How often each Program will run.

    Args:
        tasks: what is asked.
        config: how.
        encoder: makes tokens of texts.
        template: writes conversations; None where there is none.
        shapes: of the rows.
        cost: of a batch.
        room: what rows may be, if they are to suit the requests where all are known; None for the shapes given.

    Raises:
        HarnessError: a request cannot be answered.
    """
    model = HarnessLM(
        encoder=encoder, scorer=None, template=template, generation={}, stops={}, watch=lambda *_: lambda _: None
    )
    documents = tasks.documents(config.max_examples)
    exact, requests = True, 0
    kinds: dict[str, list[Query]] = {"loglikelihood": [], "loglikelihood_rolling": []}
    sampled: list[tuple[list[Query], float]] = []
    for name, task in tasks.tasks.items():
        there = documents[name]
        looked = min(there, LOOKED_AT)
        instances = _instances(task, looked, config, model)
        asked = _questions(instances, encoder)
        # What cannot be written is said before a weight is read.
        texts = [each for each in instances if each.request_type == "generate_until"]
        continuations(texts, encoder, config.generation_kwargs, tasks.stops)
        requests += len(instances) * there // max(looked, 1)
        if looked < there:
            exact = False
            sampled.append((asked, there / looked))
        else:
            rolling = bool(instances) and instances[0].request_type == "loglikelihood_rolling"
            kinds["loglikelihood_rolling" if rolling else "loglikelihood"] += asked
    shapes = fitted(list(kinds.values()), shapes, cost, room) if exact and room is not None else tuple(shapes)
    rows: dict[RowShape, float] = {}
    for asked, times in sampled:
        for packed in Table.of(asked, shapes, cost).packed if asked else ():
            rows[packed.shape] = rows.get(packed.shape, 0) + len(packed.rows) * times
    executions = {shape.name: -(-int(count) // shape.rows) for shape, count in rows.items()}
    for asked in kinds.values():
        for name, times in (Table.of(asked, shapes, cost).executions if asked else {}).items():
            executions[name] = executions.get(name, 0) + times
    return Counted(executions=executions, requests=requests, exact=exact, shapes=tuple(shapes))


def _instances(task: LmTask, limit: int, config: HarnessConfig, model: HarnessLM) -> list[Instance]:
    """The requests of a task's first documents."""
    seed_everything()
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    try:
        with quiet():
            task.build_all_requests(
                limit=limit,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.fewshot_as_multiturn and config.apply_chat_template,
                chat_template=model.apply_chat_template if config.apply_chat_template else None,
                tokenizer_name=model.tokenizer_name,
            )
    except Exception as error:
        if (told := said_of_a_task(error)) is None:
            raise
        raise HarnessError(told) from error
    return list(task.instances)


def _questions(instances: list[Instance], encoder: QueryEncoder) -> list[Query]:
    scored = [each for each in instances if each.request_type == "loglikelihood"]
    names = [f"{each.task_name}, document {each.doc_id}" for each in scored]
    windows = [each.args[0] for each in instances if each.request_type == "loglikelihood_rolling"]
    return [
        *encoder.questions(pairs_of(scored), names),
        *(q for text in windows for q in encoder.windows(text)),
    ]
