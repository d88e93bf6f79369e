"""What scoring runs share: who says how many rows there are, texts beyond a model's context, where results go."""

from dataclasses import replace

import pytest

from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.model.scoring_common import configured_rows, context_length_checks, output_key, result_output
from levanter.io import Output
from levanter.models import Gpt2Config, LlamaConfig
from levanter.trainer.config import TrainerConfig

pytestmark = pytest.mark.quick


def test_the_first_key_that_says_so_counts():
    assert configured_rows(TrainerConfig()) is None
    assert configured_rows(TrainerConfig(per_device_parallelism=3)) == (3, "trainer.per_device_parallelism")
    both = TrainerConfig(per_device_parallelism=3, per_device_eval_parallelism=5)
    assert configured_rows(both) == (5, "trainer.per_device_eval_parallelism")


def test_beyond_its_context_a_model_is_noted_or_refused():
    (note,) = context_length_checks(
        LlamaConfig(max_seq_len=2048), "lengths: 4,096 tokens", name="x", advice="lengths: at most"
    )
    assert (note.name, note.status, note.error) == ("x", "note", None)
    assert (
        note.message
        == "lengths: 4,096 tokens exceed the model's max_seq_len, 2,048; it was not trained on longer texts"
    )
    (error,) = context_length_checks(
        Gpt2Config(max_seq_len=2048), "lengths: 4,096 tokens", name="x", advice="lengths: at most"
    )
    assert error.status == "error" and isinstance(error.error, ValueError)
    assert str(error.error).endswith("\n  → lengths: at most 2048")


@pytest.mark.parametrize("config", [EvalNeedlesConfig, EvalHarnessConfig])
def test_results_go_where_it_says_and_else_below_the_logs(config):
    made = config(hf_checkpoint="x", tasks=["vt"] if config is EvalNeedlesConfig else "arc_easy")
    logs = str(made.trainer.log_dir)
    assert output_key(made) == ("trainer.log_dir", logs)
    assert result_output(made, "a", "b", kind="folder") == Output(
        key="trainer.log_dir", path=f"{logs}/a/b", kind="folder"
    )
    made = replace(made, output_path="out")
    assert output_key(made) == ("output_path", "out")
    assert result_output(made, "a", kind="file") == Output(key="output_path", path="out", kind="file")


@pytest.mark.parametrize("config", [EvalNeedlesConfig, EvalHarnessConfig])
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "no model to evaluate: set hf_checkpoint"),
        ({"hf_checkpoint": "x", "checkpoint_path": "y"}, "checkpoint_path and hf_checkpoint name two models"),
    ],
)
def test_a_model_is_named_once(config, keys, said):
    tasks = {"tasks": ["vt"]} if config is EvalNeedlesConfig else {"tasks": "arc_easy"}
    with pytest.raises(ValueError, match=said):
        config(**tasks, **keys)
    named = config(**tasks, checkpoint_path="y")
    assert (named.files, named.saved) == (None, "y")
    named = config(**tasks, checkpoint_path="y", checkpoint_is_hf=True)
    assert (named.files, named.saved) == ("y", None)
