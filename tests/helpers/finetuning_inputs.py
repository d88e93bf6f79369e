"""What the documents of fine-tuning in `golden/legacy/documents/finetuning` name: a folder `tiny` with all of it."""

import json
from pathlib import Path
from typing import Any

from helpers.hf_folder import TEXTS
from helpers.preference_runs import TEMPLATE, assistant, pair, user, write_jsonl, write_model


def talk(n: int) -> dict[str, Any]:
    """A conversation of one or two answers."""
    turns = [user(f"what is {n}?"), assistant(TEXTS[n % 2][: 4 + n % 9]), user("and?"), assistant(str(n))]
    return {"messages": turns[: 2 + 2 * (n % 2)]}


def sharegpt(n: int) -> dict[str, Any]:
    """The same by other names."""
    said = json.dumps(talk(n)["messages"]).replace('"user"', '"human"').replace('"assistant"', '"gpt"')
    return {"conversation": json.loads(said)}


def renamed(n: int) -> dict[str, Any]:
    """A pair by other names."""
    found = pair(n)
    return {"better": found["chosen"], "worse": found["rejected"]}


def write_tiny(folder: Path) -> Path:
    """`folder/tiny`: a model, texts, conversations, pairs, and a template."""
    tiny = folder / "tiny"
    tiny.mkdir()
    write_model(tiny / "model")
    (tiny / "template.jinja").write_text(TEMPLATE)
    files = {
        "text": [{"text": TEXTS[n % 3] * 2} for n in range(40)],
        "text_held_out": [{"text": text} for text in TEXTS],
        "talk": [talk(n) for n in range(24)],
        "talk_more": [talk(n) for n in range(24, 40)],
        "talk_held_out": [talk(n) for n in range(40, 45)],
        "sharegpt": [sharegpt(n) for n in range(24)],
        "preferences": [pair(n) for n in range(40)],
        "pairs": [renamed(n) for n in range(40)],
        "pairs_held_out": [renamed(n) for n in range(100, 108)],
    }
    for name, records in files.items():
        write_jsonl(tiny / f"{name}.jsonl", records)
    return tiny
