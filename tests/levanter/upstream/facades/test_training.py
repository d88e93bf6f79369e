"""`Trainer` on scripts' own losses: against NumPy's gradient descent, and against `train_lm`'s objective."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis

from levanter.checkpoint import latest
from levanter.optim import AdamConfig, SophiaHConfig
from levanter.tracker import NoopConfig
from levanter.trainer import CheckpointerConfig, EmaModelAveragingConfig, TrainerConfig
from levanter.upstream.facades.datasets import EpochDataset, ListAsyncDataset
from levanter.upstream.facades.training import StepInfo, Trainer, TrainerState

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
Feature, RATE = Axis("feature", 4), 0.1
RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(48, 4)).astype(np.float32), RANDOM.normal(size=48).astype(np.float32)
BEGIN = np.arange(4, dtype=np.float32)


class Line(eqx.Module):
    weight: hax.NamedArray
    function: object = jax.nn.relu
    count: jax.Array = eqx.field(default_factory=lambda: jnp.int32(3))


def squared(model, example, *, key):
    assert key.shape == (2,) and model.function is jax.nn.relu
    error = hax.dot(example["x"], model.weight, axis=Feature) - example["y"]
    return hax.mean(error * error), {"largest": hax.max(error)}


def config(folder, **keys) -> TrainerConfig:
    return TrainerConfig(
        id="run", tracker=NoopConfig(), train_batch_size=16, num_train_steps=3, log_dir=folder / "logs",
        checkpointer=CheckpointerConfig(base_path=str(folder / "checkpoints"), keep=[]), **keys,
    )  # fmt: skip


def rows() -> EpochDataset:
    examples = [{"x": hax.named(x, Feature), "y": hax.named(y, ())} for x, y in zip(X, Y, strict=True)]
    return EpochDataset(ListAsyncDataset(examples))


def descended(steps: int) -> list[np.ndarray]:
    theta, found = BEGIN.astype(float), []
    for step in range(steps):
        x, y = X[16 * step : 16 * step + 16].astype(float), Y[16 * step : 16 * step + 16]
        theta = theta - RATE * 2 * x.T @ (x @ theta - y) / 16
        found.append(theta)
    return found


def made() -> Line:
    return Line(weight=hax.named(jnp.asarray(BEGIN), Feature))


@pytest.mark.parametrize("per_device", [-1, 1])
def test_a_scripts_loss_is_descended(per_device, tmp_path, devices):
    """Whole batches, and microbatches of a row a device: the same mean, and NumPy's."""
    del devices
    seen: list[tuple[int, float]] = []
    with Trainer(config(tmp_path, per_device_parallelism=per_device), optax.sgd(RATE), squared) as trainer:
        trainer.add_hook(lambda info: seen.append((info.step, info.loss)))
        state = trainer.initial_state(jax.random.PRNGKey(0), model_init=made)
        info = trainer.train(state, trainer.data_loader(rows()).iter_from_step(state.step))
    assert isinstance(info, StepInfo) and info.step == 2 and info.next_step == 3
    np.testing.assert_allclose(info.model.weight.array, descended(3)[-1], rtol=1e-5)
    assert info.model.function is jax.nn.relu and info.model.count == 3
    before = descended(2)[-1]
    expected = np.mean((X[32:].astype(float) @ before - Y[32:]) ** 2)
    # Behind step 2 by its own turn, and once more at the end.
    assert [step for step, _ in seen] == [2, 2] and abs(seen[0][1] - expected) < 1e-5


def test_a_run_goes_on_behind_its_checkpoint(tmp_path, devices):
    del devices
    settings = config(tmp_path, model_averaging=EmaModelAveragingConfig(beta=0.5))
    with Trainer(settings, optax.sgd(RATE), squared) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(0), model_init=made)
        whole = trainer.train(state, trainer.data_loader(rows()))
    after = descended(3)
    expected = 0.125 * BEGIN + 0.125 * after[0] + 0.25 * after[1] + 0.5 * after[2]
    np.testing.assert_allclose(whole.eval_model.weight.array, expected, rtol=1e-5)
    ref = latest(str(tmp_path / "checkpoints" / "run"))
    assert ref is not None and ref.step == 3 and {"model.weight", "average.parameters.weight"} <= set(ref.leaves)
    with Trainer(settings, optax.sgd(RATE), squared) as trainer:
        state = trainer.initial_state(jax.random.PRNGKey(1), model=made())
        assert state.int_step == 3 and (state.model.weight.array == whole.model.weight.array).all()
        info = trainer.train(state, trainer.data_loader(rows()))
    assert info.step == 2 and (info.model.weight.array == whole.model.weight.array).all()


def test_steps_one_at_a_time(tmp_path, devices):
    del devices
    with Trainer(config(tmp_path), optax.sgd(RATE), squared, add_default_hooks=False) as trainer:
        loader = trainer.data_loader(rows())
        state = trainer.initial_state(jax.random.PRNGKey(0), model=made())
        first = trainer.train_step(state, next(iter(loader)))
        np.testing.assert_allclose(first.model.weight.array, descended(1)[0], rtol=1e-5)
        losses = [info.loss for info in trainer.training_steps(first.state, loader.iter_from_step(1))]
        assert len(losses) == 2
        with pytest.raises(ValueError, match="no batches"):
            trainer.train(trainer.initial_state(jax.random.PRNGKey(0), model=made()), [])
    assert latest(str(tmp_path / "checkpoints" / "run")) is None


def test_what_a_step_must_know_is_refused(tmp_path, devices):
    del devices
    for optimizer in (AdamConfig(skip_bad_steps=True), SophiaHConfig()):
        trainer = Trainer(config(tmp_path), optimizer.build(3), squared)
        with pytest.raises(ValueError, match="need the step of a run"):
            trainer.initial_state(jax.random.PRNGKey(0), model=made())
    trainer = Trainer(config(tmp_path), optax.sgd(RATE), squared)
    with pytest.raises(ValueError, match="one of model and model_init"):
        trainer.initial_state(jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match="selects no parameter"):
        trainer.initial_state(jax.random.PRNGKey(0), model=made(), is_trainable=False)


def test_a_state_of_upstreams_is_made_by_name():
    info = StepInfo(
        state=TrainerState(step=4, model=None, optimizer=None, opt_state=(), training_key=()),
        loss=0.0,
        step_duration=0.0,
    )
    assert (info.step, info.next_step, info.eval_model) == (3, 4, None)
