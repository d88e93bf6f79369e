"""A run of lm_eval over loaded tasks: its `evaluate`, and the dictionary that its `simple_evaluate` makes around it."""

import importlib.metadata
import time
from typing import Any

from lm_eval.evaluator import evaluate as _lm_eval

from levanter.eval.harness.config import HarnessConfig
from levanter.eval.harness.encoding import HarnessError
from levanter.eval.harness.lm import HarnessLM
from levanter.eval.harness.tasks import FEWSHOT_SEED, RANDOM_SEED, LoadedTasks, quiet, said_of_a_task, seed_everything


def evaluate(model: HarnessLM, tasks: LoadedTasks, config: HarnessConfig, *, name: str) -> dict[str, Any]:
    """Asks all tasks of a model.

    Args:
        model: the model.
        tasks: what is asked.
        config: how.
        name: of the model, for the results.

    Returns:
        lm_eval's results, with `samples`.

    Raises:
        HarnessError: a task cannot be asked, or what is answered cannot be evaluated.
    """
    seed_everything()
    for task in tasks.tasks.values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    began = time.time()
    try:
        with quiet():
            found = _lm_eval(
                model,
                tasks.as_lm_eval(),  # pyright: ignore[reportArgumentType]
                limit=config.max_examples,
                bootstrap_iters=config.bootstrap_iters,
                log_samples=True,
                apply_chat_template=config.apply_chat_template,
                fewshot_as_multiturn=config.fewshot_as_multiturn and config.apply_chat_template,
                confirm_run_unsafe_code=config.confirm_run_unsafe_code,
            )
    except Exception as error:
        if (said := said_of_a_task(error)) is None:
            raise
        raise HarnessError(said) from error
    assert found is not None, "process 0 has the results"
    results: dict[str, Any] = dict(found)
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
