"""Golden texts: reviewed files under `tests/golden/` that a result must equal.

`UPDATE_GOLDEN=1 pytest …` writes them anew; the change is then reviewed as a diff.
"""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compares `text` with the file `tests/golden/<name>`, or writes it where `UPDATE_GOLDEN` is set."""
    path = GOLDEN / name
    text = text.rstrip("\n") + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.exists(), f"{path} is missing; UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text(encoding="utf-8"), f"differs from {path}; UPDATE_GOLDEN=1 writes it anew"
