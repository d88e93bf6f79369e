"""Members of configurations that scripts of earlier generations read, computed from today's.

config.Heads, config.KVHeads                     # axes of attention
Gpt2Config.default_hf_checkpoint_converter       # of the family's reference checkpoint
data.id, data.train_urls                         # of the only data set
trainer.tensor_parallel_axes, trainer.fsdp_axis  # of the mesh
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
from haliax import Axis

from haliax_ext.pytree import PyTree, is_named
from levanter.compat.hf.converter import HFCheckpointConverter
from levanter.data import DatasetComponent, HfDatasetSource, LmDataConfig, UrlDatasetSource
from levanter.models.base import LmHeadModel
from levanter.models.registry import LmConfig
from levanter.tracker import WandbConfig
from levanter.trainer.config import TrainerConfig
from levanter.upstream.facades import mesh
from levanter.upstream.facades.schedules import OldBatchSchedule


def Heads(config: LmConfig) -> Axis:
    """The query heads as one axis; models here keep them in groups that share keys."""
    return Axis("heads", _number(config, "num_heads"))


def KVHeads(config: LmConfig) -> Axis:
    """The axis of key/value heads."""
    shared = getattr(config, "num_kv_heads", None)
    return Axis("kv_head", _number(config, "num_heads") if shared is None else shared)


def _number(config: LmConfig, name: str) -> int:
    number = getattr(config, name, None)
    if number is None:
        raise AttributeError(f"{type(config).__name__} has no {name}")
    return number


def default_converter(cls: type[LmConfig]) -> HFCheckpointConverter:
    """`Gpt2Config.default_hf_checkpoint_converter`: a converter with the family's reference checkpoint."""
    return HFCheckpointConverter.of(cls())


def resize_vocab(model: LmHeadModel) -> Callable[..., LmHeadModel]:
    """`model.resize_vocab(size, key=None)`: rows of the embedding and of the head added at the end, or dropped."""

    def resized(new_size: int, key: jax.Array | None = None) -> LmHeadModel:
        def rows(leaf: PyTree) -> PyTree:
            if not is_named(leaf) or "vocab" not in [axis.name for axis in leaf.axes]:
                return leaf
            # Haliax's rule: new rows are the mean of the others, with noise of their deviation where there is a key.
            return hax.tree_util.resize_axis(leaf, leaf.resolve_axis("vocab"), new_size, key)

        config = dataclasses.replace(model.config, vocab_size=new_size)  # pyright: ignore[reportArgumentType]
        return dataclasses.replace(jax.tree.map(rows, model, is_leaf=is_named), config=config)

    return resized


# --- of `data` ---


def _sources(data: LmDataConfig) -> list[Any]:
    sources = [component.source for component in data.components.values() if isinstance(component, DatasetComponent)]
    return [source for source in sources if source is not None]


def id(data: LmDataConfig) -> str | None:
    """`data.id`: the id of the Hub data set; None for files or several data sets."""
    hub = [source.id for source in _sources(data) if isinstance(source, HfDatasetSource)]
    return hub[0] if len(hub) == 1 else None


def train_urls(data: LmDataConfig) -> list[str]:
    """`data.train_urls`: the training files of all data sets."""
    return [url for source in _sources(data) if isinstance(source, UrlDatasetSource) for url in source.train_urls]


def validation_urls(data: LmDataConfig) -> list[str]:
    """`data.validation_urls`: the validation files of all data sets."""
    return [url for source in _sources(data) if isinstance(source, UrlDatasetSource) for url in source.validation_urls]


# --- of `trainer` ---


def tensor_parallel_axes(trainer: TrainerConfig) -> list[str]:
    """`trainer.tensor_parallel_axes`: the axes of activations that the `model` mesh axis shards."""
    mapping = mesh.compute_mapping(trainer.mesh)
    # A mapping's value is one mesh axis or several.
    return [name for name, axes in mapping.items() if "model" in ((axes,) if isinstance(axes, str) else axes)]


def fsdp_axis(trainer: TrainerConfig) -> str | list[str] | None:
    """`trainer.fsdp_axis`: the axes of parameters that the `data` mesh axis shards."""
    mapping = mesh.parameter_mapping(trainer.mesh)
    sharded = [name for name, axes in mapping.items() if "data" in ((axes,) if isinstance(axes, str) else axes)]
    return sharded[0] if len(sharded) == 1 else sharded or None


def batch_schedule(trainer: TrainerConfig) -> OldBatchSchedule:
    """`trainer.batch_schedule`: the number of rows of each step."""
    size = trainer.train_batch_size
    # −1 means that the batch follows from `per_device_parallelism`.
    return OldBatchSchedule(mesh_rows(trainer) if size == -1 else size)


def mesh_rows(trainer: TrainerConfig) -> int:
    """Rows of a batch that is given as rows per device."""
    ways = mesh.sizes(trainer.mesh).ways(
        mesh.compute_mapping(trainer.mesh).get(trainer.mesh.batch_axis_name or "batch")
    )
    return trainer.per_device_parallelism * ways


def wandb(trainer: TrainerConfig) -> WandbConfig | None:
    """`trainer.wandb`: the Weights & Biases tracker; None if there is none."""
    return next((tracker for tracker in trainer.trackers if isinstance(tracker, WandbConfig)), None)
