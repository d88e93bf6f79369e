"""The names of earlier generations and their current places. Those without a successor are in
`levanter.upstream.unsupported.names`.

    NAMES["levanter.models.lm_model"]["LmConfig"]         a name of a module: `module:name`, or a module
    NAMES["levanter.models.registry:LmConfig"]["Pos"]     a member of a class: a function of the object
    NAMES["levanter.models.registry:LmConfig"]["from_hf_config"]     or of the class, for members in `CLASS_MEMBERS`

`levanter.upstream.imports` reads the table for scripts, `levanter.upstream.migration_tables` for `docs/migrating.md`.
"""

from collections.abc import Mapping

from levanter.upstream.tool_names import TOOL_CLASS_MEMBERS, TOOL_NAMES

_MODELS = "levanter.upstream.facades.models"
_TRAINER = "levanter.upstream.facades.trainer"
_MESH = "levanter.upstream.facades.mesh"
_TRACKER = "levanter.upstream.facades.tracker"
_DATA = "levanter.upstream.facades.data"
_BOOKS = "levanter.upstream.facades.books"
_CHECKPOINTS = "levanter.upstream.facades.checkpoints"
_HF = "levanter.upstream.facades.hugging_face"
_PRECISION = "levanter.upstream.facades.precision"
_HELPERS = "levanter.upstream.facades.helpers"
_ABSENT = "levanter.upstream.unsupported.configs"
_DPO = "levanter.commands.train.dpo.config"
_GAP = "levanter.commands.evaluate.gap.config"
_SFT = "levanter.commands.train.lm.sft_config"
_ROTARY = "levanter.layers.rotary"
_DECODER = "levanter.models.decoder:DecoderLmHeadModel"

_EXAMPLES = {
    "LmConfig": "levanter.models:LmConfig",
    "LmExample": f"{_MODELS}:LmExample",
    "LmHeadModel": "levanter.models.base:LmHeadModel",
    "LmWithHfSerializationMixin": "levanter.models.base:LmHeadModel",
    "compute_next_token_loss": f"{_MODELS}:compute_next_token_loss",
}
_FORMATS = {
    name: f"levanter.data:{name}"
    for name in (
        "BlockShuffleConfig",
        "ChatLmDatasetFormat",
        "ConcatDatasetComponent",
        "DatasetComponent",
        "DatasetComponentBase",
        "DirectDatasetComponent",
        "LmDataConfig",
        "LmDatasetFormatBase",
        "PrebuiltLmDatasetFormat",
        "PreferenceChatLmDatasetFormat",
        "SupervisedLmDatasetFormat",
        "TextLmDatasetFormat",
    )
}
_OLD_DATA = {
    "LMMixtureDatasetConfig": f"{_DATA}:OldDataConfig",
    "UrlSingleDatasetLMConfig": f"{_DATA}:OldDataConfig",
    "HfSingleDatasetLMConfig": f"{_DATA}:OldDataConfig",
    "UrlDatasetSourceConfig": "levanter.data:UrlDatasetSource",
    "HfDatasetSourceConfig": "levanter.data:HfDatasetSource",
    "LMDatasetSourceConfig": "levanter.data.sources:DatasetSourceBase",
    "LmDatasetSourceConfigBase": "levanter.data.sources:DatasetSourceBase",
    "LMDatasetConfig": f"{_DATA}:OldDataConfig",
    "SingleDatasetLMConfig": f"{_DATA}:OldDataConfig",
    "SingleDatasetLMConfigBase": f"{_DATA}:OldDataConfig",
    "LMTaskConfig": f"{_DATA}:OldDataConfig",
}
_CHECKPOINT_CONFIGS = {
    "CheckpointerConfig": "levanter.trainer:CheckpointerConfig",
    "CheckpointInterval": "levanter.trainer:CheckpointInterval",
}
_GLOBAL_TRACKER = {
    "current_tracker": f"{_TRACKER}:current_tracker",
    "get_tracker": f"{_TRACKER}:get_tracker",
    "log": f"{_TRACKER}:log",
    "log_configuration": f"{_TRACKER}:log_hyperparameters",
    "log_hyperparameters": f"{_TRACKER}:log_hyperparameters",
    "log_metrics": f"{_TRACKER}:log",
    "log_summary": f"{_TRACKER}:log_summary",
    "set_global_tracker": f"{_TRACKER}:set_global_tracker",
}
_MASKS = {"AttentionMask": "levanter.layers.attention:AttentionMask"}
_ROPE = {
    "RotaryEmbeddingsConfig": f"{_ROTARY}:RotaryConfig",
    "DefaultRotaryEmbeddingsConfig": f"{_ROTARY}:DefaultRotaryConfig",
    "LinearRotaryEmbeddingsConfig": f"{_ROTARY}:LinearRotaryConfig",
    "Llama3RotaryEmbeddingsConfig": f"{_ROTARY}:Llama3RotaryConfig",
    "YarnRotaryEmbeddingsConfig": f"{_ROTARY}:YarnRotaryConfig",
}
_CARELESS = {
    "EvalCarelessLmConfig": "levanter.main.eval_careless_lm:EvalCarelessLmConfig",
    "main": "levanter.main.eval_careless_lm:main",
}

