"""Mutations of tokenizers: damaged and contradicting files, which are refused, or read and used."""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from helpers.mutations.cases import MAY_PASS, Case, evaluation, reading_faults


def tokenizer_json(dice: random.Random, here: Path) -> Case:
    path = here / "tokenizer.json"
    document = json.loads(path.read_text())
    key = dice.choice(sorted(document))
    value = dice.choice([None, 3, [], {}, "x", {"type": "Nonsense"}, [{"id": -1}], {"type": "BPE", "vocab": {"a": -5}}])
    document[key] = value
    path.write_text(json.dumps(document))
    return evaluation(here, f"tokenizer.json {key}: {value!r}", MAY_PASS)


FOLDERS = 8
"""Folders of a case."""
SECONDS = 8.0


def tokenizers(dice: random.Random, here: Path) -> Case:
    """Folders of drawn tokenizers with a damaged file, loaded and used without a run."""
    return Case("tokenizers", "", (), (0,), judge=partial(judge_tokenizers, dice.randrange(2**32)))


def judge_tokenizers(seed: int, here: Path) -> list[str]:
    """Loads drawn folders; lists what is wrong."""
    from helpers.drawn_tokenizers import write_drawn

    dice, faults = random.Random(seed), list[str]()
    for n in range(FOLDERS):
        folder = here / f"tokenizer {n}"
        kind = write_drawn(folder, dice.randrange(10_000))
        damage = " and ".join(_damage(dice, folder) for _ in range(dice.choice([1, 1, 2])))
        faults += reading_faults(lambda: _use(dice, folder), f"seed {seed}, {kind:.40}: {damage}", seconds=SECONDS)  # noqa: B023
    return faults


def _damage(dice: random.Random, folder: Path) -> str:
    """Damages one of the files of a folder; returns what was done."""
    from helpers.drawn_requests import senseless

    path = dice.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))
    content = bytearray(path.read_bytes())
    how = dice.choice(["value", "value", "value", "name", "cut", "byte", "swap"])
    try:
        document = json.loads(content)
    except ValueError:
        how = "byte"
    if how == "cut":
        del content[dice.randrange(len(content)) :]
    elif how == "byte":
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    else:
        spots = list(_places_to_damage(document)) or [(document, key) for key in document]
        container, key = dice.choice(spots)
        how = f"{how} of {key!r:.40}"
        if how.startswith("name") and isinstance(container, dict):
            container[dice.choice(["nonsense", "", "type", "id", "content"])] = container.pop(key)
        elif how.startswith("swap"):
            other, place = dice.choice(spots)
            container[key] = json.loads(json.dumps(other[place]))
        else:
            container[key] = senseless(dice)
        content = bytearray(json.dumps(document).encode())
    path.write_bytes(bytes(content))
    return f"{path.name}: {how}"


def _places_to_damage(document: object) -> Iterator[tuple[Any, Any]]:
    """The (container, key) of a JSON document, without those of vocabularies and merges."""
    from helpers.drawn_requests import places

    # One text for each container: a damaged document may hold a list of many thousands.
    lengths: dict[int, int] = {}
    for container, key in places(document):
        if id(container) not in lengths:
            lengths[id(container)] = len(str(container))
        if lengths[id(container)] < 20_000:
            yield container, key


def _use(dice: random.Random, folder: Path) -> None:
    """Loads a tokenizer and uses it as runs do."""
    from helpers.drawn_tokenizers import drawn_text

    from levanter.compat.open import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocab_size,) and (lengths >= 0).all(), "byte lengths"
    for text in ("", *(drawn_text(dice) for _ in range(6))):
        (ids,) = tokenizer.encode_batch([text])
        same, spans = tokenizer.encode_with_offsets(text)
        assert same.tolist() == ids.tolist() and len(spans) == len(ids), f"ids of {text!r} differ between two calls"
        assert ((ids >= 0) & (ids < tokenizer.vocab_size)).all(), f"ids of {text!r} beyond the vocabulary"
        counts = tokenizer.byte_counts(text, ids)
        assert counts is None or counts.sum() == len(text.encode()), f"bytes of {text!r}"
        stream = tokenizer.stream(special=True)
        joined = "".join(map(stream.push, ids.tolist())) + stream.finish()
        assert joined == tokenizer.decode(ids), f"the stream of {text!r}"
        tokenizer.lost_text(ids)
