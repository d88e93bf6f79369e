# ruff: noqa: E501 - rows of tables
"""Mutations of adapters in peft's format: senseless settings, damaged files, tensors of another name or shape."""

import json
import random
from pathlib import Path

from helpers.mutations.cases import MAY_PASS, REFUSED, Case, evaluation

SETTINGS = (
    "r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern",
    "modules_to_save", "bias", "use_dora", "use_rslora", "peft_type", "fan_in_fan_out", "exclude_modules",
    "trainable_token_indices", "target_parameters", "task_type", "base_model_name_or_path", "lora_bias", "init_lora_weights",
)  # fmt: skip


def adapters(dice: random.Random, here: Path) -> Case:
    """An evaluation with an adapter of which a setting, a tensor or a file is changed."""
    import numpy as np
    from helpers.drawn_requests import senseless
    from helpers.hf_folder import CONFIG
    from safetensors.numpy import save_file

    width, rank = CONFIG["hidden_size"], 4
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.standard_normal((rank, width)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.standard_normal((width, rank)).astype(np.float32)
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 8,
                "target_modules": ["q_proj"]}  # fmt: skip
    how = dice.choice(["setting", "setting", "setting", "tensor", "tensor", "file", "document", "sound"])
    codes, chosen = MAY_PASS, dice.choice(sorted(tensors))
    folder = here / "adapter"
    folder.mkdir()
    if how == "sound":
        codes = (0,)
    elif how == "setting":
        key = dice.choice(SETTINGS)
        settings[key] = dice.choice([senseless(dice), {"q_proj": 2}, ["nonsense"], "nonsense", 2, [0, 7], "none", True])
        how += f" {key}: {settings[key]!r:.40}"
    elif how == "tensor":
        change = dice.choice(["name", "drop", "rank", "width", "dtype", "nan", "more"])
        how, codes = f"{how} {change}", REFUSED
        if change == "name":
            tensors[chosen.replace("q_proj", "z_proj")] = tensors.pop(chosen)
        elif change == "drop":
            del tensors[chosen]
        elif change == "more":
            tensors["base_model.model.nonsense.weight"] = np.zeros((2, 2), np.float32)
        elif change == "nan":
            tensors[chosen][0, 0] = np.nan
        elif change == "dtype":
            tensors[chosen] = tensors[chosen].astype(np.int8)
        else:
            tensors[chosen] = np.concatenate(
                [tensors[chosen]] * 2, axis=int(chosen.endswith("A.weight") == (change == "width"))
            )
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(settings).encode()
    if how == "document":
        at = dice.randrange(len(text))
        text = dice.choice(
            [b"", b"[]", b"null", text[:at], b"[" * 5000, text.replace(b"4", b"9" * 5000), b"\xff" + text]
        )
        codes = REFUSED
    (folder / "adapter_config.json").write_bytes(text)
    if how == "file":
        path = folder / "adapter_model.safetensors"
        content = bytearray(path.read_bytes())
        change = dice.choice(["cut", "header", "gone", "length"])
        how, codes = f"{how} {change}", REFUSED
        if change == "cut":
            del content[dice.randrange(len(content)) :]
        elif change == "header":
            content[8 + dice.randrange(200)] ^= 1 << dice.randrange(7)
            codes = MAY_PASS
        elif change == "length":
            content[:8] = dice.choice([2**60, 2**63, 0]).to_bytes(8, "little")
        path.write_bytes(bytes(content))
        if change == "gone":
            path.unlink()
    # A number that is no number gives a loss that is none: the run ends with exit code 2 or an infinite loss.
    return evaluation(here, f"adapter {how}", codes, "", "--adapter_path", str(folder))
