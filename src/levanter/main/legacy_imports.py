"""Names that scripts of earlier generations import, and where each is now: one table, and the hook that reads it.

Nothing in the project uses this module. `levanter/__init__.py` asks it for what it does not find, so scripts need no
change; of each name they use this way its new place is told once, as a `DeprecationWarning`. `NAMES` has modules and
classes (`module:Class`) with their names, `GONE` those that are not carried over, with the reason. The tables in
`docs/migrating.md` are made from both.
"""

import types
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from typing import Any

_MODELS = "levanter.main.facades.models"
_TRAINER = "levanter.main.facades.trainer"
_MESH = "levanter.main.facades.mesh"
_TRACKER = "levanter.main.facades.tracker"
_DATA = "levanter.main.facades.data"
_BOOKS = "levanter.main.facades.books"
_CHECKPOINTS = "levanter.main.facades.checkpoints"
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
        "ChatLmDatasetFormat",
        "DatasetComponent",
        "LmDataConfig",
        "LmDatasetFormatBase",
        "PrebuiltLmDatasetFormat",
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
    "LmDatasetSourceConfigBase": "levanter.data.sources:DatasetSourceBase",
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

NAMES: Mapping[str, Mapping[str, str]] = {
    "levanter": {"initialize": f"{_TRAINER}:initialize_all"},
    "levanter.models.lm_model": _EXAMPLES,
    "levanter.models.attention": _MASKS,
    "levanter.models.rotary": _ROPE,
    "levanter.models.gpt2": {"Gpt2LMHeadModel": _DECODER},
    "levanter.models.llama": {"LlamaLMHeadModel": _DECODER},
    "levanter.models.mistral": {"MistralLMHeadModel": _DECODER},
    "levanter.models.mixtral": {"MixtralLMHeadModel": _DECODER},
    "levanter.models.qwen3_moe": {"Qwen3MoeConfig": "levanter.models:Qwen3MoeConfig"},
    "levanter.models.qwen": {"QwenLMHeadModel": _DECODER, "Qwen3LMHeadModel": _DECODER},
    "levanter.models.gemma": {
        "GemmaLMHeadModel": _DECODER,
        "Gemma2LMHeadModel": _DECODER,
        "Gemma3LMHeadModel": _DECODER,
    },
    "levanter.models.olmo": {"Olmo2LMHeadModel": _DECODER, "Olmo3LMHeadModel": _DECODER},
    "levanter.models.registry:LmConfig": {
        "Pos": f"{_MODELS}:Pos",
        "seq_len": f"{_MODELS}:seq_len",
        "hf_checkpoint_converter": f"{_MODELS}:hf_checkpoint_converter",
    },
    "levanter.models.base:LmHeadModel": {
        "activations": f"{_MODELS}:activations_of",
        "compute_next_token_loss": f"{_MODELS}:loss_of",
        "get_lm_head": f"{_MODELS}:head_of",
    },
    "levanter.layers.rotary": _ROPE,
    "levanter.trainer.config:TrainerConfig": {
        "batch_axis": f"{_TRAINER}:batch_axis_name",
        "batch_axis_name": f"{_TRAINER}:batch_axis_name",
        "compute_axis_mapping": f"{_TRAINER}:compute_axis_mapping",
        "data_axis_size": f"{_TRAINER}:data_axis_size",
        "device_mesh": f"{_TRAINER}:device_mesh",
        "eval_batch_size": f"{_TRAINER}:eval_batch_size",
        "EvalBatch": f"{_TRAINER}:EvalBatch",
        "initialize": f"{_TRAINER}:initialize",
        "num_slices": f"{_TRAINER}:num_slices",
        "parameter_axis_mapping": f"{_TRAINER}:parameter_axis_mapping",
        "replica_axis_size": f"{_TRAINER}:replica_axis_size",
        "TrainBatch": f"{_TRAINER}:TrainBatch",
        "use_device_mesh": f"{_TRAINER}:use_device_mesh",
    },
    "levanter.data": {**_OLD_DATA},
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
        "RepoRef": "levanter.compat.hf.refs:RepoRef",
        "load_tokenizer": "levanter.compat.hf.tokenizer:load",
    },
    "levanter.tracker": _GLOBAL_TRACKER,
    "levanter.tracker.tracker": {
        "Tracker": "levanter.tracker:Tracker",
        "TrackerConfig": "levanter.tracker:TrackerConfig",
        "CompositeTracker": "levanter.tracker:CompositeTracker",
        "NoopConfig": "levanter.tracker:NoopConfig",
        "NoopTracker": "levanter.tracker:NoopTracker",
    },
    "levanter.tracker.tracker_fns": _GLOBAL_TRACKER,
    "levanter.callbacks": {
        "StepInfo": "levanter.trainer.report:StepReport",
        "profiler": "levanter.callbacks.profiler",
        "watch": "levanter.callbacks.watch",
    },
    "levanter.callbacks.watch": {"WatchConfig": "levanter.trainer:WatchConfig"},
    "levanter.callbacks.profiler": {"ProfilerConfig": "levanter.trainer:ProfilerConfig"},
    "levanter.optim.muon": {"MuonConfig": "levanter.optim:MuonConfig"},
    "levanter.distributed": {
        "DistributedConfig": "levanter.trainer:DistributedConfig",
        "RayConfig": f"{_TRAINER}:RayConfig",
    },
    "levanter.eval_harness": {
        "LmEvalHarnessConfig": "levanter.main.absent_configs:HarnessConfig",
        "TaskConfig": "levanter.main.absent_configs:HarnessTaskConfig",
        "EvalHarnessMainConfig": "levanter.main.absent_configs:EvalHarnessConfig",
    },
    "levanter.utils.mesh": {"MeshConfig": "levanter.mesh:MeshConfig"},
    "levanter.mesh.config:MeshConfig": {
        "axis_shapes": f"{_MESH}:axis_shapes",
        "resolved_compute_mapping": f"{_MESH}:compute_mapping",
        "resolved_param_mapping": f"{_MESH}:parameter_mapping",
    },
    "levanter.utils.jax_utils": {
        "best_effort_sharding": "haliax_ext.best_effort:best_effort_sharding",
        "create_fsdp_mesh": f"{_MESH}:create_fsdp_mesh",
        "parameter_count": f"{_MESH}:parameter_count",
    },
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
    "levanter.main.eval_careless_profiled": _CARELESS,
    "levanter.main.eval_pz": _CARELESS,
    "levanter.main.marin_eval_sliding_total": _CARELESS,
}
"""Module, or `module:Class` → name there → where it is now (`module:name`, or a module)."""

