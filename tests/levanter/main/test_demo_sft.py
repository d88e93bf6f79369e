"""`make demo-sft`: what it trains on, and that transformers and peft answer from what it leaves as it does."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.train_processes import environment

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import load
from levanter.data import build_training
from levanter.main.demo_sft import QUESTIONS, TOKENS
from levanter.runplan import Target

ROOT = Path(__file__).parents[3]
CONFIG = "config/lora/demo.yaml"


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "config" / "sft" / f"guide_{name}.jsonl").read_text().splitlines()]


def questions(some: list[dict]) -> set[str]:
    return {message["content"] for each in some for message in each["messages"] if message["role"] == "user"}


def test_what_it_trains_on(monkeypatch):
    """240 conversations in at most 15,000 tokens of rows; nothing that is held out is asked in the same words."""
    monkeypatch.chdir(ROOT)
    trained, held_out = records("train"), records("held_out")
    assert (len(trained), len(held_out)) == (240, 40) and len({json.dumps(each) for each in trained}) == 240
    assert not questions(trained) & questions(held_out)
    config = load(TrainLmConfig, ["--config_path", CONFIG])
    plan = describe(config, Target(name="local", platform="cpu", kind="cpu", devices=1)).check()
    data = build_training(config.data, plan.work.tokenizer, positions=config.positions, batch_sizes=[(0, 4)], seed=0)
    (rows,) = (len(one.rows) for one in data.sets)
    taken = config.trainer.train_batch_size * config.trainer.num_train_steps
    assert taken <= rows < taken + config.trainer.train_batch_size
    assert config.positions <= 256 and taken * config.positions <= 15_000


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_transformers_and_peft_answer_the_same(tmp_path):
    """From the folder of peft beside the base, and from the merged one; each with the tokenizer in that folder."""
    peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
    from helpers.torch_smollm2 import torch_smollm2

    places = {
        "trainer.log_dir": "logs",
        "trainer.checkpointer.base_path": "checkpoints",
        "peft_save_path": "peft",
        "merged_hf_save_path": "merged",
    }
    where = [word for key, name in places.items() for word in (f"--{key}", str(tmp_path / name))]
    command = [sys.executable, "-m", "levanter.main.demo_sft", "--config_path", CONFIG, *where]
    # Compiled as users' runs are: it computes for longer than it compiles.
    own = {**environment(1, tmp_path / "cache"), "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    before, answers = (
        [ast.literal_eval(found) for found in re.findall(rf"^ *{when}: (['\"].*)$", done.stdout, re.MULTILINE)]
        for when in ("before", "after")
    )
    # How far it came is a question of how busy the machine is: it trains for as long as there is time.
    assert len(answers) == len(before) == len(QUESTIONS) and answers != before, done.stdout
    (adapter,), (merged,) = ([*(tmp_path / each).glob("*/step-*")] for each in ("peft", "merged"))

    def asked(model, folder: Path) -> list[str]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found = []
        for question in QUESTIONS:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
            )["input_ids"]
            with torch.no_grad():
                whole = model.generate(
                    input_ids=ids, do_sample=False, max_new_tokens=TOKENS, eos_token_id=tokenizer.eos_token_id
                )
            found.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
        return found

    whole = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    assert asked(whole, merged) == answers
    beside = peft.PeftModel.from_pretrained(torch_smollm2(), str(adapter)).eval()
    assert asked(beside, adapter) == answers
