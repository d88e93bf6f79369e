"""Real runs of `train_lm` on the CPU: exact resume, checkpoints, exports, and what is refused before a step."""

import os
import signal
from dataclasses import replace

import jax
import numpy as np
import pytest

from levanter.checkpoint import CheckpointMismatchError, find_checkpoints, planned_targets, restore
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.commands.train.run_dirs import MissingResumeError
from levanter.compat.hf.export import ExportPathError
from levanter.config import load
from levanter.data import DataError
from levanter.io.paths import filesystem
from levanter.runplan import Session, Target
from levanter.tracker import NoopTracker
from levanter.trainer.loop import NonFiniteError

RUN = """
data:
  tokenizer: passthrough
  vocab_size: 61
  cache_dir: null
  shuffle: true
  components:
    numbers: {{type: direct, datasets: {{train: [{text}]}}}}
model: {{type: llama, max_seq_len: 16, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2,
        num_kv_heads: 2}}
optimizer: {{learning_rate: 0.01, warmup: 2}}
trainer:
  tracker: {{type: noop}}
  num_train_steps: 8
  train_batch_size: 8
  checkpointer: {{base_path: {folder}/checkpoints, keep: []}}
  mesh: {{axes: {{data: 4, model: 2}}, shared_mapping: {{vocab: model}}}}
"""


LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=8)


def config_of(folder, *overrides):
    text = " ".join(str(n * n % 61) for n in range(1200))
    path = folder / "run.yaml"
    path.write_text(RUN.format(text=f'"{text}"', folder=folder))
    return load(TrainLmConfig, ["--config_path", str(path), *overrides])


class Recorder(NoopTracker):
    """Keeps what is logged; sends the process a signal behind a step."""

    def __init__(self, kill_behind=None):
        self.all, self.kill_behind = [], kill_behind

    def log(self, metrics, *, step, commit=None):
        self.all.append((step, dict(metrics)))
        if step == self.kill_behind:
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def logged(self):
        return {step: metrics for step, metrics in self.all if "train/loss" in metrics}

    @property
    def losses(self):
        return {step: metrics["train/loss"] for step, metrics in self.logged.items()}


def run(config, devices, *, run_id="run", kill_behind=None, plan=None):
    plan = plan or describe(config, LOCAL).check()
    tracker = Recorder(kill_behind)
    return execute(plan, plan.mesh.build(devices), Session(run_id=run_id, tracker=tracker)), tracker


def test_a_run_that_is_stopped_and_goes_on_is_the_run_that_was_not(tmp_path, devices):
    exports = f"memory://{tmp_path.name}/hf"
    config = config_of(tmp_path, "--hf_save_path", exports, "--hf_save_steps", "4")
    # One plan for all attempts, so that it compiles once.
    plan = describe(config, LOCAL).check()
    straight, whole = run(config, devices, run_id="straight", plan=plan)
    assert straight.taken == 8 and not straight.preempted
    assert list(whole.losses) == list(range(8))
    assert whole.losses[7] < whole.losses[0]

    # Numbers come a step behind: told at step 2, it stops behind step 3.
    stopped, first = run(config, devices, kill_behind=2, plan=plan)
    assert stopped.preempted and stopped.taken == 4 and stopped.exported is None
    assert stopped.checkpoint is not None and stopped.checkpoint.path == str(tmp_path / "checkpoints/run/step-4")
    assert stopped.checkpoint.metadata["rows_drawn"] == 32
    rest, second = run(config, devices, plan=plan)
    assert list(first.losses) == [0, 1, 2, 3] and list(second.losses) == [4, 5, 6, 7]
    # Bit for bit, the optimizer's and the schedule's numbers too.
    for name in ("train/loss", "grad/norm/total", "params/norm/total", "optim/learning_rate"):
        resumed = {step: metrics[name] for step, metrics in {**first.logged, **second.logged}.items()}
        assert resumed == {step: metrics[name] for step, metrics in whole.logged.items()}, name
    assert rest.taken == 8 and rest.checkpoint is not None and rest.checkpoint.kind == "kept"
    # The export that the stop left out was made up for.
    for step in (4, 8):
        weights = [content(f"{exports}/{name}/step-{step}") for name in ("straight", "run")]
        assert weights[0] == weights[1] and set(weights[0]) == {"config.json", "model.safetensors"}

    # A run that is at its end takes no step.
    again, third = run(config, devices, plan=plan)
    assert again.taken == 8 and not third.logged and again.loss is None


def content(url: str) -> dict[str, bytes]:
    fs, root = filesystem(url)
    return {path.rpartition("/")[2]: fs.cat_file(path) for path in fs.find(root)}