_HARNESS = "the evaluation harness is not here yet; `eval_lm` gives losses and bits per byte"
_FAMILY = "a family that is not here yet; its blocks are read and refused by name"
_LORA = "low-rank adapters are not here yet"
_HISTOGRAM = "`levanter.memorization.plots` draws them, and every run writes one"

GONE: Mapping[str, str] = {
    "levanter.trainer.Trainer": "a run is described, then executed: levanter.main.train_lm.describe and execute",
    "levanter.trainer_state.TrainerState": "levanter.trainer.state.TrainState holds what a step carries on",
    "levanter.checkpoint.load_checkpoint": "restore(latest(base), planned_targets(plan, mesh)) reads into final shards",
    "levanter.checkpoint.load_checkpoint_or_initialize": "train_lm resumes by itself; restore(…) for the rest",
    "levanter.checkpoint.save_checkpoint": "Checkpointer(base, …).save(step, arrays, metadata)",
    "levanter.compat.hf_checkpoints.save_hf_checkpoint_callback": "train_lm exports at every hf_save_steps",
    "levanter.compat.hf_checkpoints.upload_to_hub": "folders are written, not uploaded; `hf upload` uploads one",
    "levanter.eval.TaggedEvaluator": "levanter.main.eval_lm.describe and execute evaluate; levanter.eval adds up",
    "levanter.eval.cb_tagged_evaluate": "train_lm evaluates at every trainer.steps_per_eval",
    "levanter.eval.cb_tagged_lm_evaluate": "train_lm evaluates at every trainer.steps_per_eval",
    "levanter.eval.eval_model": "levanter.main.eval_lm.describe and execute evaluate",
    "levanter.eval_harness.run_lm_eval_harness": _HARNESS,
    "levanter.callbacks.pbar_logger": "levanter.io.Progress",
    "levanter.callbacks.log_performance_stats": "train_lm logs throughput itself",
    "levanter.callbacks.compute_validation_loss": "train_lm evaluates at every trainer.steps_per_eval",
    "levanter.callbacks.eval_loss_loop": "levanter.main.eval_lm.describe and execute evaluate",
    "levanter.tracker.jit_log": "a step returns what is logged; nothing is logged from inside of it",
    "levanter.tracker.defer_tracker_for_jit": "a step returns what is logged; nothing is logged from inside of it",
    "levanter.data.text.CausalLmDataset": "levanter.data.build_training makes the rows of a run",
    "levanter.data.DataLoader": "levanter.data.batches reads rows ahead of the devices",
    "levanter.data.ListAsyncDataset": "levanter.data.DirectDatasetComponent holds texts in place",
    "levanter.models.gpt2_hyena.Gpt2HyenaConfig": _FAMILY,
    "levanter.models.whisper.WhisperConfig": _FAMILY,
    "levanter.models.apertus.ApertusConfig": _FAMILY,
    "levanter.optim.sophia.SophiaHConfig": "an optimizer that is not here; its blocks are read and refused by name",
    "levanter.lora.LoraConfig": _LORA,
    "levanter.lora.loraize": _LORA,
    "levanter.adaptor.lora.LoraConfig": _LORA,
    "levanter.books.util.create_pz_histogram": _HISTOGRAM,
    "levanter.books.util.create_pz_histogram_linear": _HISTOGRAM,
    "levanter.books.util.sliding_lm_examples": "levanter.memorization.windows.build_windows makes one token matrix",
    "levanter.books.util.token_sliding_lm_examples": "levanter.memorization.windows.build_windows makes one matrix",
    "levanter.utils.mesh.create_mesh_from_axis_specs": "trainer.device_mesh, or MeshSpec.of(…).build(devices)",
}
"""What is not carried over → what there is instead, or why there is nothing."""


