"""Tiny models of other projects with adapters: files in the format of `peft`, and logits of ours with them bound."""

import json
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from helpers.family_models import describe_folder
from safetensors.numpy import save_file

from haliax_ext.abstract import leaves, with_arrays
from levanter.commands.model.pretrained import load_pretrained
from levanter.compat.hf.peft import open_peft
from levanter.models.adapters.lora_targets import target_groups
from levanter.models.adapters.whole import select_leaves

TOKENS = np.random.default_rng(5).integers(3, 250, (8, 24)).astype(np.int32)


def loaded(folder: Path):
    """A checkpoint as `eval_lm` loads it: (architecture, rules of its weights, model)."""
    described = describe_folder(folder, positions=TOKENS.shape[1])
    mesh = described.resolved.spec.build(jax.devices()[:8])
    model = with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays)
    return described.config, described.config.weight_rules(described.Vocab), model


def logits(model) -> np.ndarray:
    """Float32 logits of `TOKENS`."""
    tokens = hax.named(jax.numpy.asarray(TOKENS), ("batch", "position"))
    found = eqx.filter_jit(lambda m, x: m.logits(m(x).activations))(model, tokens)
    return np.asarray(found.rearrange(("batch", "position", "vocab")).array)


def described_logits(folder: Path, **how) -> np.ndarray | str:
    """Float32 logits of `TOKENS` of a folder, as `eval_lm` reads it; the messages of its checks if it is refused.

    `how`: fields of `ModelChoice`, such as `adapter`.
    """
    try:
        described = describe_folder(folder, positions=TOKENS.shape[1], **how)
    except ValueError as error:
        return str(error)
    if errors := [check.message for check in described.checks if check.status == "error"]:
        return "\n".join(errors)
    mesh = described.resolved.spec.build(jax.devices()[: described.resolved.spec.size])
    return logits(with_arrays(described.abstract, load_pretrained(described, mesh, show=False).arrays))


def read_adapter(folder: Path, model, rules):
    """The targets and the factors of a folder of `peft`."""
    every = target_groups(model, rules)
    adapter = open_peft(str(folder)).per_expert(every).uniform(every, rules)
    part = select_leaves(model, adapter.copied_paths(leaves(model), rules))
    targets = adapter.targets(every, rules, part)
    return targets, adapter.read(targets, rules, part)


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], **config) -> Path:
    """A folder of `peft`, by hand: `tensors` by module and factor."""
    folder.mkdir(parents=True)
    named = {f"base_model.model.{name}.weight": x for name, x in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    document = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": 4, "lora_alpha": 8, **config}
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return folder