_MODULE_NAMES: Mapping[str, Mapping[str, str]] = {
    # Keys are modules of earlier generations or, after a colon, classes of today's modules with earlier members.
    "levanter": {"current_tracker": f"{_TRACKER}:current_tracker", "initialize": f"{_TRAINER}:initialize_all"},
    "levanter.layers": _MASKS,
    "levanter.models.lm_model": _EXAMPLES,
    "levanter.models.attention": _MASKS,
    "levanter.models.rotary": _ROPE,
    "levanter.models.gpt2": {"Gpt2LMHeadModel": _DECODER},
    "levanter.models.llama": {"LlamaLMHeadModel": _DECODER},
    "levanter.models.mistral": {"MistralLMHeadModel": _DECODER},
    "levanter.models.mixtral": {"MixtralLMHeadModel": _DECODER},
    "levanter.models.qwen3_moe": {"Qwen3MoeConfig": "levanter.models:Qwen3MoeConfig", "Qwen3MoeLMHeadModel": _DECODER},
    "levanter.models.olmo3": {"Olmo3Config": "levanter.models:Olmo3Config", "Olmo3LMHeadModel": _DECODER},
    "levanter.models.qwen": {"QwenLMHeadModel": _DECODER, "Qwen3LMHeadModel": _DECODER},
    "levanter.models.gemma": {
        "GemmaLMHeadModel": _DECODER,
        "Gemma2LMHeadModel": _DECODER,
        "Gemma3LMHeadModel": _DECODER,
    },
    "levanter.models.olmo": {"Olmo2LMHeadModel": _DECODER, "Olmo3LMHeadModel": _DECODER},
    "levanter.models.registry:LmConfig": {
        "Pos": f"{_MODELS}:Pos",
        "KeyPos": f"{_MODELS}:KeyPos",
        "seq_len": f"{_MODELS}:seq_len",
        "model_type": f"{_MODELS}:model_type",
        "flops_per_token": f"{_MODELS}:flops_per_token",
        "total_trainable_params": f"{_MODELS}:total_trainable_params",
        "from_hf_config": f"{_HF}:from_hf_config",
        "hf_checkpoint_converter": f"{_MODELS}:hf_checkpoint_converter",
        "to_hf_config": f"{_HF}:to_hf_config",
    },
    "levanter.models.precision:PolicyText": {
        name: f"{_PRECISION}:{name}"
        for name in (
            "cast_to_compute",
            "cast_to_output",
            "cast_to_param",
            "compute_dtype",
            "output_dtype",
            "param_dtype",
        )
    },
    "levanter.models.base:LmHeadModel": {
        "activations": f"{_MODELS}:activations_function",
        "compute_next_token_loss": f"{_MODELS}:loss_function",
        "get_lm_head": f"{_MODELS}:lm_head",
        "Pos": f"{_MODELS}:position_axis",
        "vocab_size": f"{_MODELS}:vocab_size",
    },
    "levanter.layers.rotary": _ROPE,
    "levanter.trainer.config:TrainerConfig": {
        "batch_axis": f"{_TRAINER}:batch_axis_name",
        "batch_axis_name": f"{_TRAINER}:batch_axis_name",
        "compute_axis_mapping": f"{_TRAINER}:compute_axis_mapping",
        "data_axis_size": f"{_TRAINER}:data_axis_size",
        "data_dcn_axis_size": f"{_TRAINER}:data_dcn_axis_size",
        "data_ici_axis_size": f"{_TRAINER}:data_ici_axis_size",
        "device_mesh": f"{_TRAINER}:device_mesh",
        "eval_batch_size": f"{_TRAINER}:eval_batch_size",
        "EvalBatch": f"{_TRAINER}:EvalBatch",
        "initialize": f"{_TRAINER}:initialize",
        "microbatch_size": f"{_TRAINER}:microbatch_size",
        "num_devices_per_slice": f"{_TRAINER}:num_devices_per_slice",
        "num_slices": f"{_TRAINER}:num_slices",
        "parameter_axis_mapping": f"{_TRAINER}:parameter_axis_mapping",
        "replica_axis_size": f"{_TRAINER}:replica_axis_size",
        "TrainBatch": f"{_TRAINER}:TrainBatch",
        "use_device_mesh": f"{_TRAINER}:use_device_mesh",
    },
    # Only names that today's module lacks; existing ones never reach the table.
    "levanter.data": {**_OLD_DATA},
    "levanter.data.config:LmDataConfig": {"the_tokenizer": f"{_HF}:the_tokenizer"},
    "levanter.optim.config:OptimizerConfig": {"lr_scheduler": f"{_TRAINER}:lr_scheduler"},
    "levanter.data.text": {**_FORMATS, **_OLD_DATA},
    "levanter.checkpoint": {
        **_CHECKPOINT_CONFIGS,
        "discover_latest_checkpoint": f"{_CHECKPOINTS}:discover_latest_checkpoint",
        "is_checkpoint_path": f"{_CHECKPOINTS}:is_checkpoint_path",
        "latest_checkpoint_path": f"{_CHECKPOINTS}:latest_checkpoint_path",
    },
    "levanter.compat.hf_checkpoints": {
        "HFCheckpointConverter": "levanter.compat.hf.converter:HFCheckpointConverter",
        "HFCompatConfig": "levanter.models:LmConfig",
        "ModelWithHfSerializationMixin": "levanter.models.base:LmHeadModel",
        "LmWithHfSerializationMixin": "levanter.models.base:LmHeadModel",
        "RepoRef": f"{_HF}:OldRepoRef",
        "load_tokenizer": f"{_HF}:load_tokenizer",
    },
    "levanter.compat.hf.tokenizer:FastTokenizer": {
        name: f"{_HF}:{name}"
        for name in (
            "as_hf_tokenizer",
            "bos_token_id",
            "convert_ids_to_tokens",
            "encode",
            "eos_token_id",
            "get_vocab",
            "name_or_path",
        )
    },
    "levanter.tokenizers": {
        "HfMarinTokenizer": "levanter.compat.hf.tokenizer:FastTokenizer",
        "MarinTokenizer": "levanter.data:Tokenizer",
        "load_tokenizer": f"{_HF}:load_tokenizer",
    },
    "levanter.data.passthrough_tokenizer": {"PassthroughTokenizer": "levanter.data:PassthroughTokenizer"},
    "levanter.tracker": _GLOBAL_TRACKER,
    "levanter.tracker.tracker": {
        "Tracker": "levanter.tracker:Tracker",
        "TrackerConfig": "levanter.tracker:TrackerConfig",
        "CompositeTracker": "levanter.tracker:CompositeTracker",
        "NoopConfig": "levanter.tracker:NoopConfig",
        "NoopTracker": "levanter.tracker:NoopTracker",
    },
    "levanter.tracker.tracker_fns": _GLOBAL_TRACKER,
    "levanter.tracker.telemetry": {"TelemetryConfig": "levanter.tracker:TelemetryConfig"},
    "levanter.callbacks": {
        "ProgressWatchdogConfig": "levanter.trainer:ProgressWatchdogConfig",
        "profiler": "levanter.callbacks.profiler",
        "watch": "levanter.callbacks.watch",
    },
    "levanter.callbacks.progress_watchdog": {"ProgressWatchdogConfig": "levanter.trainer:ProgressWatchdogConfig"},
    "levanter.callbacks.watch": {"WatchConfig": "levanter.trainer:WatchConfig"},
    "levanter.callbacks.profiler": {"ProfilerConfig": "levanter.trainer:ProfilerConfig"},
    "levanter.optim": {"RMSPropMomentumConfig": "levanter.optim:RmsPropConfig"},
    "levanter.optim.clip_update_norm": {"ClipUpdateNormConfig": "levanter.optim:ClipUpdateNormConfig"},
    "levanter.optim.rmsprop": {"RMSPropMomentumConfig": "levanter.optim:RmsPropConfig"},
    "levanter.optim.skipstep": {"SkipStepConfig": "levanter.optim:SkipStepConfig"},
    "levanter.distributed": {
        "DistributedConfig": "levanter.trainer:DistributedConfig",
        "RayConfig": f"{_TRAINER}:RayConfig",
    },
    "levanter.eval_harness": {
        "LmEvalHarnessConfig": "levanter.eval.harness.config:HarnessConfig",
        "ProfilerConfig": "levanter.trainer:ProfilerConfig",
        "SampleLoggingConfig": "levanter.eval.harness.config:SampleLoggingConfig",
        "TaskConfig": "levanter.eval.harness.config:HarnessTaskConfig",
        "EvalHarnessMainConfig": "levanter.main.eval_harness:EvalHarnessConfig",
    },
    "levanter.eval_harness_config": {"TaskConfig": "levanter.eval.harness.config:HarnessTaskConfig"},
    "levanter.utils.mesh": {"MeshConfig": "levanter.mesh:MeshConfig"},
    "levanter.mesh.config:MeshConfig": {
        "axis_shapes": f"{_MESH}:axis_shapes",
        "resolved_compute_mapping": f"{_MESH}:compute_mapping",
        "resolved_param_mapping": f"{_MESH}:parameter_mapping",
    },
    "levanter.utils.fsspec_utils": {"exists": "levanter.io:exists", "join_path": "levanter.io:join"},
    "levanter.utils.jax_utils": {
        "barrier_sync": f"{_HELPERS}:barrier_sync",
        "best_effort_sharding": "haliax_ext.best_effort:best_effort_sharding",
        "create_fsdp_mesh": f"{_MESH}:create_fsdp_mesh",
        "is_inexact_arrayish": f"{_HELPERS}:is_inexact_arrayish",
        "key_iterator": f"{_HELPERS}:key_iterator",
        "local_cpu_mesh": f"{_HELPERS}:local_cpu_mesh",
        "parameter_count": f"{_MESH}:parameter_count",
        "use_cpu_device": f"{_HELPERS}:use_cpu_device",
    },
    "levanter.utils.py_utils": {"non_caching_cycle": f"{_HELPERS}:non_caching_cycle"},
    "levanter.utils.tree_utils": {"inference_mode": "equinox.nn:inference_mode"},
    "levanter.books.util": {
        name: f"{_BOOKS}:{name}"
        for name in (
            "chunk_text_to_sliding_window_token_chunks",
            "chunk_token_ids_to_sliding_windows",
            "compute_extraction_rates",
            "compute_greedy_extraction_rate",
            "compute_max_extraction_rates",
            "compute_n_for_pz_and_p",
            "compute_n_values_for_pz_and_p_list",
        )
    },
    "levanter.main.cache_dataset": {"RayCachedLMDatasetConfig": "levanter.main.cache_dataset:CacheDatasetConfig"},
    "levanter.main.export_hf_to_lm": {"ImportHfConfig": f"{_ABSENT}:ExportHfToLmConfig"},
    "levanter.main.perplexity_gap": {
        "GapFinderConfig": f"{_GAP}:PerplexityGapConfig",
        "GapFinderModelConfig": f"{_GAP}:GapModelConfig",
        "ModelPerplexityConfig": f"{_GAP}:PerplexityGapConfig",
        "score_main": "levanter.commands.evaluate.gap.run:main",
    },
    "levanter.main.sft": {"SFTConfig": f"{_SFT}:SftConfig"},
    "levanter.main.sft_mixture": {"SFTMixtureConfig": f"{_SFT}:SftMixtureConfig"},
    "levanter.main.train_asr": {"TrainASRConfig": f"{_ABSENT}:TrainAsrConfig"},
    "levanter.main.train_dpo": {
        "AdapterBaseReferenceConfig": f"{_DPO}:AdapterBaseReferenceConfig",
        "DpoReferenceConfig": f"{_DPO}:ReferenceConfig",
        "SeparateReferenceConfig": f"{_DPO}:SeparateReferenceConfig",
    },
    "levanter.main.eval_careless_profiled": _CARELESS,
    "levanter.main.eval_pz": _CARELESS,
    "levanter.main.marin_eval_sliding_total": _CARELESS,
}

# Both tables may list the same module; of equal names, the one in TOOL_NAMES wins.
NAMES: Mapping[str, Mapping[str, str]] = {
    at: {**_MODULE_NAMES.get(at, {}), **TOOL_NAMES.get(at, {})} for at in dict.fromkeys((*_MODULE_NAMES, *TOOL_NAMES))
}
"""Module, or `module:Class` → its earlier name → the current place (`module:name`, or a module)."""

_CLASS_MEMBERS: Mapping[str, tuple[str, ...]] = {"levanter.models.registry:LmConfig": ("from_hf_config",)}
CLASS_MEMBERS: Mapping[str, tuple[str, ...]] = {
    at: (*_CLASS_MEMBERS.get(at, ()), *TOOL_CLASS_MEMBERS.get(at, ()))
    for at in dict.fromkeys((*_CLASS_MEMBERS, *TOOL_CLASS_MEMBERS))
}
"""`module:Class` → its earlier names that are read from the class itself."""
