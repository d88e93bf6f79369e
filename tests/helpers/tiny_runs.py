"""Tiny runs of every entry point, as commands: what they work on is made once, what they write has a folder each."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers.hf_folder import TEXTS, tensors, write_folder

SECONDS = 15
"""The heartbeat timeout of these runs; who is killed is noticed much sooner."""
TIMEOUTS = {"init_timeout": "60s", "barrier_timeout": "120s", "heartbeat_timeout": f"{SECONDS}s"}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Files that are made once, and a folder for compiled programs."""

    model: Path
    documents: Path
    book: Path
    cache: Path

    def eval_lm(self, folder: Path, **trainer: Any) -> list[str]:
        """The command of an evaluation that writes into `folder`."""
        return self._command(
            folder,
            "eval_lm",
            {
                "hf_checkpoint": str(self.model),
                "max_eval_length": 48,
                "output_path": str(folder / "out.json"),
                "data": {"enforce_bos": True, "components": {"docs": _documents(self.documents)}},
            },
            {"per_device_eval_parallelism": 1, **trainer},
        )

    def eval_careless_lm(self, folder: Path, **config: Any) -> list[str]:
        """The command of a memorization evaluation that writes into `folder/out`."""
        return self._command(
            folder,
            "eval_careless_lm",
            {
                "hf_checkpoint": str(self.model),
                "txt_path": str(self.book),
                "output_base_path": str(folder / "out"),
                "book_title": "A Small Book",
                "chunk_size": 20,
                "prompt_tokens": 12,
                "token_mode": True,
                "cursor_inc_tokens": 1,
                "eval_batch_size": 8,
                **config,
            },
            {},
        )

    def eval_sliding_lm(self, folder: Path) -> list[str]:
        """The command of an evaluation of prepared rows that writes into `folder/out`."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"input_ids": [n % 90 + 3 + i % 7 for i in range(12 + n % 5)], "sources_len": 6} for n in range(21)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return self._command(
            folder,
            "eval_sliding_lm",
            {
                "hf_checkpoint": str(self.model),
                "data": {"validation_urls": [str(folder / "rows.jsonl")], "format": {"type": "prebuilt"}},
                "output_base_path": str(folder / "out"),
                "eval_batch_size": 8,
            },
            {},
        )

    def viz_logprobs(self, folder: Path) -> list[str]:
        """The command that writes a page of log-probabilities, `folder/page.html`."""
        return self._command(
            folder,
            "viz_logprobs",
            {
                "hf_checkpoint": str(self.model),
                "max_eval_length": 48,
                "num_docs": 12,
                "path": str(folder / "page.html"),
                "data": {"components": {"docs": _documents(self.documents)}},
            },
            {"per_device_eval_parallelism": 1},
        )

    def perplexity_gap(self, folder: Path) -> list[str]:
        """The command that compares the model with itself in int8, in `folder/out`."""
        return self._command(
            folder,
            "perplexity_gap",
            {
                "model_a": {"hf_checkpoint": str(self.model), "quantize": "int8"},
                "model_b": {"hf_checkpoint": str(self.model)},
                "output_path": str(folder / "out"),
                "datasets": {"docs": _documents(self.documents)},
            },
            {"per_device_eval_parallelism": 1},
        )

    def eval_needles(self, folder: Path, **trainer: Any) -> list[str]:
        """The command that looks for needles in texts of 1,024 letters, in `folder/out`."""
        return self._command(
            folder,
            "eval_needles",
            {
                "hf_checkpoint": str(self.model),
                "tasks": ["niah_single_1", "niah_multiquery"],
                "lengths": [1024],
                "samples": 3,
                "output_path": str(folder / "out"),
            },
            {"per_device_eval_parallelism": 1, **trainer},
        )

    def generate(self, folder: Path, **inference: Any) -> list[str]:
        """The command that answers 7 prompts, in `folder/answers.jsonl`."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [{"prompt": "the cat sat on the mat"[: 3 * n + 1], "n": n % 2 + 1} for n in range(7)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self._command(
            folder,
            "generate",
            {
                "hf_checkpoint": str(self.model),
                "input_path": str(folder / "prompts.jsonl"),
                "output_path": str(folder / "answers.jsonl"),
                "inference": {"max_rows": 4, "prefill_chunk": 8, **inference},
            },
            {},
        )

    def serve(self, folder: Path, **more: Any) -> list[str]:
        """The command of a server on any port, which it prints."""
        inference = {"max_rows": 4, "prefill_chunk": 8, **more.pop("inference", {})}
        config = {"hf_checkpoint": str(self.model), "inference": inference, "port": 0, **more}
        return self._command(folder, "serve", config, {})

    def train_lm(self, folder: Path, *, steps: int, **more: Any) -> list[str]:
        """The command of a training run whose checkpoints and numbers are in `folder`."""
        trainer = {
            "id": "run",
            "num_train_steps": steps,
            "train_batch_size": 8,
            "checkpointer": {"base_path": str(folder / "checkpoints"), "keep": [{"every": 2}]},
            # One compiled step instead of two.
            "watch": {"interval": 0},
            **more.pop("trainer", {}),
        }
        return self._command(
            folder,
            "train_lm",
            {
                "data": self.numbers(folder),
                "model": {
                    "type": "llama",
                    **{"max_seq_len": 16, "hidden_dim": 16, "intermediate_dim": 32},
                    **{"num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
                },
                "optimizer": {"learning_rate": 0.01, "warmup": 2, "lr_schedule": "constant"},
                **more,
            },
            trainer,
        )

    def numbers(self, folder: Path) -> dict[str, Any]:
        """A `data:` block of 1,200 tokens that stand in the configuration."""
        text = " ".join(str(n * n % 61) for n in range(1200))
        return {
            "tokenizer": "passthrough",
            "vocab_size": 61,
            "cache_dir": str(folder / "tokens"),
            "shuffle": True,
            "components": {"numbers": {"type": "direct", "datasets": {"train": [text]}}},
        }

    def stored_text(self, folder: Path, files: Path) -> dict[str, Any]:
        """A `data:` block that tokenizes numbers in files into a store in `folder/tokens`."""
        return {
            "tokenizer": "passthrough",
            "vocab_size": 61,
            "cache_dir": str(folder / "tokens"),
            "shuffle": True,
            "components": {"numbers": {"source": {"train_urls": [f"{files}/*.jsonl"]}}},
        }

    def _command(self, folder: Path, name: str, document: dict[str, Any], trainer: dict[str, Any]) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        document["trainer"] = {
            "mp": "f32",
            "tracker": {"type": "json_file", "output_path": str(folder / "tracker")},
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}},
            "distributed": TIMEOUTS,
            **trainer,
        }
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(document))
        return [f"levanter.main.{name}", "--config_path", str(path)]


def _documents(path: Path) -> dict[str, Any]:
    return {"source": {"validation_urls": [str(path)]}}


def make_inputs(where: Path) -> Inputs:
    """Writes what the runs work on."""
    # As transformers' own random weights, which are small: logits that f32 holds to five digits.
    weights = {
        name: each if "norm" in name else (0.1 * each.astype(np.float32)).astype(each.dtype)
        for name, each in tensors().items()
    }
    write_folder(where / "model", weights=weights)
    text = "\n".join(TEXTS) * 6
    documents = [text, "a second document", text[::-1]]
    (where / "docs.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    (where / "book.txt").write_text("".join(word + " " for each in TEXTS for word in each.split(" ")) * 9)
    return Inputs(model=where / "model", documents=where / "docs.jsonl", book=where / "book.txt", cache=where / "cache")
