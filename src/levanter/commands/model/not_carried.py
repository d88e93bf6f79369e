"""Keys that can be written and that nothing here acts on: asking for one of them is an error, never a silence.

Every key of upstream's is read, so that documents keep working; a key whose meaning is not carried is refused where it
asks for something, and said to have no effect where only artifacts beside the run are concerned.
"""

from collections.abc import Mapping
from typing import Any

from levanter.config import Written
from levanter.run import Check

_LORA = "low-rank adapters are not here yet"
_HARNESS = "the evaluation harness is not here yet; leave it out, and run it on an export (hf_save_path)"

REFUSED: Mapping[str, str] = {
    "adapter.type": _LORA,
    "peft_save_path": _LORA,
    "peft_hf_upload": _LORA,
    "merged_hf_save_path": _LORA,
    "merged_hf_upload": _LORA,
    "eval_harness": _HARNESS,
    "labeled_eval": "evaluation by labels is not here yet; data.components with tags are evaluated one by one",
    "log_entropy": "not supported yet; set it to false",
    "hf_upload": "exports are written, not uploaded; leave it out, and use `hf upload` on the folder",
    "pad_tokenizer_to_match_model": "not needed: a tokenizer may have fewer ids than the model; leave it out",
    "trainer.quantization": "not supported yet, and it would change the numbers; set it to null",
    "trainer.model_averaging": "not supported yet; leave it out",
    "trainer.use_explicit_mesh_axes": "not supported; meshes have JAX's automatic axes",
    "trainer.shutdown_at_exit": "not supported: a run does not switch its machine off; end it behind the command",
}
"""Key → why it is refused, where it asks for something (is neither null, false nor `none`)."""

WITHOUT_EFFECT: Mapping[str, str] = {
    "trainer.log_jaxprs": "`levanter.main.plan … --keep_hlo FOLDER` writes the programs",
    "trainer.log_xla_hlo": "`levanter.main.plan … --keep_hlo FOLDER` writes the programs",
    "trainer.checkpointer.debug.enabled": "how long saves take is logged anyway",
}
"""Key → what there is instead, where the key is written and asks for something."""


def not_carried(config: Any, written: Written) -> list[Check]:
    """What a configuration asks for and does not get: errors, and notes on artifacts."""
    checks = []
    for key, reason in REFUSED.items():
        if _asks(_value(config, key)):
            error = ValueError(f"{key}: {reason}")
            checks.append(Check(name="config", status="error", message=str(error), error=error))
    for key, instead in WITHOUT_EFFECT.items():
        if _asks(_value(config, key)) and key in written:
            checks.append(Check(name="config", status="note", message=f"{key}: no effect; {instead}"))
    return checks


def _asks(value: Any) -> bool:
    return value not in (None, False, "none", "")


def _value(config: Any, key: str) -> Any:
    """The value at a dotted key; None where the configuration has no such key."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config
