"""Every key that a document of upstream's may hold is one of ours, or a row of the table of old keys."""

from dataclasses import is_dataclass
from typing import Any, get_args

import pytest
from helpers.legacy_documents import june_2026, newest

from levanter.commands.serve.config import ServeConfig
from levanter.config.errors import Mark
from levanter.config.schema import choice_names, config_fields, union_members
from levanter.config.upstream import TABLE, old_keys, translate
from levanter.config.upstream.data import CHAT_SLICE
from levanter.config.upstream.preferences import PREFERENCE_KEYS, TRAIN_DPO
from levanter.config.upstream.serving import AT_THE_TOP, SERVER_KEYS
from levanter.config.upstream.sft import MIXTURE, SFT_KEYS
from levanter.config.upstream.unsupported import unsupported_rows
from levanter.config.yaml_nodes import MapNode, from_plain
from levanter.data import DatasetComponentBase, LmDatasetFormatBase
from levanter.data.sources import DatasetSourceBase
from levanter.models import LmConfig
from levanter.optim import OptimizerConfig
from levanter.tracker import TrackerConfig
from levanter.upstream.migrate import config_class

pytestmark = pytest.mark.quick

# The keys of the 2025 generation, from its classes. Where a path has `*`, it stands for any name.
KEYS_2025 = {
    "train_lm": "data trainer model optimizer initialize_from_hf use_hf_model_config z_loss_weight hf_save_path "
    "hf_upload hf_save_dtype hf_save_steps data_seed initialize_from_checkpoint_path epoch eval_harness "
    "eval_harness_steps log_entropy",
    "eval_lm": "checkpoint_path hf_checkpoint trainer data model eval_on_train log_entropy log_top2_gap "
    "log_param_stats",
    "lora_lm": "initialize_from_hf lora data trainer optimizer peft_save_path peft_hf_upload merged_hf_save_path "
    "merged_hf_upload hf_save_steps trust_remote_code max_train_length",
    "export_lm_to_hf": "trainer checkpoint_path output_dir upload_to_hf model save_tokenizer tokenizer "
    "override_vocab_size config_overrides use_cpu",
    "export_hf_to_lm": "hf_checkpoint output_path model use_hf_model_config tokenizer dtype "
    "resize_vocab_to_match_tokenizer",
    "sample_lm": "checkpoint_path hf_checkpoint trainer model tokenizer engine prompts stop_sequence max_new_tokens "
    "temperature seed n_generations n_rounds profile",
    "sample_lm.engine": "max_pages max_seqs page_size max_pages_per_seq compute_dtype max_queued_tokens "
    "max_seqs_in_prefill max_prefill_size max_tokens_per_round max_rounds max_stop_seqs max_stop_tokens seed "
    "enable_logprobs",
    "inference_repl": "checkpoint model tokenizer trainer server temperature seed max_tokens command args",
    "serve": "trainer tokenizer service temperature seed batch_timeout host port checkpoint_path hf_checkpoint model",
    "viz_logprobs": "checkpoint_path path trainer data model num_docs checkpoint_is_hf data_seed "
    "comparison_model_path comparison_is_hf",
    "train_asr": "data trainer model optimizer batch_size initialize_from_hf use_hf_model_config data_seed "
    "hf_save_path hf_upload hf_save_steps",
    "cache_dataset": "train_urls validation_urls configs data tracker address start_workers auto_start_cluster",
    "sft": "trainer model optimizer supervised_data initialize_from_hf hf_save_path hf_upload hf_save_steps "
    "max_seq_len model_name_or_path tokenizer dataset_type chat_train_urls messages_field input_role output_role "
    "data_seed epoch reinit_tokens reinit_lm_head reinit_embeddings",
    "sft_mixture": "supervised_data mixture_weights mixture_block_size stop_strategy tokenizer max_seq_len",
    "eval_harness": "eval_harness tokenizer checkpoint_path checkpoint_is_hf apply_chat_template trainer model",
    "eval_harness.eval_harness": "task_spec max_examples max_eval_length log_samples bootstrap_iters "
    "apply_chat_template",
    "eval_careless_lm": "checkpoint_path hf_checkpoint initialize_from_hf use_hf_model_config model trainer txt_path "
    "chunk_size slice_length prompt_tokens cursor_inc_chars token_mode cursor_inc_tokens tokenizer_name max_examples "
    "output_base_path plot_path eval_batch_size histogram_path pz_threshold book_title pz_data_path use_dataloader "
    "histogram_linear gcp_log allow_nondivisible_batch_size opt_align_seq_len_128 opt_disable_checkpointing "
    "opt_force_flash_block_128 opt_warmup_compile",
    "eval_sliding_total": "books trainer model txt_path plot_path histogram_path pz_data_path gcp_log",
    "eval_sliding_total.books.*": "txt_path plot_path histogram_path pz_data_path book_title chunk_size slice_length "
    "prompt_tokens cursor_inc_chars token_mode cursor_inc_tokens eval_batch_size",
    "eval_sliding_lm": "checkpoint_path hf_checkpoint initialize_from_hf use_hf_model_config model trainer data split "
    "max_batches",
    "train_lm.trainer": "seed mp quantization model_averaging wandb log_dir id tracker watch profiler "
    "profiler_start_step profiler_num_steps profiler_perfetto_link log_jaxprs log_xla_hlo crash_on_nan crash_on_inf "
    "batch_axis fsdp_axis tensor_parallel_axes axis_resources parameter_axis_resources replica_ici_axis_size "
    "model_axis_size replica_dcn_axis_size train_batch_size per_device_parallelism per_device_eval_parallelism "
    "allow_nondivisible_batch_size num_train_steps steps_per_eval max_eval_batches checkpointer load_checkpoint "
    "load_checkpoint_path initialize_from allow_partial_checkpoint jax_config jax_compilation_cache_dir distributed "
    "ray require_accelerator shutdown_at_exit",
    "train_lm.trainer.checkpointer": "base_path save_interval keep append_run_id_to_base_path "
    "delete_old_temp_checkpoints",
    "train_lm.trainer.watch": "watch_targets include_norms include_per_parameter_norms include_histograms "
    "split_scan_layers interval",
    "train_lm.data": "tokenizer vocab_size cache_dir cache_options enforce_eos chat_template ignore_token_id shuffle "
    "permutation_type tags format train_urls validation_urls id name stream configs train_weights stop_strategy "
    "target_budget experiment_budget mixture_block_size max_train_batches num_validation_sequences",
    "train_lm.data.cache_options": "num_shard_groups target_size_per_flush batch_size",
    "train_lm.data.components.*.format": "input_field output_field",
    "train_lm.model": "type seq_len hidden_dim intermediate_dim num_layers num_heads num_kv_heads head_dim "
    "activation_function initializer_range layer_norm_epsilon tie_word_embeddings hybrid_norm input_embedding_norm "
    "upcast_attn use_flash_attention attn_backend flash_attention_block_size gradient_checkpointing scan_layers "
    "use_bias use_layer_norm_weight rope reference_checkpoint cross_entropy_block_size",
}
BOTH = {path: keys.split() for path, keys in KEYS_2025.items()}
for _path, _keys in june_2026()["entry_points"].items():
    BOTH[_path] = list(dict.fromkeys([*BOTH.get(_path, []), *_keys]))