def test_evaluation_scores_what_eval_lm_scores(tmp_path, devices):
    config = config_of(tmp_path, "--trainer.steps_per_eval", "2", "--trainer.num_train_steps", "3")
    # One document of five rows, each with its last token in common with the next.
    stream = np.arange(76) ** 3 % 61
    numbers = config.data.components["numbers"]
    split = {**numbers.datasets, "validation": [" ".join(map(str, stream))]}
    data = replace(config.data, components={"numbers": replace(numbers, datasets=split)})
    config = replace(config, data=data, hf_save_path=str(tmp_path / "hf"))
    plan = describe(config, LOCAL).check()
    assert [program.name for program in plan.computing] == ["init_state", "train_step", "evaluate"]
    done, tracker = run(config, devices, plan=plan)
    assert [step for step, metrics in tracker.all if "eval/loss" in metrics] == [1, 2]
    assert done.evaluation is not None
    (only,) = done.evaluation.sets
    assert only.name == "numbers" and only.score.tokens == 5 * 15

    # The same rows through transformers, with the weights of the export.
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(done.exported, dtype=torch.float32)
    rows = torch.tensor(np.lib.stride_tricks.sliding_window_view(stream, 16)[::15].copy(), dtype=torch.long)
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, 61), rows[:, 1:].reshape(-1))
    assert done.evaluation.overall.micro.loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow  # test_train_lm_bad_input.py has the same before anything runs
def test_a_checkpoint_of_another_architecture_is_refused_by_leaf(tmp_path, devices):
    run(config_of(tmp_path, "--trainer.num_train_steps", "1"), devices)
    other = config_of(tmp_path, "--model.intermediate_dim", "48", "--model.tie_word_embeddings", "true")
    with pytest.raises(CheckpointMismatchError) as caught:
        run(other, devices)
    message = str(caught.value)
    assert "unexpected  model.lm_head.weight" in message
    assert "shape       model.transformer.layers.stacked.mlp.up_proj.weight" in message
    assert "embeddings" not in message

    # A new run may begin with its parameters, where they fit.
    begun = config_of(tmp_path, "--initialize_from_checkpoint_path", str(tmp_path / "checkpoints/run"))
    begun = replace(begun, trainer=replace(begun.trainer, num_train_steps=1))
    _, tracker = run(begun, devices, run_id="begun")
    ref = find_checkpoints(str(tmp_path / "checkpoints/run"))[-1]
    plan = describe(begun, LOCAL)
    targets = planned_targets(plan.sharding, plan.mesh.build(devices))
    saved = restore(ref, {path: t for path, t in targets.items() if path.startswith("model.")}, unexpected="skip")
    norm = np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in saved.values()))
    assert tracker.logged[0]["params/norm/total"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.slow  # test_train_lm_bad_input.py has the essence of it
def test_numbers_that_are_none_stop_the_run_before_they_are_saved(tmp_path, devices):
    config = config_of(
        tmp_path, "--optimizer.learning_rate", "1e30", "--optimizer.warmup", "0", "--optimizer.max_grad_norm", "null"
    )
    interval = replace(config.trainer.checkpointer, keep=load_keep(1))
    config = replace(config, trainer=replace(config.trainer, checkpointer=interval))
    with pytest.raises(NonFiniteError, match=r"step \d: .*(nan|inf)") as caught:
        run(config, devices)
    refs = find_checkpoints(str(tmp_path / "checkpoints/run"))
    if refs:
        assert f"the last checkpoint is of step {refs[-1].step}" in str(caught.value)
        plan = describe(config, LOCAL)
        arrays = restore(refs[-1], planned_targets(plan.sharding, plan.mesh.build(devices)))
        assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(arrays))


def load_keep(every):
    from levanter.trainer import CheckpointInterval

    return [CheckpointInterval(every=every)]


def test_what_is_refused_before_a_step(tmp_path, devices):
    (tmp_path / "hf/run/step-8").mkdir(parents=True)
    taken = config_of(tmp_path, "--hf_save_path", str(tmp_path / "hf"))
    with pytest.raises(ExportPathError, match="exports of another run"):
        run(taken, devices)
    with pytest.raises(ValueError, match="nowhere://"):
        run(config_of(tmp_path, "--hf_save_path", "nowhere://bucket/hf"), devices)
    with pytest.raises(MissingResumeError, match=r"trainer\.load_checkpoint is true"):
        run(config_of(tmp_path, "--trainer.load_checkpoint", "true"), devices)
    with pytest.raises(DataError):
        run(replace(taken, hf_save_path=None, data=replace(taken.data, components={})), devices)
    assert not (tmp_path / "checkpoints").exists()
