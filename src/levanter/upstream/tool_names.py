"""Earlier names of the parts that scripts compose (data sets, loaders, checkpoints, layers, trainer); see `names`."""

from collections.abc import Mapping

_CALLS = "levanter.upstream.facades.models"
_SETS = "levanter.upstream.facades.datasets"
_LOADERS = "levanter.upstream.facades.loaders"
_MIXING = "levanter.upstream.facades.mixtures"
_SOURCES = "levanter.upstream.facades.sources"
_PACKING = "levanter.upstream.facades.packing"
_CACHES = "levanter.upstream.facades.caches"
_JAGGED = "levanter.upstream.facades.jagged"
_SCHEDULES = "levanter.upstream.facades.schedules"
_SAVED = "levanter.upstream.facades.saved"
_LAYERS = "levanter.upstream.facades.layers"
_DICTS = "levanter.upstream.facades.state_dicts"
_DURATIONS = "levanter.upstream.facades.durations"
_HELPERS = "levanter.upstream.facades.helpers"
_MEMBERS = "levanter.upstream.facades.model_members"
_LOSSES = "levanter.upstream.facades.losses"
_TOKENIZERS = "levanter.upstream.facades.tokenizers"
_LORA = "levanter.upstream.facades.lora"
_STATE = "levanter.upstream.facades.trainer_state"
_TRAINING = "levanter.upstream.facades.training"
_HF = "levanter.compat.hf.index"


def _all(module: str, names: str) -> dict[str, str]:
    """Maps names to the same names in a module."""
    return {name: f"{module}:{name}" for name in names.split()}


