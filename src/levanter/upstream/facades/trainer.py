"""Members of `TrainerConfig` that scripts of earlier generations use, and a block of theirs without effect here.

with trainer.device_mesh, hax.axis_mapping(trainer.parameter_axis_mapping): …      # 2025
with trainer.use_device_mesh(): …                                                  # June 2026
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from haliax import Axis
from jax.sharding import Mesh

from levanter.commands.cli.compilation_cache import keep_compiled
from levanter.commands.cli.devices import configure_jax
from levanter.commands.cli.runner import run_id
from levanter.io import setup_logging
from levanter.mesh import local_devices, require_accelerator
from levanter.optim import OptimizerConfig
from levanter.tracker import start_trackers
from levanter.trainer.config import TrainerConfig
from levanter.upstream.facades import mesh
from levanter.upstream.facades.tracker import set_global_tracker


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The Ray settings of the 2025 generation, without effect: nothing here starts through Ray."""

    address: str | None = None
    start_workers: bool = True
    auto_start_cluster: bool = True


def initialize(trainer: TrainerConfig) -> Callable[[], None]:
    """`trainer.initialize()`: logging, JAX's options, trackers."""

    def begin() -> None:
        setup_logging()
        # Before the first call that starts a backend: JAX reads its options only then.
        configure_jax(trainer)
        devices = local_devices(trainer.mesh)
        require_accelerator(wanted=trainer.require_accelerator, devices=devices)
        keep_compiled(trainer, platform=devices.platform)
        index = jax.process_index()
        set_global_tracker(start_trackers(trainer.trackers, run_id=run_id(trainer), process_index=index))

    return begin


def initialize_all(config: object) -> None:
    """`levanter.initialize(config)`: initializes from a configuration with a `trainer`, or from the `trainer`."""
    initialize(cast(TrainerConfig, getattr(config, "trainer", config)))()


def device_mesh(trainer: TrainerConfig) -> Mesh:
    """The mesh on the devices of this run."""
    return mesh.device_mesh(trainer.mesh)


def use_device_mesh(trainer: TrainerConfig) -> Callable[[], AbstractContextManager[Any]]:
    """`with trainer.use_device_mesh(): …`."""
    return lambda: mesh.device_mesh(trainer.mesh)


def compute_axis_mapping(trainer: TrainerConfig) -> dict[str, Any]:
    """Logical axis → mesh axes of activations."""
    return mesh.compute_mapping(trainer.mesh)


def parameter_axis_mapping(trainer: TrainerConfig) -> dict[str, Any]:
    """Logical axis → mesh axes of parameters."""
    return mesh.parameter_mapping(trainer.mesh)


def batch_axis_name(trainer: TrainerConfig) -> str | None:
    """The logical name of the batch axis (2025: `batch_axis`)."""
    return trainer.mesh.batch_axis_name


def num_slices(trainer: TrainerConfig) -> int:
    """The number of slices of this run."""
    return local_devices(trainer.mesh).granules


def data_axis_size(trainer: TrainerConfig) -> int:
    """The number of shards of the batch."""
    # The product of all mesh axes that the batch is mapped to, DCN axes included.
    return mesh.sizes(trainer.mesh).ways(compute_axis_mapping(trainer).get(trainer.mesh.batch_axis_name or "batch"))


def data_ici_axis_size(trainer: TrainerConfig) -> int:
    """The size of the `data` mesh axis inside a slice."""
    # Without DCN: `data_dcn` is a mesh axis of its own.
    return mesh.sizes(trainer.mesh).shape["data"]


def data_dcn_axis_size(trainer: TrainerConfig) -> int:
    """The number of slices that `data` spans."""
    return mesh.sizes(trainer.mesh).shape.get("data_dcn", 1)


def num_devices_per_slice(trainer: TrainerConfig) -> int:
    """The number of devices of a slice."""
    devices = local_devices(trainer.mesh)
    return len(devices.devices) // devices.granules


def microbatch_size(trainer: TrainerConfig) -> int:
    """Rows of a microbatch, over all devices."""
    per_device = trainer.per_device_parallelism
    # −1 means no microbatches: the whole batch at once.
    return _largest_batch(trainer) if per_device == -1 else per_device * data_axis_size(trainer)


def lr_scheduler(optimizer: OptimizerConfig) -> Callable[[int], Callable[[Any], jax.Array]]:
    """`optimizer.lr_scheduler(steps)`: the learning rate at each step."""

    def of_steps(steps: int) -> Callable[[Any], jax.Array]:
        schedule = optimizer.schedule(steps)
        return lambda step: schedule(jnp.asarray(step))

    return of_steps


def replica_axis_size(trainer: TrainerConfig) -> int:
    """The number of replicas, inside slices and across them."""
    spec = mesh.sizes(trainer.mesh)
    # Axes that the mesh lacks count as size 1.
    return spec.ways(tuple(name for name in ("replica_dcn", "replica") if name in spec.shape))


def eval_batch_size(trainer: TrainerConfig) -> int:
    """The number of sequences evaluated at once, over all devices."""
    per_device = trainer.per_device_eval_parallelism
    if per_device == -1:
        # −1 falls back to the training setting, and that to the whole training batch.
        per_device = trainer.per_device_parallelism
    if per_device == -1:
        return _largest_batch(trainer)
    return per_device * data_axis_size(trainer)


def TrainBatch(trainer: TrainerConfig) -> Axis:
    """The axis of a training batch."""
    return Axis(trainer.mesh.batch_axis_name or "batch", _largest_batch(trainer))


def EvalBatch(trainer: TrainerConfig) -> Axis:
    """The axis of an evaluation batch."""
    return Axis(trainer.mesh.batch_axis_name or "batch", eval_batch_size(trainer))


def _largest_batch(trainer: TrainerConfig) -> int:
    size = trainer.train_batch_size
    if not isinstance(size, int):
        return max(stage.value for stage in size)
    return trainer.per_device_parallelism * data_axis_size(trainer) if size == -1 else size
