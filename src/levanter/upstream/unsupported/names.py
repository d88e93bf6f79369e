"""Names of earlier generations that are not carried over, and what to use instead.

    GONE_IN["levanter.trainer"]["Trainer TrainerHooks"]    names of a module (or class, `module:Class`), and why
    GONE_MODULES["levanter.adaptor"]                        a module, including everything in and below it, and why

`levanter.upstream.imports` refuses them with the reason, `levanter.upstream.migration_tables` lists them in
`docs/migrating.md`.
"""

from collections.abc import Mapping

# Reasons that several rows share; they are shown in errors and in docs/migrating.md.
_HARNESS = "`eval_harness` is the command; in Python, `describe` and `execute` of levanter.main.eval_harness"
_FAMILY = "a family that is not implemented yet; its config blocks are read, then refused by name"
_LORA = "`adapter:` of `train_lm` trains low-rank adapters; in Python, `levanter.models.adapters`"
_HISTOGRAM = "`levanter.memorization.plots` draws it, and every run writes one"
_STEP = "a step returns the values to log; nothing is logged from inside it"
_EVALUATES = "train_lm evaluates at every trainer.steps_per_eval"
_EVAL_LM = "levanter.main.eval_lm.describe and execute evaluate; levanter.eval aggregates"
_OPTIMIZER = "an optimizer that is not implemented; its config blocks are read, then refused by name"
_DESCRIBED = "a run is described, then executed: levanter.main.train_lm.describe and execute"
_HOOKS = "train_lm replaces hooks (evaluation, exports, statistics, profiles) by keys in `trainer`"
_ROWS = "levanter.data.build_training builds the rows of a run"
_PREFERENCES = "`train_dpo` trains on preferences; levanter.data.preference reads pairs"
_STORE = "tokens live in token stores: levanter.data.build_tokens writes and reads them"
_SPEECH = "this project trains on text only"
_SAMPLING = "`generate`, `sample_lm` and levanter.inference generate text"
_SERVING = "`python -m levanter.main.serve` serves a model by its configuration, and reads the keys of this server"
_LAYERS = "models are one decoder built from specs: levanter.models.decoder, levanter.layers"
_OPTIMIZERS = "the config builds the optax transformation: `OptimizerConfig.build(steps)`"
_LAUNCH = "levanter.infra.launch starts runs on TPU VMs, under Slurm and Ray"
_PROVIDED = "JAX provides it, or a run does it automatically"
_CONVERSATIONS = "`train_lm` trains on conversations: `format: {type: chat}` of a component"
_WATCHDOG = "trainer.progress_watchdog sets the time limits of a run"
_TYPE = "a type annotation of upstream"
_WRITES = "checkpoints are written by Orbax, each array by the hosts that hold it"
_RESIZE = "the vocabulary is neither padded nor truncated; rows beyond the tokenizer's ids are harmless"
_TELEMETRY = "the trackers are wandb, trackio, tensorboard, json_logger and json_file"
_RESTARTS = "a run ends with an exit code that says whether it can be resumed; a launcher starts it again"
_TESTS = "helpers of upstream's tests"
_EXAMPLE = "rows are `levanter.upstream.facades.models.LmExample` for scripts; levanter.data builds those of a run"

# The two commands of conversations have the same names.
_OF_SFT = {
    "DatasetType add_special_tokens create_prompt_completion_iterator reinitialize_some_tokens train": _CONVERSATIONS,
    "DEFAULT_BOS_TOKEN DEFAULT_EOS_TOKEN DEFAULT_PAD_TOKEN DEFAULT_UNK_TOKEN": "a tokenizer is used as its files say",
}

