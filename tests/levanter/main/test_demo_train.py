"""The demonstration of training: what it compares with, and that its configuration plans."""

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.compat.open import load_tokenizer
from levanter.config import load
from levanter.data import python_docs_text
from levanter.main.demo_train import bigram_entropy
from levanter.runplan import Target

ROOT = Path(__file__).parents[3]


def test_bigram_entropy_by_counting():
    text = b"abracadabra, abracadabra"
    pairs = Counter(pairwise(text))
    before = Counter(text[:-1])
    expected = -sum(n * math.log(n / before[a]) for (a, _), n in pairs.items()) / (len(text) - 1)
    assert bigram_entropy(text) == pytest.approx(expected)
    assert bigram_entropy(b"abababab") == 0.0


def test_the_documentation_has_the_entropy_that_is_published():
    # 2.45 nats per byte; a little more or less with the version of Python.
    assert bigram_entropy(python_docs_text().encode()) == pytest.approx(2.45, abs=0.05)


def test_its_vocabulary_is_bytes():
    tokenizer = load_tokenizer(str(ROOT / "config/train/bytes"))
    text = "def λ(x):\n\treturn  x\r\n"
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert tokenizer.vocab_size == 257 and tokenizer.bos_id == tokenizer.eos_id == 256
    assert tokenizer.byte_lengths().tolist() == [1] * 256 + [0]


def test_its_configuration_plans(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load(TrainLmConfig, ["--config_path", "config/train/demo.yaml"])
    plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=8)).check()
    assert [program.name for program in plan.computing] == ["init_state", "train_step", "evaluate"]
    parameters = plan.work.state_plan.parameters.total_bytes // 4
    # Six layers, the embedding of 258 rows (which is the head too), and the norms.
    assert parameters == 6 * (4 * 384**2 + 3 * 384 * 1024 + 2 * 384) + 258 * 384 + 384
