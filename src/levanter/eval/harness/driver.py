"""The lm_eval run on process 0: all tasks evaluated on the model, with progress, and its dictionary of results."""

import importlib.metadata
import platform
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax

from levanter.data.chat import ChatTemplate
from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.encoding import HarnessError, QueryEncoder
from levanter.eval.harness.generation import Generator
from levanter.eval.harness.scoring import Scorer
from levanter.eval.harness.tasks import (
    FEWSHOT_SEED,
    RANDOM_SEED,
    TASK_FAILURES,
    LoadedTasks,
    seed_everything,
    task_code,
    task_error_message,
)
from levanter.io import Progress

if TYPE_CHECKING:
    from levanter.eval.harness.lm import HarnessLM


def run_tasks(
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
    """Evaluates all tasks and shows progress.

    Args:
        tasks: the tasks.
        config: how requests are built.
        encoder: texts to tokens.
        scorer: the model on its devices.
        texts: generates text; None if no task requests any.
        template: renders conversations; None if the tokenizer has no chat template.
        name: the model's name in the results.
        show: whether progress is shown.

    Returns:
        lm_eval's results, with statistics of the requests under `levanter`, and its samples by task.
    """
    # Only process 0 imports lm_eval, and only when it evaluates.
    from levanter.eval.harness.lm import HarnessLM

    bars: list[Progress] = []

    def watch(kind: str, total: int) -> Callable[[int], None]:
        while bars:
            bars.pop().__exit__(None, None, None)
        bars.append(Progress(f"scoring {kind}", total=total, unit="tokens", show=show).__enter__())
        return bars[-1].advance_to

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
        results = evaluate(model, tasks, config, name=name)
    finally:
        while bars:
            bars.pop().__exit__(None, None, None)
    # Samples have files of their own.
    samples = results.pop("samples", {})
    log = model.log
    drop_byte_metrics(results, samples, log.lost_texts)
    results["levanter"] = {
        "requests": log.requests,
        "request_digest": log.digest,
        "first_ids": log.first_ids,
        "tokens": log.tokens,
        "tokens_asked_alone": log.unshared_tokens,
        "cut_requests": log.truncated,
        "no_bits_per_byte": {
            task: f"the ids of {len(names):,} texts do not keep them; the first is {names[0]}"
            for task, names in log.lost_texts.items()
        },
        "seconds": log.seconds,
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
    }
    return results, samples


_BYTE_METRICS = ("bits_per_byte", "byte_perplexity")


def drop_byte_metrics(results: Mapping[str, Any], samples: Mapping[str, Any], tasks: Collection[str]) -> None:
    """Removes the metrics per byte of tasks, and of groups with these tasks, from results and samples.

    Args:
        results: lm_eval's results.
        samples: lm_eval's samples, by task.
        tasks: those with texts that their ids do not keep: their log-probabilities are of other texts.
    """
    subtasks: Mapping[str, list[str]] = results.get("group_subtasks") or {}

    def is_lost(name: str) -> bool:
        return name in tasks or any(is_lost(part) for part in subtasks.get(name, ()))

    for table in ("results", "groups"):
        for name, metrics in (results.get(table) or {}).items():
            if is_lost(name):
                # A key is `bits_per_byte,none` or `bits_per_byte_stderr,none`.
                for key in [key for key in metrics if key.startswith(_BYTE_METRICS)]:
                    del metrics[key]
    for task in tasks:
        for line in samples.get(task, ()):
            line["metrics"] = [metric for metric in line["metrics"] if metric not in _BYTE_METRICS]
            for metric in _BYTE_METRICS:
                line.pop(metric, None)


def select_samples(config: HarnessConfig, samples: Mapping[str, Any]) -> Mapping[str, Any]:
    """The samples to write: all of them, or as many as upstream's `sample_logging` allows."""
    logging = config.sample_logging
    if config.log_samples:
        return samples
    limit = None if logging.log_all else logging.max_samples_per_benchmark
    return {task: lines[:limit] for task, lines in samples.items()} if logging.logs else {}


def evaluate(model: "HarnessLM", tasks: LoadedTasks, config: HarnessConfig, *, name: str) -> dict[str, Any]:
    """Evaluates tasks with lm_eval.

    Args:
        model: the model.
        tasks: the tasks.
        config: how requests are built.
        name: the model's name in the results.

    Returns:
        lm_eval's results, with `samples`.

    Raises:
        HarnessError: a task's requests are invalid, or it fails to evaluate the answers.
    """
    from lm_eval.evaluator import evaluate as evaluate_tasks

    # Immediately before the requests are built, as other code may have used the generators since the tasks were loaded.
    seed_everything()
    for task in tasks.tasks.values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    began = time.time()
    try:
        with task_code():
            evaluated = evaluate_tasks(
                model,
                tasks.as_lm_eval(),  # pyright: ignore[reportArgumentType]
                limit=config.max_examples,
                bootstrap_iters=config.bootstrap_iters,
                # The page and comparisons need the samples; `select_samples` decides which of them are written.
                log_samples=True,
                apply_chat_template=config.apply_chat_template,
                # Turns exist only in a conversation, which a chat template renders.
                fewshot_as_multiturn=config.fewshot_as_multiturn and config.apply_chat_template,
                confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            )
    except TASK_FAILURES as error:
        # An error of this package is not the task's: it keeps its type and its traceback.
        if (message := task_error_message(error)) is None:
            raise
        raise HarnessError(message) from error
    assert evaluated is not None, "process 0 has the results"
    results: dict[str, Any] = dict(evaluated)
    # lm_eval's `simple_evaluate` adds these keys; other tools that read result files expect them.
    results["config"] = {
        "model": name,
        "model_args": None,
        "batch_size": None,
        "batch_sizes": [],
        "device": None,
        "use_cache": None,
        "limit": config.max_examples,
        "bootstrap_iters": config.bootstrap_iters,
        "gen_kwargs": dict(config.generation_kwargs),
        "random_seed": RANDOM_SEED,
        "numpy_seed": FEWSHOT_SEED,
        "torch_seed": None,
        "fewshot_seed": FEWSHOT_SEED,
    }
    results["date"] = began
    results["lm_eval_version"] = importlib.metadata.version("lm_eval")
    results["max_length"] = model.max_length
    results["eot_token_id"] = model.eot_token_id
    results["model_name"] = name
    results["chat_template"] = model.chat_template(True) if config.apply_chat_template else None
    results["fewshot_as_multiturn"] = config.fewshot_as_multiturn
    results["total_evaluation_time_seconds"] = str(time.time() - began)
    return results