NEWEST = newest()["entry_points"]
ALL_KEYS = {path: list(dict.fromkeys([*BOTH.get(path, []), *NEWEST.get(path, [])])) for path in {**BOTH, **NEWEST}}


def here(path: str) -> tuple[type, tuple[str, ...]]:
    """The class of a block, and its path inside the document."""
    entry_point, *rest = path.replace("[]", "").split(".")
    cls: Any = config_class(entry_point)
    for part in rest:
        if part == "*":
            continue
        if part == "format":
            cls = LmDatasetFormatBase.get_known_choices()["supervised"]
        elif part == "model":
            cls = cls if entry_point != "train_lm" else type(cls().model)
        else:
            cls = next(
                member
                for outer in union_members(config_fields(cls)[part].type)
                for member in (outer, *get_args(outer), *(m for arg in get_args(outer) for m in union_members(arg)))
                if is_dataclass(member)
            )
    return cls, tuple(rest)


@pytest.mark.parametrize("path", sorted(ALL_KEYS))
def test_every_key_is_known(path: str):
    cls, block = here(path)
    known = {*config_fields(cls), *old_keys(tuple("x" if part == "*" else part for part in block)), "type"}
    known |= set(unsupported_rows(block, config_fields(cls)))
    if not block:
        known |= {row.name for row in TABLE if row.block == ""} | {row.block for row in TABLE}
        known |= {"configs", "validation_urls"}
    assert [key for key in ALL_KEYS[path] if key not in known] == []