GONE_IN: Mapping[str, Mapping[str, str]] = {
    "levanter.data._prp": {"PermType Permutation next_power_of_two": "levanter.data.shuffle computes permutations"},
    "levanter.data.sharded_datasource": {
        "FirstRowsShardedDataSource SHARD_EXISTENCE_WORKERS datasource_from_hf_or_none": "ShardedDataSource is the "
        "base of a script's own sources",
    },
    "levanter.lora": {
        "LoraLinear LowRankLinear": "`loraize` returns a LoraModel; levanter.layers.low_rank is the weight of an "
        "adapted projection",
        "CONFIG_NAME DEFAULT_DICT_PREFIX LORA_R SAFETENSORS_WEIGHTS_NAME": "levanter.compat.hf.peft names files and "
        "tensors as peft does",
    },
    "levanter.store.cache": {
        "DEFAULT_LOG_LEVEL LOG_FORMAT": "levanter.io.setup_logging sets up logging",
        "ShardGroupCacheWriter": "SerialCacheWriter writes a whole cache",
        "CACHE_CATALOG_VERSION CACHE_LAYOUT_CONSOLIDATED CACHE_LAYOUT_SHARDED CONSOLIDATE_DATA_SIZE_WORKERS "
        "CacheCatalog CacheCatalogEntry ShardedCacheLayout build_cache "
        "consolidate_shard_cache_ledgers consolidate_shard_caches "
        "write_levanter_cache": "build_or_load_cache and SerialCacheWriter write a cache as one folder",
    },
    "levanter.store.jagged_array": {
        "BloscCodec CACHE_BYTES_LIMIT DEFAULT_BLOSC_CODEC DEFAULT_CHUNK_SIZE DEFAULT_WRITE_CHUNK_SIZE "
        "charge_store_read_budget set_jagged_array_read_cache_bytes": "JaggedArrayStore has one layout",
    },
    "levanter.store.tree_store": {"heuristic_is_leaf heuristic_is_leaf_batched render_tree_path": _PROVIDED},
    "levanter.utils.hf_utils": {"HfTokenizer": _TYPE},
    "levanter": {"analysis": "`viz_logprobs` and `plan` write pages", "grug": "array-first models are not supported"},
    "levanter.trainer": {
        "TrainerHooks TrainStepResult WrappedLossFunction": _HOOKS,
        "AllConfig initialize DEFAULT_JAX_CONFIG": "`levanter.initialize(config)` sets up a script",
    },
    "levanter.trainer.config:TrainerConfig": {
        "batch_axis_at_step": "trainer.train_batch_size is a number, or a list of {start, value}",
        "checkpoint_search_paths": "levanter.checkpoint.latest(base, …) searches several folders",
        "mesh_axis_specs": "trainer.mesh is the config, trainer.device_mesh the mesh",
    },
    "levanter.trainer.config_blocks:CheckpointerConfig": {
        "create": "Checkpointer(base, …).save(step, arrays, metadata)",
        "expanded_path": "base_path, followed by the run's id if append_run_id_to_base_path",
    },
    "levanter.data.config:LmDataConfig": {
        "build_caches build_token_datasets cache_dir_for train_grug_sets train_set train_sets": _ROWS,
        "tagged_eval_sets validation_grug_sets validation_set validation_sets": "levanter.data.resolve_evaluation "
        "finds the sets, build_sequences makes their rows",
    },
    "levanter.trainer_state": {
        "DataclassInstance": _TYPE,
        "InsideJitInfo cast_params_by_trainability init_optimizer_for_trainables make_floating_point_trainable_filter "
        "saveable_training_mask take_train_step trainables_only": "trainer.trainable selects what is trained; "
        + _DESCRIBED,
    },
    "levanter.checkpoint": {
        "EpochCheckpointer CheckpointRetention": "trainer.checkpointer.keep lists the steps of permanent checkpoints, "
        "save_interval sets the time between temporary ones",
        "PathLike": _TYPE,
        "save_metadata tree_deserialise_leaves tree_serialise_leaves": "save_checkpoint and load_checkpoint do both",
        "CheckpointDebugConfig CheckpointDebugStateProvider register_debug_checkpointer_state_provider "
        "unregister_debug_checkpointer_state_provider": "save times are always logged",
        "CheckpointCandidate discover_checkpoint_candidates": "levanter.checkpoint.find_checkpoints",
    },
    "levanter.checkpoint.checkpointer:Checkpointer": {
        "load_model": "load_checkpoint(model, path, subpath='model')",
    },
    "levanter.compat.torch_serialization": {
        "StateDictSerializationMixin apply_prefix default_eqx_module_from_state_dict default_eqx_module_to_state_dict "
        "default_update_state_dict_with_eqx_module save_state_dict stack_state_dict to_numpy_state_dict "
        "unstack_state_dict update_state_dict_with_jax_tree": "model.to_state_dict() gives tensors by Hugging Face's "
        "names; haliax.state_dict is for modules of Haliax's",
    },
    "levanter.compat.hf_checkpoints": {
        "KEYS_TO_COPY_FROM_BASE_CONFIG LevConfig MConfig": "levanter.compat.hf.config_bridge: config.json",
        "PYTORCH_MODEL PYTORCH_WEIGHTS_INDEX_NAME": "pickled checkpoints are not read: convert them to safetensors",
        "upload_to_hub": "exports are written but not uploaded; run `hf upload` on the folder",
        "DEFAULT_EXPORT_HOST_BUDGET_BYTES MAX_CONCURRENT_HF_SHARDS": "tensors are written one at a time; "
        "levanter.compat.hf.index.MAX_SHARD_BYTES is the size of a file",
        "build_generation_config GenerationConfigDict": "train_lm writes generation_config.json "
        "(hf_generation_eos_token_ids)",
        "ASRWithHfSerializationMixin load_processor": _SPEECH,
    },
    "levanter.compat.hf.converter:HFCheckpointConverter": {
        "with_tokenizer_padded_to_match_model": "not needed: a tokenizer may have fewer ids than the model has rows",
    },
    "levanter.models.base:LmHeadModel": {
        "from_state_dict": "HFCheckpointConverter.load_pretrained reads files into final shards",
    },
    "levanter.eval": {
        "TaggedEvaluator eval_model": _EVAL_LM,
        "cb_tagged_evaluate cb_tagged_lm_evaluate": _EVALUATES,
        "BatchedTagArray DomainTaggedDataset LabeledEvalResult LabeledEvaluator LabeledLossFnOutput "
        "LmEvalExample LossFnOutput TagArray construct_labeled_log_dict construct_log_dict "
        "eval_labeled_model": _EVAL_LM,
    },
    "levanter.eval_harness": {
        "Instance LM TemplateLM evaluator": "import it from lm_eval",
        "handle_stop_sequences postprocess_generated_text": _HARNESS,
        "run_lm_eval_harness LevanterHarnessLM lm_eval_harness log_report_to_tracker "
        "run_eval_harness_main get_padding_count_from_batch get_segment_ids_from_batch": _HARNESS,
    },
    "levanter.callbacks": {
        "LossFunctionWithMetrics fold_metric unwrap_metrics": "objectives name their terms: levanter.trainer.objective",
        "compute_and_visualize_log_probs": "`viz_logprobs` writes the page",
        "log_memory_usage log_to_wandb save_xla_dumps_to_wandb": "levanter.tracker logs to every configured tracker",
        "pbar_logger": "levanter.io.Progress",
        "log_performance_stats log_step_info": "train_lm logs throughput already",
        "compute_validation_loss": _EVALUATES,
        "eval_loss_loop": _EVAL_LM,
        "profile profile_ctx start_profiler stop_profiler_and_maybe_wait": "trainer.profiler selects the "
        "steps to profile",
        "wandb_xla_logger": "`levanter.main.plan … --keep_hlo FOLDER` writes the programs",
        "log_epoch_progress mixture_weight_logging_hook": _HOOKS,
        "ProgressEvent ProgressWatchdog progress_event_scope": _WATCHDOG,
        "CBInfo Callback CallbackStateView JitCallback LambdaCallback StateCallbackRunner": _HOOKS,
    },
    "levanter.callbacks.watch": {"Target VALID_WATCH_TARGETS": "levanter.trainer.WatchConfig checks them"}
    | {"WatchCallback compute_watch_stats": "trainer.watch selects what is watched"},
    "levanter.callbacks.profiler": {"AdvancedProfileOptionValue": "levanter.trainer.ProfileOptionsConfig"}
    | {"ProfileOptionsConfig profile": "trainer.profiler selects the steps to profile"}
    | {
        "DEFAULT_XPROF_SERVICE_URL XprofUploadConfig xprof_viewer_url": "a profile stays in the run's log folder, and "
        "the run prints where",
        "XlaDumpUploadConfig upload_xla_dumps xla_dump_path": "the tracker's `save_xla_dumps` saves the folder that "
        "$XLA_FLAGS names in `--xla_dump_to`; `levanter.main.plan … --keep_hlo FOLDER` writes the programs",
    },
    "levanter.tracker": {
        "jit_log defer_tracker_for_jit": _STEP,
        "BackgroundTracker LoggableValue": "levanter.tracker.Tracker is the protocol",
        "capture_time": "time.perf_counter",
        "log_optimizer_hyperparams": "train_lm logs the learning rate already",
    },
    "levanter.tracker.telemetry": {"TelemetryTracker TrainingPhase capture_stall_diagnostics": _TELEMETRY},
    "levanter.tracker.tracker": {"DictTracker": "levanter.tracker.Tracker is a protocol of five methods"},
    "levanter.tracker.tracker_fns": {"jit_log defer_tracker_for_jit LoggableValue": _STEP},
    "levanter.tracker.background": {"maybe_wrap_background": "levanter.tracker.background.BackgroundTracker"},
    "levanter.tracker.wandb": {
        "MAX_WANDB_ARTIFACT_BYTES WandbRun is_wandb_available truncate_wandb_run_name": "levanter.tracker.WandbConfig"
    },
    "levanter.data": {
        "BlockShufflingDataset ConcatDataset": _ROWS,
        "BatchLoader build_cache dataset_from_hf dataset_from_jsonl": _STORE,
    },
    "levanter.data.text": {
        "CANONICAL_INPUT_FIELD CANONICAL_OUTPUT_FIELD SupervisedSourceConfigBase": "SupervisedLmDatasetFormat names "
        "the fields: input_key, target_key",
        "DEFAULT_IGNORE_INDEX": "rows have loss weights, not labels that are ignored",
        "LMSupervisedDatasetConfig": "a DatasetComponent with format SupervisedLmDatasetFormat",
        "LONG_STRING_WORKAROUND ws ProcessedSupervisedDict SingleTurnChatJsonlDataSource SingleTurnChatProcessor "
        "datasource_from_chat_jsonl_single_turn mk_single_turn_cached_sft_dataset "
        "preprocess_legacy_chat_template": _STORE,
        "SupervisedDataset dataset_for_format": _ROWS,
        "main": "`levanter.main.cache_dataset` builds token stores",
        "BatchEncodingDataset LEDGER_FILE TokenizedDocumentCache concatenate_and_group_texts": _STORE,
        "CausalLmDataset ChatDataset EpochDataset MultiturnChatDataset NamedLmDataset TokenSeqDataset TokenSeqDict "
        "TraceChatDataset mk_chat_sft_dataset mk_supervised_dataset dataset_for_component "
        "dataset_for_trace_chat_format DEFAULT_LM_DATA_SHUFFLE": _ROWS,
        "BatchTokenizer ChatProcessor SupervisedProcessor SupervisedTextProcessor PrebuiltCacheProcessor "
        "ProcessedChatDict ProcessedTraceChatDict TraceChatProcessor preprocessor_for_format "
        "build_lm_dataset_cache build_trace_chat_dataset_cache cached_token_count count_corpus_sizes "
        "load_lm_dataset_cache": _STORE,
        "ChatUrlDataSourceConfig SupervisedHfSourceConfig SupervisedSourceConfig SupervisedUrlSourceConfig": "a "
        "DatasetComponent with format ChatLmDatasetFormat or SupervisedLmDatasetFormat",
        "DpoExample PreferenceChatProcessor PreferenceLmDataConfig PreferencePairDataset "
        "ProcessedPreferenceChatDict dataset_for_preference_format "
        "preprocessor_for_preference_format": _PREFERENCES,
        "GrugAttentionMask GrugLmExample LabeledLmExample LmExample LossLabelSpan LossLabelSpec LOSS_IGNORE_LABEL "
        "grug_attention_mask_from_named grug_lm_example_from_named loss_label_spec_for_trace_tags "
        "loss_labels_from_spans named_attention_mask_from_grug named_lm_example_from_grug "
        "named_lm_example_from_labeled TraceChatEvaluationFormat": _EXAMPLE,
    },
    "levanter.data.dataset": {"BlockShufflingDataset DatasetBase MapFunction": _ROWS}
    | {"naive_busy_wait_until_len_at_least": "a token store is complete before a run reads it"},
    "levanter.data._preprocessor": {
        "BatchResult IdentityProcessor as_record_batch canonicalize_batch dict_from_record_batch": _STORE,
    },
    "levanter.data.sharded_dataset": {
        "JsonDataset JsonlDataset TextDataset TextUrlDataset WrappedHFDataset dataset_from_hf "
        "dataset_from_jsonl": "levanter.data.read_records reads a file",
    },
    "levanter.data.loader": {
        "stack_batches": "levanter.upstream.facades.loaders.stack_tree makes one tree of examples"
    },
    "levanter.data.mixture": {"ConcatDataset": _ROWS},
    "levanter.distributed": {
        "auto_ray_cluster": _LAUNCH,
        "LevanterSlurmCluster": "Slurm is detected automatically; " + _LAUNCH,
    },
    "levanter.logging": {
        "capture_time init_logger is_wandb_available jittable_wandb_log log_optimizer_hyperparams log_time_to_wandb "
        "save_xla_dumps_to_wandb silence_transformer_nag": "levanter.tracker records metrics, "
        "levanter.io.setup_logging sets up logging",
    },
    "levanter.mesh": {
        "local_device_grid_positions process_mesh_position process_mesh_size": "`array.sharding` places the shards",
    },
    "levanter.schedule": {"validate_schedule_sorted": "levanter.data.train_dataset.BatchSchedule checks its stages"}
    | {"BIG_INT BatchSegment": "levanter.data.train_dataset.BatchSchedule"},
    "levanter.tensorstore_serialization": {
        "ARRAY_DRIVER KVSTORE_DRIVER ReplicaRestoreMode TensorStoreReadConfig TensorStoreWriteConfig "
        "plan_array_write": _WRITES,
        "build_kvstore_spec load_array_from_tensorstore save_array_to_tensorstore": "checkpoints are complete trees",
    },
    "levanter.utils.activation": {
        "ActivationFunction JaxActivationFunction TO_FN TO_JAX_FN": "levanter.layers.activation.ACTIVATIONS",
    },
    "levanter.config": {
        "partition_spec_decode partition_spec_encode register_codecs JsonAtom DEFAULT_CONFIG_DIR": "levanter.config "
        "decodes the types it knows"
    },
    "levanter.inference.engine": {
        "FIRST_TOKEN_LOGPROB DecodeResult GenState GenerationResult InferenceEngine InferenceEngineConfig PrefillWork "
        "TokenSequenceLogprobs score_token_sequence_logprobs": "levanter.inference is a new implementation: "
        "`Request` and `SamplingParams` describe a request, `Schedule` a step, `SlotState` the state on the device",
    },
    "levanter.layers": {
        "AttentionWithSink GatedAttention LayerNormConfig LayerNormConfigBase RmsNormConfig "
        "dot_product_attention_with_sink": _LAYERS,
    },
    "levanter.layers.attention": {
        "AttentionWithSink GatedAttention MultiHeadLatentAttention MultiHeadLatentAttentionConfig "
        "default_ragged_paged_attention dot_product_attention_with_sink ragged_paged_attention "
        "tpu_ragged_paged_attention": _LAYERS,
        "KvPageCache PageBatchInfo PageTable PageTableSpec": _SAMPLING,
    },
    "levanter.layers.rotary": {
        "DefaultRotaryEmbeddings Llama3RotaryEmbeddings RotaryEmbeddings YarnRotaryEmbeddings apply_rotary_pos_emb "
        "rotary_pos_emb rotate_half": "levanter.layers.rotary.apply_rotary and RotaryConfig.tables",
    },
    "levanter.models.lm_model": {
        "LmConfigT LmT EmbeddingsT": "type variables of upstream",
        "SupportsResizeEmbeddings resize_embeddings_and_lm_head": _RESIZE,
        "split_activations": "a call returns levanter.layers.outputs.Outputs: activations and the layers' sums",
    },
    "levanter.models.rotary": {
        "RotaryEmbeddings rotary_pos_emb": "levanter.layers.rotary.apply_rotary and RotaryConfig.tables"
    },
    "levanter.models.loss": {
        "next_token_loss_weight": "levanter.models.scoring.token_logprobs",
        "cross_entropy_and_logsumexp_penalty fused_cross_entropy_loss_and_logsumexp_penalty DEFAULT_REDUCTION": "the "
        "loss never materializes [batch, position, vocab]: levanter.models.scoring",
    },
    "levanter.models.attention": {
        "Attention simple_attention_with_dropout": _LAYERS,
    },
    "levanter.models.gemma": {
        "Gemma2DecoderLayer Gemma2Transformer GemmaDecoderLayer GemmaNormConfig GemmaRMSNorm GemmaTransformer": _LAYERS,
    },
    "levanter.models.gpt2": {"Gpt2Attention Gpt2Block Gpt2Embeddings Gpt2Mlp Gpt2Transformer": _LAYERS},
    "levanter.models.llama": {
        "LlamaEmbedding LlamaMlp LlamaTransformer": _LAYERS,
    },
    "levanter.models.mixtral": {
        "MixtralDecoderLayer MixtralMoEMlp MixtralSparseMoeBlock MixtralTransformer": _LAYERS,
    },
    "levanter.models.olmo": {"Olmo2Attention Olmo2MLP Olmo2DecoderLayer Olmo2Embedding Olmo2Transformer": _LAYERS},
    "levanter.models.olmo3": {"Olmo3DecoderLayer Olmo3Transformer": _LAYERS},
    "levanter.models.qwen": {"QwenDecoderLayer QwenTransformer": _LAYERS},
    "levanter.models.qwen3_moe": {
        "Qwen3MoeDecoderLayer Qwen3MoeExperts Qwen3MoeSparseMoeBlock Qwen3MoeTransformer": _LAYERS,
    },
    # Modules of 0.2.227 of which some names have a place here; the rest of its new modules is in GONE_MODULES.
    "levanter.callbacks.progress_watchdog": {"ProgressTimeout ProgressWatchdog": _WATCHDOG},
    "levanter.model_loading": {
        "load_hf_checkpoint load_levanter_checkpoint": "levanter.commands.model.pretrained describes and loads models"
    },
    "levanter.optim": {
        "AdamHConfig AdoptConfig CautiousConfig GrugMuonConfig KronConfig MarsConfig MiniConfig MuonHConfig NamoConfig "
        "NamoDConfig ScionConfig SoapConfig": _OPTIMIZER,
        "ScaleByAdoptState ScaleByMarsState ScaleByMiniState ScaleByMuonState ScaleByRMSPropMomState "
        "ScaleByScionState ScaleBySophiaState scale_by_sophia_h": _OPTIMIZERS,
    },
    "levanter.optim.model_averaging": {
        "ModelAveraging": "the train step maintains it: levanter.trainer.averaging",
    },
    "levanter.optim.config": {
        "ConstantLrSchedule CosineLrSchedule InvLrSchedule InvSqrtDecayLrSchedule InvSqrtLrSchedule LinearLrSchedule "
        "LrScheduleContext PolynomialLrSchedule PowerLrSchedule": "`lr_schedule` takes a name or {type: …}; "
        "`OptimizerConfig.schedule(steps)` is the function",
        "HessianOptConfig": _OPTIMIZER,
    },
    "levanter.optim.muon": {
        "ScaleByMuonState scale_with_muon": _OPTIMIZERS,
        "zeropower_via_newtonschulz5": "levanter.optim.muon.orthogonal",
    },
    "levanter.optim.sophia": {
        "BaseSophiaConfig": "levanter.optim.SophiaHConfig",
        "GAMMA_SOPHIA_G GAMMA_SOPHIA_H": "`gamma` is a key of SophiaHConfig",
        "ScaleBySophiaState bias_correction scale_by_sophia_g scale_by_sophia_h sophia_g sophia_h "
        "stochastic_diag_gauss_newton stochastic_hessian_diagonal update_moment": _OPTIMIZERS,
    },
    "levanter.optim.clip_update_norm": {"ClipUpdateNormState clip_update_by_historical_norm": _OPTIMIZERS},
    "levanter.optim.rmsprop": {"ScaleByRMSPropMomState scale_by_rmsprop_momentum": _OPTIMIZERS},
    "levanter.tokenizers": {
        "chat_template_has_generation_block": "the assistant's tokens are found for any template: mask_user_turns"
    }
    | {"TokenizerBackend": "tokenizer.json is read by the `tokenizers` library, always"},
    "levanter.books.util": {
        "create_pz_histogram create_pz_histogram_linear": _HISTOGRAM,
        "sliding_lm_examples": "levanter.memorization.windows.build_windows makes one token matrix",
        "token_sliding_lm_examples": "levanter.memorization.windows.build_windows makes one matrix",
    },
    "levanter.utils.mesh": {
        "create_mesh_from_axis_specs": "trainer.device_mesh, or MeshSpec.of(…).build(devices)",
        "DEFAULT_DCN_AXIS_SPEC DEFAULT_DP_AXES DEFAULT_ICI_AXIS_SPEC DEFAULT_SHARED_MAPPING": "they are the defaults "
        "of levanter.mesh.MeshConfig",
    },
    "levanter.utils.jax_utils": {
        "as_arrayish barrier_sync_named multihost_allgather_sync tree_filter_like": _PROVIDED,
        "currently_allocated_array_memory dump_fwd_bwd_jaxprs format_currently_allocated_array_memory "
        "ordered_tree_map pytree_partial recursive_checkpoint reduce set_hardware_rng_ops": _PROVIDED,
        "sharded_tree_size estimated_free_device_memory": "`levanter.main.plan` reports the memory of each device",
        "assert_equal axis_resource_is_explicit broadcast_one_to_all broadcast_shard flops_estimate is_inside_jit "
        "is_in_jit jnp_to_python join_key leaf_key_paths move_tree_to_memory_kind multihost_broadcast_sync "
        "sync_global_devices tree_broadcast_to zeros_like_tree": _PROVIDED,
    },
    "levanter.utils.fsspec_utils": {
        "mkdirs": "levanter.io.atomic_write creates missing folders",
        "expand_glob": "levanter.io.expand takes braces and wildcards",
        "async_remove remove": "use fsspec directly",
    },
    "levanter.utils.py_utils": {
        "FailSafeJSONEncoder actual_sizeof cached_classproperty classproperty dataclass_with_default_init "
        "set_global_rng_seeds": _PROVIDED,
        "Stopwatch": "time.perf_counter",
        "logical_cpu_memory_size": "psutil.virtual_memory",
    },
    "levanter.utils.tree_utils": {
        "scan_aware_tree_map": "haliax.tree_util.scan_aware_tree_map",
        "NonePolicy PackedLeaf key_path_to_str pack_pytree tree_flatten_one_level_with_keys unpack_pytree": _PROVIDED,
    },
    "levanter.main.export_hf_to_lm": {"main": "every entry point reads Hugging Face files directly"},
    "levanter.main.inference_repl": {"repl_mode cli_mode ReplContext console weight_loader": _SAMPLING},
    "levanter.main.lora_lm": {"train": "`main` trains"},
    "levanter.main.perplexity_gap": {"gap_summary_scalars": "the tracker gets the numbers of the report"},
    "levanter.main.sft": _OF_SFT,
    "levanter.main.sft_mixture": _OF_SFT,
    "levanter.main.train_asr": {"main": _SPEECH},
    "levanter.main.train_dpo": {
        "AdapterBaseReferenceModelProvider": _PREFERENCES,
    },
}
"""Module (or `module:Class`) → names in it, separated by spaces → what to use instead, or why there is nothing."""

