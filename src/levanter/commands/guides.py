"""Where to begin with a command: its group in `levanter --help`, the keys that most runs set, and a configuration.

Imports nothing, so that the list of commands and shell completion stay fast.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Guide(NamedTuple):
    """The first page about a command.

    Attributes:
        group: the heading in the list of commands, of `GROUPS`.
        keys: the keys that most runs set, first in its `--help`.
        example: a configuration of the repository; "" for none.
        first_word: the key that a first word without a flag sets (`levanter serve ./my-llama`); "" for none.
        extra: the extra of this project that a run needs, "" for none; a plan does not need it.
        packages: the packages that this extra brings and a run imports.
    """

    group: str
    keys: tuple[str, ...] = ()
    example: str = ""
    first_word: str = ""
    extra: str = ""
    packages: tuple[str, ...] = ()


GROUPS = (
    "Evaluate",
    "Measure memorization",
    "Train",
    "Fine-tune",
    "Generate and serve",
    "Plan",
    "Prepare and convert",
    "Demos",
    "Others",
)
"""The headings of the list of commands, in order."""

_MESH = "trainer.mesh.axes"
_TRAINING = ("data.components", "trainer.num_train_steps", "trainer.train_batch_size")
_BOOKS = ("hf_checkpoint", "txt_path", "scheme", _MESH, "output_base_path")

GUIDES: Mapping[str, Guide] = MappingProxyType(
    {
        "eval_lm": Guide(
            "Evaluate",
            ("hf_checkpoint", "data.components", "max_eval_length", _MESH, "output_path"),
            "config/eval/demo.yaml",
        ),
        "eval_harness": Guide(
            "Evaluate", ("hf_checkpoint", "tasks", "limit", _MESH, "output_path"), "config/harness/demo.yaml"
        ),
        "perplexity_gap": Guide(
            "Evaluate",
            ("model_a.hf_checkpoint", "model_b.hf_checkpoint", "datasets", "max_eval_length", "output_path"),
            "config/gap/demo.yaml",
        ),
        "eval_needles": Guide(
            "Evaluate",
            ("hf_checkpoint", "lengths", "samples", _MESH, "output_path"),
            "config/eval/llama3.1_8b_needles_v6e-8.yaml",
        ),
        "viz_logprobs": Guide("Evaluate", ("hf_checkpoint", "data.components", "num_docs", _MESH, "path")),
        "eval_careless_lm": Guide("Measure memorization", _BOOKS, "config/memorization/demo.yaml"),
        "eval_sliding_total": Guide("Measure memorization", _BOOKS, "config/memorization/demo.yaml"),
        "eval_sliding_lm": Guide(
            "Measure memorization", ("hf_checkpoint", "data.components", "scheme", _MESH, "output_base_path")
        ),
        "memorization_report": Guide("Measure memorization"),
        "train_lm": Guide("Train", (*_TRAINING, "train_seq_len", "hf_save_path"), "config/train/demo.yaml"),
        "sft": Guide("Fine-tune", ("hf_checkpoint", *_TRAINING, "hf_save_path"), "config/sft/smollm2_chat.yaml"),
        "sft_mixture": Guide("Fine-tune", ("hf_checkpoint", *_TRAINING, "hf_save_path")),
        "lora_lm": Guide("Fine-tune", ("initialize_from_hf", "lora.r", *_TRAINING), "config/lora/llama3_8b_v5p-8.yaml"),
        "train_dpo": Guide("Fine-tune", ("hf_checkpoint", *_TRAINING, "beta"), "config/dpo/llama3_8b_v5p-8.yaml"),
        "lora_dpo": Guide(
            "Fine-tune", ("initialize_from_hf", "lora.r", *_TRAINING), "config/dpo/lora_llama3_8b_v5e-16.yaml"
        ),
        "generate": Guide(
            "Generate and serve",
            ("hf_checkpoint", "input_path", "output_path", "sampling.max_tokens", _MESH),
            "config/generate/demo.yaml",
        ),
        "sample_lm": Guide("Generate and serve", ("hf_checkpoint", "prompts", "max_new_tokens", "temperature", _MESH)),
        "inference_repl": Guide("Generate and serve", ("checkpoint", "max_tokens", "temperature", _MESH, "tokenizer")),
        "serve": Guide(
            "Generate and serve",
            ("hf_checkpoint", "port", "inference.max_rows", "inference.max_seq_len", _MESH),
            "config/serve/demo.yaml",
            first_word="hf_checkpoint",
            extra="serve",
            packages=("starlette", "uvicorn"),
        ),
        "plan": Guide("Plan", (), "config/eval/demo.yaml"),
        "cache_dataset": Guide("Prepare and convert"),
        "train_tokenizer": Guide(
            "Prepare and convert",
            ("data.components", "vocab_size", "output_path", "compare"),
            "config/recipes/nanochat_d4.yaml",
        ),
        "recipe": Guide("Plan", ("depth", "target", "ratio", "price", "output_path", "plan")),
        "export_lm_to_hf": Guide(
            "Prepare and convert", ("checkpoint_path", "hf_checkpoint", "model", "output_dir", "tokenizer")
        ),
        "migrate": Guide("Prepare and convert"),
        "demo_generate": Guide("Demos"),
        "demo_memorization": Guide("Demos"),
        "demo_needle": Guide("Demos"),
        "demo_serve": Guide("Demos"),
        "demo_sft": Guide("Demos"),
        "demo_train": Guide("Demos"),
    }
)
"""Guides by name of the command; a command that is missing here is listed last and explains all of its keys."""

OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "launch": "python -m levanter.infra.launch",
        "ray_run": "python -m levanter.infra.ray_run",
        "ray_serve": "python -m levanter.infra.ray_serve",
        "train": "levanter train_lm",
        "pretrain": "levanter train_lm",
        "finetune": "levanter sft, or levanter lora_lm for adapters",
        "fine_tune": "levanter sft, or levanter lora_lm for adapters",
        "lora": "levanter lora_lm",
        "dpo": "levanter train_dpo",
        "eval": "levanter eval_lm, or levanter eval_harness for tasks",
        "evaluate": "levanter eval_lm, or levanter eval_harness for tasks",
        "lm_eval": "levanter eval_harness",
        "harness": "levanter eval_harness",
        "chat": "levanter inference_repl",
        "repl": "levanter inference_repl",
        "sample": "levanter generate",
        "server": "levanter serve",
        "export": "levanter export_lm_to_hf",
        "convert": "levanter export_lm_to_hf",
        "tokenize": "levanter cache_dataset",
        "preflight": "levanter plan",
        "demo": "make demo",
    }
)
"""Words that other tools use for a command → what to run here."""