class GoneError(ImportError):
    """A name of an earlier generation that is not carried over."""


def look_up(at: str, name: str, *instance: Any, stacklevel: int = 4) -> Any:
    """What a name of an earlier generation stands for.

    Args:
        at: the module that was asked, or its class as `module:Class`.
        name: what it was asked for.
        instance: for a class, the object whose member is wanted.
        stacklevel: of the warning: who asked.

    Raises:
        GoneError: it is not carried over.
        AttributeError: it was never there.
    """
    old = f"{at.replace(':', '.')}.{name}"
    if old in GONE:
        raise GoneError(f"{old} is not carried over: {GONE[old]} (docs/migrating.md)")
    target = NAMES.get(at, {}).get(name)
    if target is None:
        raise AttributeError(f"{at.replace(':', '.')} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    if not attribute:
        return import_module(module)
    found = getattr(import_module(module), attribute)
    if instance:
        warn_once(old, f"{old} is kept for older scripts ({module}.{attribute})", stacklevel)
        return found(*instance)
    warn_once(old, f"{old} is {module}.{attribute} now", stacklevel)
    return found


_told: set[str] = set()


def warn_once(old: str, message: str, stacklevel: int) -> None:
    """Tells of an earlier name, the first time it is used."""
    if old not in _told:
        _told.add(old)
        warnings.warn(message, DeprecationWarning, stacklevel=stacklevel + 1)


def find_spec(name: str) -> ModuleSpec | None:
    """A module of an earlier generation that is made of the table; None where the table has none."""
    modules = {key for key in NAMES if ":" not in key} | {old.rpartition(".")[0] for old in GONE}
    inside = any(module.startswith(f"{name}.") for module in modules)
    if name not in modules and not inside:
        return None
    return ModuleSpec(name, _OfTable(), is_package=inside)  # pyright: ignore[reportArgumentType]


class _OfTable:
    """Makes a module whose names are those of the table."""

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        del spec

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"{name} of an earlier generation; see docs/migrating.md."
        look: Callable[[str], Any] = lambda attribute: look_up(name, attribute, stacklevel=3)  # noqa: E731
        vars(module)["__getattr__"] = look

    def get_code(self, name: str) -> types.CodeType:
        """`python -m` of an old name runs the module that is there now."""
        targets = {"levanter.eval_harness": "levanter.main.eval_harness"}
        now = targets.get(name) or next(iter(NAMES[name].values())).partition(":")[0]
        return compile(f"import runpy; runpy.run_module({now!r}, run_name='__main__', alter_sys=True)", name, "exec")
