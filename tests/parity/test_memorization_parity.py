"""p_z as a user gets it, against transformers + torch in f32, on windows that the `tokenizers` library cuts here."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from helpers.hf_folder import TEXTS, tensors, write_folder
from helpers.torch_smollm2 import MODEL as SMOLLM2
from helpers.torch_smollm2 import torch_smollm2
from helpers.torch_suffixes import log_pz_by_torch
from tokenizers import Tokenizer

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig, main
from levanter.compat.open import open_checkpoint
from levanter.memorization.results import BookResult, Scheme

pytestmark = pytest.mark.optimized

# Digits are tokens of their own: among them a token is often what it was before, which this model finds likely.
_WORDS = [word + " " for text in [*TEXTS, "77777777 4444 111111"] for word in text.split(" ")]
TEXT = "".join(np.random.default_rng(3).choice(_WORDS, 220))
LENGTH, PREFIX, BOS = 24, 16, 1
MESH = {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    weights = tensors()
    small = {name: (0.1 * array.astype(np.float32)).astype(array.dtype) for name, array in weights.items()}
    kept = [name for name in weights if "norm" in name or "embed" in name]
    write_folder(where, weights=small | {name: weights[name] for name in kept})
    return where


@pytest.fixture(scope="module")
def in_torch(folder):
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(tmp_path, **document):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"output_base_path": str(tmp_path / "out"), **document}))
    assert run_entry_point(EvalCarelessLmConfig, main, ["--config_path", str(path)]) == 0
    return BookResult.read(str(tmp_path / "out"))


def windows_by_hand(tokenizer, *, token_mode, bos, stride, slice_chars=2000):
    """Ids of the windows, and the characters of each suffix."""
    own = LENGTH - bos
    rows, spans = [], []
    for start in [0] if token_mode else range(0, len(TEXT), stride):
        encoded = tokenizer.encode(TEXT if token_mode else TEXT[start : start + slice_chars], add_special_tokens=False)
        stops = range(0, len(encoded.ids) - own + 1, stride) if token_mode else ([0] if len(encoded.ids) >= own else [])
        for at in stops:
            rows.append([BOS] * bos + encoded.ids[at : at + own])
            spans.append((start + encoded.offsets[at + PREFIX - bos][0], start + encoded.offsets[at + own - 1][1]))
    return np.array(rows), np.array(spans)


@pytest.mark.parametrize(
    ("token_mode", "bos"),
    [
        (True, True),
        (False, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((True, False), (False, True))),
    ],
)
def test_log_pz_equals_torch(tmp_path, folder, in_torch, token_mode, bos):
    (tmp_path / "book.txt").write_text(TEXT)
    result = run(
        tmp_path,
        hf_checkpoint=str(folder),
        txt_path=str(tmp_path / "book.txt"),
        chunk_size=LENGTH,
        prompt_tokens=PREFIX,
        token_mode=token_mode,
        bos=bos,
        cursor_inc_tokens=1,
        cursor_inc_chars=2,
        slice_length=100,
        eval_batch_size=16,
        schemes=["k20_t0.8", "full_t1.5", "k60"],
        trainer={"mp": "f32", "tracker": {"type": "noop"}, "mesh": MESH},
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = None
    windows, spans = windows_by_hand(
        tokenizer, token_mode=token_mode, bos=bos, stride=1 if token_mode else 2, slice_chars=100
    )
    assert len(result) == len(windows) and len(windows) % 16, "the last batch is to be a partial one"
    np.testing.assert_array_equal(result.suffix_char_spans, spans)
    laws = [
        (None, 1.0, None),
        (None, 1.5, None),
        (40, 1.0, 1),
        (40, 1.0, 2),
        (60, 1.0, 2),
        (20, 0.8, 1),
        (1, 1.0, 1),
        (40, 1.0, None),
        (1, 1.0, None),
    ]
    expected = log_pz_by_torch(in_torch, windows, LENGTH - PREFIX, laws, batch=256)
    drawable = {}
    for (top_k, temperature, first), log_pz in zip(laws, expected, strict=True):
        scheme = Scheme(top_k=top_k, temperature=temperature, suffix_tokens=first)
        found = result.log_pz(scheme)
        np.testing.assert_allclose(found, log_pz, atol=2e-3, rtol=0, err_msg=scheme.name)
        drawable[scheme.name] = int(np.isfinite(found).sum())
    # The comparison says something only where some suffixes can be drawn and others not.
    assert 0 < drawable["k40_s2"] < drawable["k40_s1"] < len(windows) and drawable["greedy_s1"] > 0, drawable


@pytest.mark.slow  # 35 s; tests above compare the same numbers with torch on models of random weights
def test_a_real_model_and_a_text_it_knows(tmp_path):
    """SmolLM2-135M on the Apache licence, which every model has read."""
    text = Path(__file__).parents[2] / "LICENSE"
    result = run(
        tmp_path,
        hf_checkpoint=SMOLLM2,
        txt_path=str(text),
        token_mode=True,
        cursor_inc_tokens=400,
        eval_batch_size=8,
        trainer={
            "mp": "f32",
            "tracker": {"type": "noop"},
            "mesh": {"axes": {"data": 4, "model": 2}, "shared_mapping": {"vocab": "model", "heads": None}},
        },
    )
    ids = open_checkpoint(SMOLLM2).tokenizer().encode_batch([text.read_text()])[0]
    windows = np.stack([ids[at : at + 100] for at in range(0, len(ids) - 99, 400)])
    assert len(result) == len(windows)
    laws = [(None, 1.0, None), (40, 1.0, None), (40, 1.0, 1), (1, 1.0, 1)]
    expected = log_pz_by_torch(torch_smollm2(), windows, 50, laws)
    for (top_k, _, first), log_pz in zip(laws, expected, strict=True):
        found = result.log_pz(Scheme(top_k=top_k, suffix_tokens=first))
        np.testing.assert_allclose(found, log_pz, atol=2e-3, rtol=0)
    # The comparison says something only where some suffixes can be drawn and others not.
    assert np.isfinite(expected[2]).any() and not np.isfinite(expected[1]).all()