@pytest.mark.parametrize(
    ("registry", "theirs"),
    [
        (LmConfig, "models"),
        (OptimizerConfig, "optimizers"),
        (TrackerConfig, "trackers"),
        (LmDatasetFormatBase, "formats"),
        (DatasetSourceBase, "sources"),
        (DatasetComponentBase, "components"),
    ],
)
def test_every_choice_and_its_keys_are_known(registry: Any, theirs: str):
    ours = {name: registry.get_choice_class(name) for name in choice_names(registry)}
    listed = {(name, key) for data in (june_2026(), newest()) for name, keys in data[theirs].items() for key in keys}
    block = {"trackers": ("trainer", "tracker"), "formats": ("data", "components", "a", "format"), "models": ("model",)}
    for name, key in sorted(listed):
        read = {*config_fields(ours[name]), *unsupported_rows(block.get(theirs, ("?",)), ())}
        assert key in read or key in old_keys(block.get(theirs, ("?",))), f"{name}.{key}"


def test_no_row_of_the_table_is_silent():
    """Each old key leaves a change or a problem behind; `tests/levanter/config/test_legacy_trainer.py` has them all."""
    shapes = {
        "": lambda row: (
            {row.name: 5}
            if row in SFT_KEYS
            else {"txt_path": "a.txt", "train_urls": ["a"], row.name: {"chunk_size": 5}}
        ),
        "model": lambda row: {"model": {row.name: 5}},
        "*.model": lambda row: {"model_b": {"model": {row.name: 5}}},
        "data": lambda row: {"data": {"configs": {"a": {}}} if row.name == "configs" else {"id": "a", row.name: "b"}},
        "data.components.*": lambda row: {"data": {"components": {"a": {row.name: True}}}},
        "data.components.*.format": lambda row: {"data": {"components": {"a": {"format": {row.name: "b"}}}}},
        "eval_harness": lambda row: {"eval_harness": {row.name: 5}},
        "eval_harness.task_spec.*": lambda row: {"eval_harness": {"task_spec": [{row.name: "b"}]}},
        "engine": lambda row: {"engine": {row.name: 5}},
        "server.service": lambda row: {"server": {"service": {row.name: 5}}},
        "service": lambda row: {"service": {row.name: 5}},
        "trainer": lambda row: {"trainer": {row.name: {} if row.name == "wandb" else "5"}},
    }
    for row in TABLE:
        if row.path == "data.shuffle" or row is CHAT_SLICE:
            continue  # about its absence; of a chat format alone: test_legacy_data.py
        # What a server's document has at its top is nobody else's.
        serves = config_fields(ServeConfig) if row in SERVER_KEYS else ()
        document = {"temperature": 0.5, "seed": 5}.get(row.name) if row in AT_THE_TOP else None
        node = from_plain(shapes[row.block](row) if document is None else {row.name: document}, Mark(source="here"))
        assert isinstance(node, MapNode)
        earlier = MIXTURE if row in SFT_KEYS else TRAIN_DPO if row in PREFERENCE_KEYS else ""
        translation = translate(node, serves, earlier)
        said = [change.key for change in translation.changes] + [problem.key for problem in translation.problems]
        assert any(row.name in key for key in said), row.path
