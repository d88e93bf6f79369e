"""Earlier names of the parts that scripts compose (data sets, loaders, checkpoints, layers, trainer); see `names`."""

from collections.abc import Mapping

_CALLS = "levanter.upstream.facades.models"
_SETS = "levanter.upstream.facades.datasets"
_LOADERS = "levanter.upstream.facades.loaders"
_SCHEDULES = "levanter.upstream.facades.schedules"
_SAVED = "levanter.upstream.facades.saved"
_LAYERS = "levanter.upstream.facades.layers"
_DICTS = "levanter.upstream.facades.state_dicts"
_DURATIONS = "levanter.upstream.facades.durations"
_HELPERS = "levanter.upstream.facades.helpers"
_MEMBERS = "levanter.upstream.facades.model_members"
_TRAINING = "levanter.upstream.facades.training"
_HF = "levanter.compat.hf.index"


def _all(module: str, names: str) -> dict[str, str]:
    """Maps names to the same names in a module."""
    return {name: f"{module}:{name}" for name in names.split()}


_SETS_OF_TODAY = _all(
    _SETS, "AsyncDataset EpochDataset ListAsyncDataset MappedAsyncDataset PermutationDataset SyncDataset"
)
# The data sets of early 2024 were iterables; later ones are indexed, asynchronously.
_SETS_OF_2024 = {
    "Dataset": f"{_SETS}:IterableDataset",
    **_all(_SETS, "ShardableDataset ShardedDataset ShuffleDataset"),
}
_PROCESSOR = _all(_SETS, "BatchProcessor")
_LOADERS_OF_2024 = _all(_LOADERS, "ReplicatedBatchLoader ShardedBatchLoader")
_SAVES = _all(_SAVED, "load_checkpoint load_metadata save_checkpoint")
_TREES = _all(_SAVED, "tree_deserialize_leaves_tensorstore tree_serialize_leaves_tensorstore")
_ATTENTION = {
    **_all(_LAYERS, "AttentionBackend dot_product_attention"),
    "AttentionConfig": f"{_LAYERS}:OldAttentionConfig",
}

_FLASH = _all(_LAYERS, "BLOCK_SIZE flash_attention")
_AVERAGES = _all("levanter.trainer", "EmaDecaySqrtConfig EmaModelAveragingConfig ModelAveragingConfig")

