"""All tasks asked of a model by lm_eval, on process 0, with a line of how far it is."""

import platform
from collections.abc import Callable, Mapping
from typing import Any

import jax

from levanter.data.chat import ChatTemplate
from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.encoding import QueryEncoder
from levanter.eval.harness.generation import Generator
from levanter.eval.harness.scoring import Scorer
from levanter.eval.harness.tasks import LoadedTasks
from levanter.io import Progress


def ask(
    tasks: LoadedTasks,
    config: HarnessConfig,
    *,
    encoder: QueryEncoder,
    scorer: Scorer,
    texts: Generator | None,
    template: ChatTemplate | None,
    name: str,
    show: bool,
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Asks all tasks.

    Args:
        tasks: what is asked.
        config: how.
        encoder: makes tokens of texts.
        scorer: the model on its devices.
        texts: writes texts; None where no task wants that.
        template: writes conversations; None where there is none.
        name: of the model, for the results.
        show: whether progress is shown.

    Returns:
        lm_eval's results, with what was asked under `levanter`, and its samples by task.
    """
    from levanter.eval.harness.driver import evaluate
    from levanter.eval.harness.lm import HarnessLM

    shown: list[Progress] = []

    def watch(kind: str, total: int) -> Callable[[int], None]:
        while shown:
            shown.pop().__exit__(None, None, None)
        shown.append(Progress(f"scoring {kind}", total=total, unit="tokens", show=show).__enter__())
        return shown[-1].advance_to

    model = HarnessLM(
        encoder=encoder,
        scorer=scorer,
        generate=texts,
        template=template,
        generation=config.generation_kwargs,
        stops=tasks.stops,
        watch=watch,
    )
    try:
        found = evaluate(model, tasks, config, name=name)
    finally:
        while shown:
            shown.pop().__exit__(None, None, None)
    samples = found.pop("samples", {})
    asked = model.asked
    found["levanter"] = {
        "requests": asked.requests,
        "request_digest": asked.digest,
        "first_ids": asked.first,
        "tokens": asked.tokens,
        "tokens_asked_alone": asked.alone,
        "cut_requests": asked.cut,
        "seconds": asked.seconds,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    return found, samples


def written_samples(config: HarnessConfig, samples: Mapping[str, Any]) -> Mapping[str, Any]:
    """The samples that are written: all of them, or as many as upstream's `sample_logging` asks for."""
    few = config.sample_logging
    if config.log_samples:
        return samples
    most = None if few.log_all else few.max_samples_per_benchmark
    return {task: lines[:most] for task, lines in samples.items()} if few.logs else {}
