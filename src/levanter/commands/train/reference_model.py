"""A second model of a training run: frozen, loaded from a checkpoint, and compared with the one that is trained."""

import logging
from dataclasses import replace

import jax

from haliax_ext.abstract import abstract, cast, leaves, with_arrays
from haliax_ext.planner import plan_sharding
from levanter.commands.model.saved_model import resolve_saved_source
from levanter.commands.model.sharding import load_weights, plan_weight_loading
from levanter.commands.model.source import ModelBlock, ModelSource, resolve_source
from levanter.commands.train.task import Running
from levanter.commands.train.trained_run import ReferenceModel, TrainedRun
from levanter.models.base import LmHeadModel
from levanter.runplan import Target
from levanter.trainer.train_state import REFERENCE

logger = logging.getLogger(__name__)


class ReferenceModelError(ValueError):
    """The configured reference model cannot be used with the policy."""


def find_reference_model(run: TrainedRun, target: Target, path: str, *, is_hf: bool = True) -> ReferenceModel:
    """Describes a second model under the mappings and the precision of a run; reads headers only.

    Args:
        run: the training run.
        target: its devices.
        path: Hugging Face files (a folder, a hub id, a URL), or one of our checkpoints.
        is_hf: whether `path` names Hugging Face files.

    Raises:
        ReferenceModelError: it has another vocabulary than the trained model, or 8-bit weights.
        ValueError: there is no such model.
    """
    origin = _find_origin(run, path, is_hf=is_hf)
    # None where the architecture leaves the size of the vocabulary open.
    ids = origin.architecture.vocab_size
    if ids is not None and ids != run.vocab:
        raise ReferenceModelError(
            f"reference: {path} has {ids} ids, the model that is trained has {run.vocab}; "
            "log-probabilities over different vocabularies cannot be compared"
        )
    if origin.has_int8:
        raise ReferenceModelError(f"reference: {path} has 8-bit weights, which are not supported for a reference yet")
    # The same kernels as the policy's, so that equal weights give equal log-probabilities.
    model, _ = replace(origin.architecture, vocab_size=run.vocab).for_platform(
        target.platform,
        compute_dtype=run.precision.compute,
        length=run.config.positions,
        sequence_shards=run.resolved.query_ways,
        device_kind=target.kind,
        packed=run.config.data.block_cross_document_attention,
    )
    # In the compute dtype: the reference takes no updates, so it has no float32 copy.
    module = cast(abstract(lambda: model.build(run.Vocab, key=jax.random.PRNGKey(0))), run.precision.compute)
    hbm_bytes = run.state_plan.whole.hbm_bytes
    plan = plan_sharding(leaves(module), run.resolved.mappings, run.resolved.spec, hbm_bytes=hbm_bytes)
    load, problems = None, []
    if not plan.errors:
        load, problems = plan_weight_loading(origin, model, run.Vocab, plan, target)
    return ReferenceModel(
        origin=origin,
        module=module,
        plan=plan,
        # The policy's load plan is there as well, and two transfers must not share a name.
        load=None if load is None else replace(load, name=f"load.{REFERENCE}"),
        checks=tuple(replace(check, name=f"reference {check.name}") for check in (*origin.checks, *problems)),
    )


def load_reference_model(model: ReferenceModel, running: Running) -> LmHeadModel:
    """Reads the weights of a second model, each into its final sharding."""
    assert model.load is not None and model.origin.checkpoint is not None
    logger.info("the reference: %s", model.origin.description)
    loaded = load_weights(
        model.load,
        model.plan,
        model.origin.checkpoint.source,
        running.mesh,
        show=running.session.show,
        allow_nonfinite=running.run.config.trainer.allow_nonfinite,
    )
    return with_arrays(model.module, loaded.arrays)


def _find_origin(run: TrainedRun, path: str, *, is_hf: bool) -> ModelSource:
    config = run.config
    block = ModelBlock.of(config.model, run.written)
    if not is_hf:
        # A `model:` block that yields to the checkpoint says nothing about the reference's architecture.
        return resolve_saved_source(path, block if not config.takes_architecture else None, key="reference.model_path")
    # The same files: its headers are read and its checks are listed once.
    if run.origin is not None and path == config.pretrained:
        return run.origin
    return resolve_source(path, block, block_is_whole=not config.takes_architecture, block_yields=True)