TOOL_NAMES: Mapping[str, Mapping[str, str]] = {
    "levanter.data": {
        **_SETS_OF_TODAY,
        **_SETS_OF_2024,
        **_PROCESSOR,
        **_LOADERS_OF_2024,
        "DataLoader": f"{_LOADERS}:DataLoader",
    },
    "levanter.data.dataset": {
        **_SETS_OF_TODAY,
        **_SETS_OF_2024,
        **_all(_SETS, "AsyncifiedDataset BatchMappedAsyncDataset SlicedAsyncDataset SyncifiedDataset"),
    },
    "levanter.data.loader": {
        **_LOADERS_OF_2024,
        "BatchLoader": f"{_LOADERS}:IterableLoader",
        "DataLoader": f"{_LOADERS}:DataLoader",
        "DataLoaderIterator": f"{_LOADERS}:BackgroundIterator",
        "check_sharded_consistency": f"{_LOADERS}:check_sharded_consistency",
        "stack_tree": f"{_LOADERS}:stack_tree",
    },
    "levanter.data._preprocessor": _PROCESSOR,
    "levanter.data.sharded_dataset": _all(_SETS, "ShardedDataset"),
    "levanter.data.text": {"_stack_batch_encodings": f"{_SETS}:stack_batch_encodings"},
    "levanter.schedule": {
        **_all(_SCHEDULES, "IntSchedule ScheduleStep distinct_values value_at_step"),
        "BatchSchedule": f"{_SCHEDULES}:OldBatchSchedule",
    },
    "levanter.checkpoint": {
        **_SAVES,
        **_TREES,
        "_get_fs_and_plain_path": f"{_SAVED}:fs_and_plain_path",
    },
    "levanter.checkpoint.checkpointer:Checkpointer": {
        "load_checkpoint": f"{_SAVED}:load_function",
        "on_step": f"{_SAVED}:on_step",
        "wait_until_finished": f"{_SAVED}:wait_until_finished",
    },
    "levanter.tensorstore_serialization": _TREES,
    "levanter.compat.hf_checkpoints": {
        "_convert_to_jnp": f"{_DICTS}:convert_to_jnp",
        "DEFAULT_MAX_SHARD_SIZE": f"{_HF}:MAX_SHARD_BYTES",
        **_all(_DICTS, "SAFE_TENSORS_INDEX_NAME SAFE_TENSORS_MODEL"),
    },
    "levanter.compat.torch_serialization": {
        **_all(_DICTS, "flatten_linear_layers unflatten_linear_layers"),
        "jax_tree_from_state_dict": f"{_DICTS}:tree_from_state_dict",
        "jax_tree_to_state_dict": f"{_DICTS}:tree_to_state_dict",
    },
    "levanter.models.base:LmHeadModel": {"to_state_dict": f"{_DICTS}:to_state_dict"},
    "levanter.layers": _ATTENTION,
    "levanter.layers.attention": {
        **_ATTENTION,
        **_all(_LAYERS, "default_attention_type materialize_mask"),
    },
    "levanter.layers.attention.mask:AttentionMask": _all(_CALLS, "causal_offset segment_ids"),
    "levanter.models.attention": {**_ATTENTION, **_all(_LAYERS, "materialize_mask")},
    "levanter.layers.flash_attention": _FLASH,
    "levanter.models.flash_attention": _FLASH,
    "levanter.models.llama": {
        **_all(_LAYERS, "LlamaAttention LlamaDecoderLayer LlamaRMSNorm LlamaRotaryEmbedding"),
        "_apply_rotary_pos_emb": f"{_LAYERS}:apply_rotary_pos_emb",
        "_rotate_half": f"{_LAYERS}:rotate_half",
    },
    "levanter.models.gpt2": {"ACT2FN": "levanter.layers.activation:ACTIVATIONS"},
    "levanter.models.registry:LmConfig": {
        "Heads": f"{_MEMBERS}:Heads",
        "KVHeads": f"{_MEMBERS}:KVHeads",
        "default_hf_checkpoint_converter": f"{_MEMBERS}:default_converter",
    },
    "levanter.data.config:LmDataConfig": _all(_MEMBERS, "id train_urls validation_urls"),
    "levanter.trainer.config:TrainerConfig": _all(_MEMBERS, "batch_schedule fsdp_axis tensor_parallel_axes wandb"),
    "levanter.trainer": {
        **_all(_TRAINING, "StepInfo Trainer TrainerState"),
        "OptimizerConfig": "levanter.optim:AdamConfig",
    },
    "levanter.trainer_state": _all(_TRAINING, "TrainerState"),
    "levanter.callbacks": _all(_TRAINING, "StepInfo"),
    "levanter.optim": _AVERAGES,
    "levanter.optim.model_averaging": _AVERAGES,
    "levanter.utils.activation": _all(_LAYERS, "ActivationFunctionEnum"),
    "levanter.utils.background_iterable": _all(_LOADERS, "BackgroundIterable BackgroundIterator"),
    "levanter.utils.datetime_utils": _all(_DURATIONS, "encode_timedelta parse_timedelta"),
    "levanter.utils.py_utils": _all(_HELPERS, "logical_cpu_core_count"),
    "levanter.logging": {
        "WandbConfig": "levanter.tracker:WandbConfig",
        "init_logging": "levanter.io:setup_logging",
    },
}
"""Part of `levanter.upstream.names.NAMES`, in the same form."""

TOOL_CLASS_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "levanter.models.registry:LmConfig": ("default_hf_checkpoint_converter",)
}
"""Part of `levanter.upstream.names.CLASS_MEMBERS`, in the same form."""
