"""Templates of six families, as their authors published them, through `train_lm`: trained on, or refused with why.

trl (extra `judges`) keeps them; without it there is nothing to test.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml
from helpers.finetuning_inputs import talk
from helpers.hf_folder import byte_level_tokenizer
from helpers.preference_runs import document, write_jsonl, write_model

from levanter.commands.cli.errors import run_entry_point
from levanter.commands.train.lm.train_lm import TrainLmConfig, main

FOUND = importlib.util.find_spec("trl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOUND is None, reason="trl is not installed (the extra `judges`)"),
]
VOCAB = 384
NAMES = {
    "llama3_1": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen2_5": ["<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
    "gemma3": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "gptoss": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
    "phi3": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
}
"""Template → the special tokens of its family."""
REWRITTEN = {
    "qwen3": "the tokens that count cannot be derived: the template writes this turn differently once more messages",
    "gptoss": "the template ends this turn differently once more messages follow",
}
"""Those that write an answer otherwise once more messages follow, and why that does not say what counts."""


def write_family(folder: Path, name: str) -> Path:
    """A tiny model whose tokenizer has the family's special tokens and its template, and conversations."""
    assert FOUND is not None and FOUND.origin is not None
    template = (Path(FOUND.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    write_model(folder / "model", vocab_size=VOCAB, max_position_embeddings=256)
    built = byte_level_tokenizer()
    built.add_special_tokens(NAMES[name])
    built.save(str(folder / "model" / "tokenizer.json"))
    settings = json.loads((folder / "model" / "tokenizer_config.json").read_text())
    own = next((each for each in NAMES[name] if each in ("<|begin_of_text|>", "<bos>")), "<s>")
    settings |= {"chat_template": template, "bos_token": own}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    write_jsonl(folder / "talk.jsonl", [talk(n) for n in range(16)])
    return folder


def run(folder: Path, capsys, **format) -> tuple[int, str, str]:
    made = document(folder, steps=1)
    del made["reference"]
    made["data"]["components"] = {
        "talk": {"source": {"train_urls": [str(folder / "talk.jsonl")]}, "format": {"type": "chat", **format}}
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({**made, "train_seq_len": 256}))
    code = run_entry_point(TrainLmConfig, main, ["--config_path", str(path)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", NAMES)
def test_a_stock_template(name, tmp_path, capsys):
    folder = write_family(tmp_path, name)
    code, out, err = run(folder, capsys)
    if name in REWRITTEN:
        assert code == 2 and "Traceback" not in err
        assert REWRITTEN[name] in err and "turns: last" in err and "turns: split" in err
        for path in (folder / "tokens").glob("*"):
            assert not list(path.rglob("shard.json")), "nothing is stored of it"
        code, out, err = run(folder, capsys, turns="last")
    assert code == 0, err[-3000:]
    assert "done after 1 of 1 steps" in out
    assert "derived (the template does not mark them)" in out + err and "⟦" in err
