"""The demonstration of long context: its model and its tokenizer, that its configuration plans, and the whole of it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.browser import browser as browser
from helpers.browser import needs_chromium

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.compat.open import load_tokenizer
from levanter.config import load_written
from levanter.eval.needles.prompts import NeedleSpec, build_prompts
from levanter.main.demo_needle import DEPTHS, LONG, SAMPLES, SHORT, TASK
from levanter.runplan import Target

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "config/needles/tiny"
CONFIG = ["--config_path", "config/needles/demo.yaml"]


def asked(length: int, samples: int) -> list:
    plan = NeedleSpec(tasks=(TASK,), lengths=(length,), samples=samples, depths=DEPTHS, seed=1)
    return build_prompts(plan, load_tokenizer(str(MODEL)).encode_with_offsets, bos=None)[length]


def test_its_tokenizer_is_made_by_its_script_and_knows_every_word():
    spec = importlib.util.spec_from_file_location("needle_model", ROOT / "benchmarks/needle_model.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # dataclasses look there
    try:
        spec.loader.exec_module(script)
    finally:
        del sys.modules[spec.name]
    document = json.loads((MODEL / "tokenizer.json").read_text())
    assert document == script.tokenizer()
    vocab = document["model"]["vocab"]
    config = json.loads((MODEL / "config.json").read_text())
    assert config["vocab_size"] == len(vocab) and config["max_position_embeddings"] == SHORT
    for question in asked(SHORT, 5):
        assert SHORT - 12 < len(question.tokens) < SHORT and vocab[script.UNKNOWN] not in question.tokens
        digits = "".join(word for word, n in vocab.items() for target in question.targets if n == target)
        assert sorted(digits) == sorted(question.values[0])


def test_its_configuration_plans(monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_written(TrainLmConfig, CONFIG)
    plan = describe(loaded.config, Target(name="local", platform="cpu", kind="cpu", devices=1), written=loaded.written)
    assert not plan.errors and "train_step" in [program.name for program in plan.computing]
    said = [check.message for check in plan.checks if check.name == "stage"]
    assert said == ["rotary embeddings are stretched by 4, from 512 tokens to 2,048 (YaRN)"]


@pytest.mark.slow
def test_transformers_writes_what_was_hidden_in_512_tokens_and_not_in_2048():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    written = {}
    for length in (SHORT, LONG):
        right = 0
        for question in asked(length, 10):
            prompt = torch.from_numpy(question.tokens[None, : question.places[0] + 1].astype(np.int64))
            with torch.no_grad():
                out = model.generate(prompt, max_new_tokens=len(question.targets), do_sample=False, eos_token_id=None)
            right += out[0, prompt.shape[1] :].tolist() == question.targets.tolist()
        written[length] = right
    assert written[SHORT] == 10 and written[LONG] < 5


@needs_chromium
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_it(tmp_path, browser):
    words = ["--trainer.log_dir", str(tmp_path), "--hf_save_path", str(tmp_path / "hf")]
    words += ["--trainer.checkpointer.base_path", str(tmp_path / "checkpoints")]
    words += ["--data.components.needles.source.train_urls", f"[{tmp_path}/lessons.jsonl]"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "levanter.main.demo_needle", *CONFIG, *words]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    table = re.findall(r"^ *(\d+)% +(\d+)/4 +(\d+)/4 +(\d+)/4 +(\d+)/4 *$", ended.stdout, re.M)
    assert [int(row[0]) for row in table] == [0, 25, 50, 75, 100] and SAMPLES == 4 * DEPTHS
    before, after = ([sum(int(row[n]) for row in table) for n in columns] for columns in ((1, 2), (3, 4)))
    assert before[0] == SAMPLES and before[1] < SAMPLES / 2 and after[1] >= 0.95 * SAMPLES
    for when, found in (("before", before), ("after", after)):
        page = browser.open(tmp_path / when / "page.html")
        page.wait_for("document.querySelectorAll('#tasks tbody tr').length > 0")
        rows = page.evaluate("[...document.querySelectorAll('#tasks tbody tr')].map(e => e.innerText)")
        counts = [re.findall(r"(\d+) of 4", row) for row in rows]
        assert [sum(int(row[n]) for row in counts) for n in (0, 1)] == found and len(rows) == DEPTHS
        page.check()
