"""A tiny Llama checkpoint folder as transformers writes it: config.json, safetensors, tokenizer.json."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "transformers_version": "4.57.0",
}

TEXTS = [
    "the cat sat on the mat, didn't it?",
    "naïve café 12345 — 日本語のテキスト 🎉",
    "def f(x):\n    return x + 1\n\n\n",
]


def tensors(config: dict[str, Any] = CONFIG, dtype=ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random weights with the names and shapes of transformers' Llama."""
    rng = np.random.default_rng(0)
    hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for n in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{n}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (q, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, q),
            f"{prefix}.mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}.mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, mlp),
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def byte_level_tokenizer(vocab_size: int = 300) -> Tokenizer:
    """A byte-level BPE trained on `TEXTS`, with special tokens and a post-processor that trims spans."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.ByteLevel(trim_offsets=True)
    special = [AddedToken(t, special=True) for t in ("<pad>", "<s>", "</s>")]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    built.train_from_iterator(TEXTS * 4, trainer)
    return built


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def write_folder(
    folder: Path,
    *,
    config: dict[str, Any] = CONFIG,
    weights: dict[str, np.ndarray] | None = None,
    shards: int = 1,
    adds_bos: bool = False,
) -> Path:
    """Writes a whole checkpoint, in one file or in shards with an index; its tokenizer may put BOS before a text."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    weights = tensors(config) if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names, weight_map = list(weights), {}
        for n in range(shards):
            file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
            part = {name: weights[name] for name in names[n::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        total = sum(each.nbytes for each in weights.values())
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    built = byte_level_tokenizer()
    if adds_bos:
        built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    built.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", settings)
    return folder
