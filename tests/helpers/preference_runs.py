"""Tiny runs on preferences: a model, its pairs as upstream and as trl write them, and documents that train on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from helpers.hf_folder import CONFIG, TEXTS, tensors, write_folder, write_json

from levanter.runplan import Target
from levanter.tracker import NoopTracker

POSITIONS = 48
LOCAL = Target(name="local", platform="cpu", kind="cpu", devices=8)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}A: "
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}U: {{ message['content'] }}\n{% endif %}{% endfor %}"
)


class Logged(NoopTracker):
    """Everything that is logged, by step."""

    def __init__(self):
        self.found: dict[int, dict[str, float]] = {}

    def log(self, metrics, *, step, commit=None):
        self.found.setdefault(step, {}).update(metrics)

    def series(self, name: str) -> list[float]:
        """The values of a metric, step after step."""
        return [self.found[step][name] for step in sorted(self.found) if name in self.found[step]]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def pair(n: int) -> dict[str, Any]:
    """A record as upstream has it: two whole conversations."""
    asked = [user(f"what is {n}?")]
    return {
        "chosen": [*asked, assistant(TEXTS[n % 2][: 4 + n % 9])],
        "rejected": [*asked, assistant(TEXTS[2][: 2 + n % 7])],
    }


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_model(folder: Path, *, scale: float = 0.1, seed: int | None = None, **changes: Any) -> Path:
    """A tiny Llama in float32 with small weights; `seed` makes other ones."""
    config = {**CONFIG, "max_position_embeddings": POSITIONS, "torch_dtype": "float32", **changes}
    rng = np.random.default_rng(seed)

    def own(name: str, x: np.ndarray) -> np.ndarray:
        if "norm" in name:
            return np.ones_like(x)
        return scale * (x if seed is None else rng.normal(size=x.shape)).astype(np.float32)

    weights = {name: own(name, x) for name, x in tensors(config, np.float32).items()}
    write_folder(folder, config=config, weights=weights)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(folder / "tokenizer_config.json", settings)
    return folder


def write_inputs(folder: Path, *, pairs: int = 40) -> Path:
    """`folder/model`, `folder/other` (another model), `folder/train.jsonl` and `folder/validation.jsonl`."""
    write_model(folder / "model")
    write_model(folder / "other", seed=7)
    write_jsonl(folder / "train.jsonl", [pair(n) for n in range(pairs)])
    write_jsonl(folder / "validation.jsonl", [pair(n) for n in range(100, 112)])
    return folder


def document(folder: Path, out: Path | None = None, *, steps: int = 3, **more: Any) -> dict[str, Any]:
    """A document of `train_dpo`; `more` replaces keys at the top, and within `trainer`."""
    out = folder if out is None else out
    trainer = {
        "id": "run",
        "tracker": {"type": "noop"},
        "mp": "f32",
        "watch": {"interval": 0},
        "train_batch_size": 8,
        "num_train_steps": steps,
        "checkpointer": {"base_path": str(out / "checkpoints"), "keep": []},
        "log_dir": str(out / "logs"),
        "mesh": {"axes": {"data": 8}},
        **more.pop("trainer", {}),
    }
    component = {
        "source": {"train_urls": [str(folder / "train.jsonl")]},
        "format": {"type": "preference_chat", "chat_template": TEMPLATE, **more.pop("format", {})},
    }
    return {
        "data": {
            "tokenizer": str(folder / "model"),
            "cache_dir": str(out / "tokens"),
            "components": {"pairs": component},
            **more.pop("data", {}),
        },
        "initialize_from_hf": str(folder / "model"),
        "use_hf_model_config": True,
        "reference": {"type": "separate", "model_path": str(folder / "model")},
        "train_seq_len": POSITIONS,
        "optimizer": {"learning_rate": 0.003, "warmup": 0},
        "trainer": trainer,
        **more,
    }


LORA = {"type": "lora", "r": 4, "alpha": 8, "zero_init_b": True, "a_init_mode": "peft"}
