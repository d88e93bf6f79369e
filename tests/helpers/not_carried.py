"""A document for each of upstream's keys that no class here has (`levanter.config.upstream.unsupported`)."""

from typing import Any

from levanter.commands.evaluate.config import EvalLmConfig
from levanter.commands.evaluate.gap.config import PerplexityGapConfig
from levanter.commands.export.config import ConvertLmConfig
from levanter.commands.serve.config import ServeConfig
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.config.upstream.unsupported import NotCarried

MODEL = {"type": "mixtral"}
VALUES: dict[str, Any] = {
    "quantization": {"int8": True},
    "log_entropy": True,
    "pad_tokenizer_to_match_model": True,
    "use_explicit_mesh_axes": True,
    "shutdown_at_exit": 60.0,
    "log_jaxprs": True,
    "log_xla_hlo": True,
    "xla_dump_upload": {"enabled": True, "ttl_days": 3},
    "upload": {"ttl_days": 3},
    "write": {"max_write_replicas": 4},
    "service_teardown_timeout": 30.0,
    "prior_context_phases": [{"end_step": 100}],
    "dense_router_gradient": True,
    "export_host_budget_bytes": 1_000_000,
    "max_concurrent_shards": 4,
}
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "checkpoint_subpath": ("model",),
    "xla_dump_upload": ({"enabled": False}, {"ttl_days": 3}, {}),
    "upload": ({"enabled": False}, {}),
    "prior_context_phases": ([],),
}
"""Values that request nothing, besides those of every key."""


def document(row: NotCarried, value: Any = ...) -> tuple[type, dict[str, Any]]:
    """A class that reads the key, and a document with a value (default: one that requests the option)."""
    value = VALUES.get(row.name, "x") if value is ... else value
    if row.block == "model":
        return TrainLmConfig, {"model": {**MODEL, row.name: value}}
    if row.block == "*.model":
        blocks = {name: {"checkpoint_path": "x", "model": dict(MODEL)} for name in ("model_a", "model_b")}
        blocks["model_b"]["model"] = {**MODEL, row.name: value}
        return PerplexityGapConfig, {**blocks, "datasets": {"a": {"source": {"validation_urls": ["a.jsonl"]}}}}
    if row.block == "trainer.tracker":
        return TrainLmConfig, {"trainer": {"tracker": [{"type": "noop"}, {"type": "wandb", row.name: value}]}}
    nested: Any = {row.name: value}
    for part in reversed(row.block.split(".") if row.block else []):
        nested = {part: nested}
    if row.block == "lm_validation_data":
        return TrainDpoConfig, nested
    if "max_shard_bytes" in row.entry_point_keys:
        return ConvertLmConfig, {"checkpoint_path": "x", "output_dir": "y", **nested}
    if "drain_seconds" in row.entry_point_keys:
        return ServeConfig, {"hf_checkpoint": "x", **nested}
    if row.entry_point_keys == ("max_eval_length",):
        return EvalLmConfig, {"hf_checkpoint": "x", **nested}
    return TrainLmConfig, nested
