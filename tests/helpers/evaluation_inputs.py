"""What upstream's documents of `eval_harness` and `perplexity_gap` name: `tiny` with models, texts, choices."""

import json
from pathlib import Path

from helpers.hf_folder import TEXTS
from helpers.preference_runs import TEMPLATE, write_jsonl, write_model

CARD = """---
configs:
- config_name: own
  data_files:
  - {split: test, path: test.jsonl}
  - {split: train, path: train.jsonl}
---
"""


def write_tiny(folder: Path) -> Path:
    """`folder/tiny`."""
    tiny = folder / "tiny"
    tiny.mkdir()
    for name, seed in (("model", None), ("other", 7)):
        write_model(tiny / name, seed=seed)
        path = tiny / name / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    write_jsonl(tiny / "web.jsonl", [{"body": text} for text in TEXTS])
    write_jsonl(tiny / "pairs.jsonl", [{"q": "naïve ", "a": text} for text in TEXTS])
    (tiny / "choices").mkdir()
    for split, count in (("test", 4), ("train", 3)):
        documents = [{"q": f"the cat {n}", "choices": ["sat", "a mat"], "a": n % 2} for n in range(count)]
        write_jsonl(tiny / "choices" / f"{split}.jsonl", documents)
    (tiny / "choices" / "README.md").write_text(CARD)
    return tiny
