"""Upstream's example scripts of 2025 start and train on local data.

`UPSTREAM_TREE` is a checkout of upstream of September 2025; its scripts run as they are, in a process each. Without it
only the script of this file runs, which makes the same calls.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TREE = os.environ.get("UPSTREAM_TREE")
ROOT = Path(__file__).resolve().parents[3]
TEXT = "the model learns a small task with words and numbers one two three four five six seven"
WORDS = TEXT.split(" ")

SCRIPT = """
import dataclasses, json, sys
import haliax as hax
import jax
import levanter
from levanter.compat.hf_checkpoints import HFCheckpointConverter, save_hf_checkpoint_callback
from levanter.data import PermutationDataset, datasource_from_jsonl
from levanter.lora import LoraConfig, lora_trainable_params_filter, loraize
from levanter.lora import save_merged_hf_checkpoint_callback, save_peft_checkpoint_callback
from levanter.models.lm_model import LmExample, LmHeadModel, compute_next_token_loss
from levanter.optim import AdamConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.py_utils import non_caching_cycle

base, data, out = sys.argv[1:]
config = TrainerConfig(num_train_steps=24, train_batch_size=8, require_accelerator=False, tracker=[])
levanter.initialize(config)
converter = HFCheckpointConverter.from_hf(base)
tokenizer = converter.tokenizer
tokenizer.model_max_length, tokenizer.pad_token = 32, tokenizer.unk_token


def encoded(rows):
    return tokenizer([row["text"] for row in rows], padding="max_length", truncation=True, return_tensors="np")


def example(row) -> LmExample:
    ids = hax.named(row["input_ids"].astype("int32"), "position")
    return LmExample.causal(ids, ignore_id=tokenizer.pad_token_id)


rows = datasource_from_jsonl([data]).map_batches(lambda rows: {"input_ids": encoded(rows)["input_ids"]}, 16)
rows = PermutationDataset(rows.build_or_load_cache(f"{out}/cache").map(example), jax.random.PRNGKey(0))


def trained(name, lora):
    key = jax.random.PRNGKey(1)
    trainer_config = dataclasses.replace(config, id=name)
    with Trainer(trainer_config, AdamConfig(learning_rate=1e-2).build(24), compute_next_token_loss) as trainer:
        model: LmHeadModel = converter.load_pretrained(
            converter.default_config.model_type, axis_mapping=trainer.parameter_axis_mapping, dtype="float32"
        )
        model = hax.named_jit(lambda m: m.resize_vocab(len(tokenizer) + 3))(model)
        trainable = True
        if lora is not None:
            model = hax.named_jit(lambda m: loraize(m, lora, key=key))(model)
            trainable = lora_trainable_params_filter(model)
            trainer.add_hook(save_peft_checkpoint_callback(f"{out}/peft", lora, base, tokenizer))
            trainer.add_hook(save_merged_hf_checkpoint_callback(f"{out}/merged", converter), every=100)
        else:
            trainer.add_hook(save_hf_checkpoint_callback(f"{out}/whole", converter), every=2)
        state = trainer.initial_state(key, model=model, is_trainable=trainable)
        losses = []
        trainer.add_hook(lambda info: losses.append(float(info.loss)))
        trainer.train(state, non_caching_cycle(trainer.data_loader(rows)))
        return losses


print(json.dumps({"whole": trained("whole", None), "lora": trained("lora", LoraConfig(r=4, alpha=8.0))}))
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A tiny Llama with its tokenizer, and records for every script."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("example")
    vocabulary = {word: n for n, word in enumerate(["<unk>", "<s>", "</s>", *WORDS, *map(chr, range(33, 127))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>", model_max_length=64
    )
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def text(n: int) -> str:
        return " ".join(WORDS[(n + i * (n % 3 + 1)) % len(WORDS)] for i in range(6))

    records = [
        {"text": text(n), "instruction": text(n), "input": text(n + 1) if n % 2 else "", "output": text(n + 2)}
        for n in range(32)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def run(folder: Path, script: Path, *arguments: str, hub: Path | None = None) -> str:
    """Runs a script in a process of its own, and returns what it printed."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        **({} if hub is None else {"HF_HUB_CACHE": str(hub)}),
    }
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_script_of_2025_trains_a_model_and_adapters(files, tmp_path):
    import numpy as np
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (tmp_path / "script.py").write_text(SCRIPT)
    out = tmp_path / "out"
    printed = run(tmp_path, tmp_path / "script.py", str(files / "model"), str(files / "data.jsonl"), str(out))
    losses = json.loads(printed.splitlines()[-1])
    for name in ("whole", "lora"):
        assert sum(losses[name][-4:]) < sum(losses[name][:4]) - 0.4, losses
    # The adapters on their base, and merged into it, are one model for transformers and peft.
    merged = AutoModelForCausalLM.from_pretrained(out / "merged" / "step-23")
    base = AutoModelForCausalLM.from_pretrained(files / "model")
    base.resize_token_embeddings(merged.config.vocab_size)
    adapted = PeftModel.from_pretrained(base, str(out / "peft" / "step-23"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, theirs = merged(ids).logits.numpy(), adapted(ids).logits.numpy()
    known = len(WORDS)
    np.testing.assert_allclose(ours[..., :known], theirs[..., :known], atol=1e-4)


KEYS = {
    "trainer": {"num_train_steps": 3, "train_batch_size": 8, "require_accelerator": False, "tracker": []},
    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.0},
    "data_cache_dir": "cache",
    "max_tune_length": 64,
    "hf_save_path": "exports",
    "hf_save_steps": 100,
}


@pytest.mark.slow
@pytest.mark.skipif(TREE is None, reason="UPSTREAM_TREE names no checkout of upstream")
@pytest.mark.parametrize("name", ["alpaca/alpaca.py", "alpaca-lora/alpaca_lora.py", "gsm8k-lora/gsm8k_lora.py"])
def test_an_example_of_upstream_trains(files, tmp_path, name):
    import yaml

    assert TREE is not None
    base, hub = str(files / "model"), None
    document = {**KEYS, "model_name_or_path": base, "data": str(files / "data.jsonl")}
    if name.startswith("gsm8k"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        # The script names the Hub's data set itself, so that it must be in the Hub's cache.
        hub = tmp_path / "hub"
        snapshot = hub / "datasets--gsm8k/snapshots/0/main"
        snapshot.mkdir(parents=True)
        records = [json.loads(line) for line in (files / "data.jsonl").read_text().splitlines()]
        rows = [{"question": record["text"], "answer": f"{record['output']} #### 3"} for record in records]
        pq.write_table(pa.Table.from_pylist(rows), snapshot / "train-00000-of-00001.parquet")
        document["model"] = {"type": "llama", "reference_checkpoint": base}
        del document["data"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(document))
    run(tmp_path, Path(TREE) / "examples" / name, "--config_path", "config.yaml", hub=hub)
    weights = "model.safetensors" if name.startswith("alpaca/") else "adapter_model.safetensors"
    assert list((tmp_path / "exports").glob(f"*/step-2/{weights}"))