_SETS_OF_TODAY = _all(
    _SETS,
    "AsyncDataset EpochDataset EraShufflingDataset ListAsyncDataset MappedAsyncDataset PermutationDataset SyncDataset",
)
_MIXTURES = _all(_MIXING, "MixtureDataset StopStrategy")
_SOURCES_OF_DATA = {
    **_all(_CACHES, "ShardedDataSource batched"),
    **_all(_SOURCES, "datasource_from_hf datasource_from_json datasource_from_jsonl datasource_from_parquet"),
}
_STORES = {
    **_all(_CACHES, "CacheLedger CacheMetadata SerialCacheWriter TreeCache build_or_load_cache"),
    **_all(_JAGGED, "JaggedArrayStore TreeStore"),
    "CacheOptions": f"{_CACHES}:OldCacheOptions",
}
# The data sets of early 2024 were iterables; later ones are indexed, asynchronously.
_SETS_OF_2024 = {
    "Dataset": f"{_SETS}:IterableDataset",
    **_all(_SETS, "ShardableDataset ShardedDataset ShuffleDataset"),
}
_PROCESSOR = _all(_SETS, "BatchProcessor")
_LOADERS_OF_2024 = _all(_LOADERS, "ReplicatedBatchLoader ShardedBatchLoader")
_SAVES = _all(_SAVED, "load_checkpoint load_checkpoint_or_initialize load_metadata save_checkpoint")
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
        **_MIXTURES,
        **_SOURCES_OF_DATA,
        "DataLoader": f"{_LOADERS}:DataLoader",
    },
    "levanter.data.mixture": {**_MIXTURES, **_all(_MIXING, "rescale_mixture_schedule_for_batch_schedule")},
    "levanter.data.permutation": _all(_SETS, "EraShufflingDataset PermutationDataset"),
    "levanter.data._prp": _all(_MIXING, "FeistelPermutation LcgPermutation"),
    "levanter.data.sharded_datasource": {
        **_SOURCES_OF_DATA,
        **_all(
            _SOURCES,
            "JsonDataSource JsonlDataSource ParquetDataSource TextUrlDataSource UrlBackedShardedDataSource "
            "UrlDataSource",
        ),
        "WrappedHFDataSource": f"{_SOURCES}:WrappedHFDataSource",
        "datasource_from_hf": f"{_SOURCES}:datasource_from_hf",
        "AudioTextUrlDataSource": "levanter.upstream.unsupported.absent:AudioTextUrlDataSource",
        "_sniff_format_for_dataset": f"{_SOURCES}:sniff_format",
    },
    "levanter.data.packing": _all(
        _PACKING,
        "GreedyPrepackedDataset PromptCompletion SequencePacker greedy_pack_prompt_completions pack_documents "
        "pack_prompt_completions per_segment_correct per_segment_loss",
    ),
    "levanter.lora": {"LoraConfig": f"{_LORA}:OldLoraConfig"}
    | _all(
        _LORA,
        "LoraModel combine_lora_params filter_lora_params is_lora_param lora_state_dict "
        "lora_trainable_params_filter loraize merge_lora_modules partition_lora_params "
        "save_merged_hf_checkpoint_callback save_merged_hf_model save_peft_checkpoint_callback save_peft_pretrained "
        "to_hf_config",
    ),
    "levanter.models.loss": {
        **_all(
            "levanter.upstream.facades.losses",
            "cross_entropy_loss_and_log_normalizers maybe_fused_next_token_loss next_token_loss",
        ),
        "_blockwise_cross_entropy_loss": "levanter.upstream.facades.losses:blockwise_cross_entropy_loss",
    },
    "levanter.optim.skipstep": _all("levanter.upstream.facades.optimizers", "SkipStepState"),
    "levanter.optim.skip_steps:SkipStepConfig": _all("levanter.upstream.facades.optimizers", "wrap"),
    "levanter.layers.rotary:RotaryConfig": {"build": f"{_LAYERS}:build_rotary"},
    "levanter.utils.hf_utils": _all(_TOKENIZERS, "byte_length_of_token num_cpus_used_by_tokenizer"),
    "levanter.compat.hf.tokenizer:FastTokenizer": _all(
        _TOKENIZERS,
        "all_special_ids all_special_tokens batch_decode bos_token convert_tokens_to_ids eos_token is_fast "
        "model_max_length operator pad pad_token pad_token_id padding_side save_pretrained "
        "special_tokens_map tokenize unk_token",
    ),
    "levanter.data.utils": _all(_CACHES, "batched"),
    "levanter.store": _STORES,
    "levanter.store.cache": {
        **_STORES,
        "LEDGER_FILE_NAME": f"{_CACHES}:LEDGER_FILE_NAME",
        "_get_builder_actor": f"{_CACHES}:builder_actor",
    },
    "levanter.store.jagged_array": _all(_JAGGED, "JaggedArrayStore PreparedBatch"),
    "levanter.store.tree_store": {"TreeStore": f"{_JAGGED}:TreeStore", "TreeBatchPreparer": f"{_JAGGED}:BatchPreparer"},
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
        "_load_metadata": f"{_SAVED}:load_metadata",
    },
    "levanter.checkpoint.checkpointer:Checkpointer": {
        "load_checkpoint": f"{_SAVED}:load_function",
        "on_step": f"{_SAVED}:on_step",
        "wait_until_finished": f"{_SAVED}:wait_until_finished",
    },
    "levanter.tensorstore_serialization": _TREES,
    "levanter.compat.hf_checkpoints": {
        "_convert_to_jnp": f"{_DICTS}:convert_to_jnp",
        "save_hf_checkpoint_callback": f"{_LORA}:save_hf_checkpoint_callback",
        "DEFAULT_MAX_SHARD_SIZE": f"{_HF}:MAX_SHARD_BYTES",
        **_all(_DICTS, "SAFE_TENSORS_INDEX_NAME SAFE_TENSORS_MODEL"),
    },
    "levanter.compat.torch_serialization": {
        **_all(_DICTS, "flatten_linear_layers unflatten_linear_layers"),
        "jax_tree_from_state_dict": f"{_DICTS}:tree_from_state_dict",
        "jax_tree_to_state_dict": f"{_DICTS}:tree_to_state_dict",
    },
    "levanter.models.base:ModelOutputs": _all(
        "levanter.upstream.facades.outputs",
        "array axes axis_size argmax operator astype broadcast_axis broadcast_to dot dtype flatten_axes max mean "
        "min ndim rearrange rename resolve_axis scalar select shape size slice std sum take unbind var",
    ),
    "levanter.models.base:LmHeadModel": {
        "resize_vocab": f"{_MEMBERS}:resize_vocab",
        "to_state_dict": f"{_DICTS}:to_state_dict",
    },
    "levanter.layers": {**_ATTENTION, "Attention": f"{_LAYERS}:LlamaAttention"},
    "levanter.layers.attention": {
        **_ATTENTION,
        "Attention": f"{_LAYERS}:LlamaAttention",
        "simple_attention_with_dropout": f"{_LAYERS}:dot_product_attention",
        **_all(_LAYERS, "default_attention_type materialize_mask"),
    },
    "levanter.layers.attention.mask:AttentionMask": _all(_CALLS, "causal_offset segment_ids"),
    "levanter.models.attention": {**_ATTENTION, **_all(_LAYERS, "materialize_mask")},
    "levanter.layers.flash_attention": _FLASH,
    "levanter.models.flash_attention": _FLASH,
    "levanter.models.llama": {
        "Attention": f"{_LAYERS}:LlamaAttention",
        **_all(_LAYERS, "LlamaAttention LlamaDecoderLayer LlamaRMSNorm LlamaRotaryEmbedding"),
        "_apply_rotary_pos_emb": f"{_LAYERS}:apply_rotary_pos_emb",
        "_rotate_half": f"{_LAYERS}:rotate_half",
    },
    "levanter.models.gpt2": {"ACT2FN": "levanter.layers.activation:ACTIVATIONS"},
    "levanter.models.registry:LmConfig": {
        "attention_config": f"{_LAYERS}:attention_config",
        "Heads": f"{_MEMBERS}:Heads",
        "KVHeads": f"{_MEMBERS}:KVHeads",
        "default_hf_checkpoint_converter": f"{_MEMBERS}:default_converter",
    },
    "levanter.data.config:LmDataConfig": _all(_MEMBERS, "id train_urls validation_urls"),
    "levanter.trainer.config:TrainerConfig": _all(_MEMBERS, "batch_schedule fsdp_axis tensor_parallel_axes wandb"),
    "levanter.trainer": {
        **_all(_STATE, "StepInfo TrainerState"),
        "Trainer": f"{_TRAINING}:Trainer",
        "OptimizerConfig": "levanter.optim:AdamConfig",
    },
    "levanter.trainer_state": _all(_STATE, "TrainerState"),
    "levanter.callbacks": _all(_STATE, "StepInfo"),
    "levanter.optim": _AVERAGES,
    "levanter.optim.model_averaging": {
        **_AVERAGES,
        **_all("levanter.upstream.facades.optimizers", "EmaDecaySqrtModelAveraging EmaModelAveraging"),
    },
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