GONE_MODULES: Mapping[str, str] = {
    # New in 0.2.227.
    "levanter._debug_logging": _PROVIDED,
    "levanter.callbacks._iris_status": _TELEMETRY,
    "levanter.checkpoint_manifest": _WRITES,
    "levanter.compat.hf_config": "levanter.compat.hf.config_bridge: config.json",
    "levanter.compat.hf_export": "train_lm exports at every hf_save_steps; levanter.compat.hf.export writes the files",
    "levanter.cutlass_kernel_cache": "JAX's compilation cache: trainer.jax_compilation_cache_dir",
    "levanter.data.text._batch_tokenizer": _STORE,
    "levanter.layers.scan_checkpoint": "`model.gradient_checkpointing` selects what a layer keeps",
    "levanter.layers.stacked": _LAYERS,
    "levanter.model_cache": "the Hub's own cache holds what is downloaded",
    "levanter.models.modernbert": _FAMILY,
    "levanter.models.moe": _LAYERS,
    "levanter.models.snowball": _FAMILY,
    "levanter.mpmd_checkpoint": "pipelines of programs are not supported: a run is one program on all devices",
    "levanter.optim._block_partition": _OPTIMIZERS,
    "levanter.pipeline": "pipelines of programs are not supported: a run is one program on all devices",
    "levanter.recovery": _RESTARTS,
    "levanter.sharding": "`array.sharding` describes an array; levanter.main.plan shows all of a run",
    "levanter.testing": _TESTS,
    "levanter.tracker.finelog_metrics": _TELEMETRY,
    "levanter.training_control": "a run has no control page; `kill` with SIGTERM saves and ends it",
    "levanter.utils.byte_budget": _PROVIDED,
    "levanter.utils.hardware_topology": _PROVIDED,
    # Of June 2026 and before.
    "levanter.adaptor": _LORA,
    "levanter.analysis": "`viz_logprobs`, `perplexity_gap` and `plan` write pages",
    "levanter.visualization": "`viz_logprobs` writes the page",
    "levanter.callbacks._core": _HOOKS,
    "levanter.callbacks._metrics": _HOOKS,
    "levanter.callbacks.labeled_eval": "evaluation by labels is not implemented yet; tags are evaluated one by one",
    "levanter.callbacks.state_adapter": _HOOKS,
    "levanter.callbacks.tensorstore_callbacks": "checkpoints are written by Orbax",
    "levanter.compat.fsspec_safetensor": "levanter.compat.hf.index.open_weights reads safetensors by ranges",
    "levanter.data.audio": _SPEECH,
    "levanter.data.metrics_monitor": _STORE,
    "levanter.data.shard_cache": _STORE,
    "levanter.data.text.cache": _STORE,
    "levanter.data.text.datasets": "levanter.data has the configurations; " + _ROWS,
    "levanter.data.text.examples": _EXAMPLE,
    "levanter.data.text.formats": "levanter.data has the formats",
    "levanter.data.text.preference": _PREFERENCES,
    "levanter.data.text.trace_chat": "evaluation of traces is not implemented yet",
    "levanter.dpo": _PREFERENCES,
    "levanter.generator": _SAMPLING,
    "levanter.grad_accum": "a step splits its batch into microbatches automatically: trainer.per_device_parallelism",
    "levanter.grug": "array-first models are not supported; every model has named axes",
    "levanter.inference.jit_scheduler": "levanter.inference.scheduler plans on the host, levanter.inference.slot_state "
    "is the state on the device",
    "levanter.inference.openai": _SERVING,
    "levanter.inference.openai_protocol": _SERVING,
    "levanter.inference.page_table": "levanter.inference.scheduler_state holds the pool of pages and their owners",
    "levanter.inference.utils": _PROVIDED,
    "levanter.infra.cli_helpers": _LAUNCH,
    "levanter.infra.docker": _LAUNCH,
    "levanter.infra.ray_tpu": _LAUNCH,
    "levanter.infra.tpus": _LAUNCH,
    "levanter.kernels": "kernels are chosen by `model.attn_backend`: levanter.layers.attention",
    "levanter.layers.attention_mask": "levanter.layers.attention.AttentionMask",
    "levanter.layers.gated_deltanet": _LAYERS,
    "levanter.layers.kv_cache": _SAMPLING,
    "levanter.layers.normalization": "levanter.layers.norm",
    "levanter.layers.page_table": _SAMPLING,
    "levanter.layers.sampler": "levanter.inference.sampling.sample samples a token for each row",
    "levanter.megascale": _LAUNCH,
    "levanter.metrics": "levanter.trainer.metrics",
    "levanter.main.model_init": "levanter.commands.model.pretrained describes and loads models",
    "levanter.models.apertus": _FAMILY,
    "levanter.models.asr_model": _SPEECH,
    "levanter.models.gpt2_hyena": _FAMILY,
    "levanter.models.hyena": _FAMILY,
    "levanter.models.linear": _LAYERS,
    "levanter.models.whisper": _FAMILY,
    "levanter.models.backpack": _FAMILY,
    "levanter.models.longformer": _LAYERS,
    "levanter.models.longformer_scale_test": _LAYERS,
    "levanter.models.mpt": _FAMILY,
    "levanter.newdata": _ROWS,
    "levanter.optim.adam_mini": _OPTIMIZER,
    "levanter.optim.adamh": _OPTIMIZER,
    "levanter.optim.adopt": _OPTIMIZER,
    "levanter.optim.cautious": _OPTIMIZER,
    "levanter.optim.grugmuon": _OPTIMIZER,
    "levanter.optim.kron": _OPTIMIZER,
    "levanter.optim.mars": _OPTIMIZER,
    "levanter.optim.muonh": _OPTIMIZER,
    "levanter.optim.namo": _OPTIMIZER,
    "levanter.optim.scion": _OPTIMIZER,
    "levanter.optim.soap": _OPTIMIZER,
    "levanter.optim.util": _OPTIMIZERS,
    "levanter.shapes": _PROVIDED,
    "levanter.tracker.helpers": "levanter.tracker.Tracker is a protocol of five methods",
    "levanter.tracker.histogram": "trainer.watch.include_histograms",
    "levanter.utils.cloud_utils": _LAUNCH,
    "levanter.utils.flop_utils": "levanter.models.flops",
    "levanter.utils.index": _PROVIDED,
    "levanter.utils.json_utils": _PROVIDED,
    "levanter.utils.logging": "levanter.io.setup_logging",
    "levanter.utils.profile_dirs": "trainer.profiler selects the steps to profile, and a run prints where the "
    "profiles are",
    "levanter.utils.ray_utils": _LAUNCH,
    "levanter.utils.stat_utils": _PROVIDED,
    "levanter.utils.thread_utils": _PROVIDED,
    "levanter.utils.token_init": "the vocabulary is neither padded nor truncated; rows beyond the tokenizer's ids are "
    "harmless",
    "levanter.types": _PROVIDED,
    "levanter.utils.types": _PROVIDED,
}
"""A module → what to use instead of everything in and below it."""

GONE: Mapping[str, str] = {
    f"{at.replace(':', '.')}.{name}": why
    for at, rows in GONE_IN.items()
    for names, why in rows.items()
    for name in names.split()
}
"""Full name → reason, for every name of `GONE_IN`."""
