"""Special tokens of a text, and added tokens of every file, against `AutoTokenizer` on the same folders."""

import random
from pathlib import Path

import pytest
from helpers.drawn_tokenizers import drawn_text, write_drawn
from transformers import AutoTokenizer

from levanter.compat.open import load_tokenizer


def _compare(folder: Path, seed: int, *, texts: int) -> None:
    case = write_drawn(folder, seed)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(str(folder))
    rng = random.Random(seed + 1_000)
    samples = ["", *(drawn_text(rng) for _ in range(texts - 1))]
    bare = ours.encode_batch(samples)
    for text, ids in zip(samples, bare, strict=True):
        assert ids.tolist() == theirs(text, add_special_tokens=False).input_ids, (case, text)
        assert ours.frame.around(ids.tolist()) == theirs(text).input_ids, (case, text)
    assert dict(ours.named_tokens) == theirs.special_tokens_map, case
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id), case
    assert ours.vocab_size == len(theirs), case


@pytest.mark.parametrize("seed", range(6))
def test_ids_are_those_of_auto_tokenizer(tmp_path, seed: int):
    _compare(tmp_path / "drawn", seed, texts=40)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_ids_are_those_of_auto_tokenizer_at_length(tmp_path, seed: int):
    _compare(tmp_path / "drawn", seed, texts=40)
