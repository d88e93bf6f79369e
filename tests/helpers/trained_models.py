"""Tiny models that have learned something: a few hundred steps of torch on Python's own documentation.

One in six topics is held out. Pieces of words are the vocabulary, so that many different ones can come next.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from helpers.family_models import PAD, VARIANTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from levanter.data.documents import PythonTopics

VOCAB, POSITIONS, ROWS = 1024, 128, 8
STEPS, WARMUP, RATE = 600, 20, 6e-3
SIZES: Mapping[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    max_position_embeddings=POSITIONS,
)


def _texts(split: str) -> list[str]:
    return [document.text for document in PythonTopics(max_chars=None, hold_out_every=6, split=split)]


@cache
def _tokenizer() -> Tokenizer:
    """Pieces of bytes, merged by how often they are beside each other in the text that is learned."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>"]
    built.train_from_iterator(
        _texts("train"),
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    return built


@cache
def rows(split: str) -> np.ndarray:
    """All text of a split as rows of `POSITIONS` ids, documents one behind the other."""
    ids = np.concatenate([[*each.ids, PAD["eos_token_id"]] for each in _tokenizer().encode_batch(_texts(split))])
    count = len(ids) // POSITIONS
    return ids[: count * POSITIONS].reshape(count, POSITIONS).astype(np.int32)


def unigram_nats() -> float:
    """What the held-out text costs a token by how often each is in the text that is learned."""
    counts = np.bincount(rows("train").ravel(), minlength=VOCAB) + 1
    return float(-np.log(counts / counts.sum())[rows("validation")[:, 1:]].mean())


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other take three times the processor at these sizes, and more beside other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def train(family: str, folder: Path, changes: Mapping[str, Any]) -> Any:
    """A model of one of `family_models.VARIANTS`' classes and of `SIZES`, saved as transformers does."""
    import torch
    import transformers

    hf = VARIANTS[family].hf
    prefix = f"{hf}Text" if hf == "Gemma3" else hf
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **PAD, **changes}, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)

    def rate(step: int) -> float:
        return min((step + 1) / WARMUP, 0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * step / STEPS)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    rng, text = np.random.default_rng(0), rows("train")
    for _ in range(STEPS):
        ids = torch.from_numpy(text[rng.choice(len(text), ROWS, replace=False)].astype(np.int64))
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.eval().save_pretrained(folder)
    return model
