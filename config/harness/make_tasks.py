"""Makes the tasks in `config/harness/tasks`: documents and YAML of lm_eval, invented, the same each time.

    python config/harness/make_tasks.py [FOLDER]

Six small tasks, one of each kind that a harness asks: choices of one token, of several, yes or no, the last word of a
text (some of them longer than a small model's context), whole texts, and answers that are written. `made` is all of
them. They say whether a harness works; of a model they say little.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DOCUMENTS = 60
FOLDER = Path(__file__).parent / "tasks"
NAMES = ("Ada", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Karin", "Lukas")
CITIES = ("Lisbon", "Oslo", "Turin", "Vienna", "Porto", "Ghent", "Malmö", "Basel", "Leeds", "Bergen", "Graz", "Lyon")
THINGS = ("a violin", "a red bicycle", "an old map", "a silver watch", "a blue lamp", "two chairs", "a heavy book")
WORK = ("baker", "teacher", "sailor", "painter", "doctor", "gardener", "carpenter", "pilot")
WHERE = ("in the kitchen", "under the bridge", "near the river", "behind the station", "on the roof", "at the market")
LETTERS = "ABCD"

Document = dict[str, Any]


def letters(dice: random.Random) -> Document:
    """A question whose answer is a letter."""
    name, city = dice.choice(NAMES), dice.sample(CITIES, 4)
    right = dice.randrange(4)
    passage = f"{name} is a {dice.choice(WORK)} and lives in {city[right]}."
    return {"passage": passage, "question": f"Where does {name} live?", "options": city, "answer": right}


def endings(dice: random.Random) -> Document:
    """A beginning and four endings of several words, one of which fits."""
    name, things = dice.choice(NAMES), dice.sample(THINGS, 4)
    right = dice.randrange(4)
    text = f"{name} wanted {things[right]} for a long time. Yesterday, {dice.choice(WHERE)}, {name} finally bought"
    return {"text": text, "endings": [f"{each} and went home happily." for each in things], "label": right}


def boolean(dice: random.Random) -> Document:
    """A passage, and something that it says or does not."""
    name, place, other = dice.choice(NAMES), *dice.sample(WHERE, 2)
    true = dice.random() < 0.5
    passage = (
        f"On Monday {name} worked {place} until the evening, and then took the last train to {dice.choice(CITIES)}."
    )
    return {"passage": passage, "question": f"did {name} work {place if true else other}", "answer": int(true)}


def cloze(dice: random.Random) -> Document:
    """A text whose last word can be known from its beginning; every sixth one is long."""
    name, city, thing = dice.choice(NAMES), dice.choice(CITIES), dice.choice(THINGS)
    more = [f"It was quiet {dice.choice(WHERE)}, and {dice.choice(NAMES)} had {dice.choice(THINGS)}." for _ in range(2)]
    if dice.randrange(6) == 0:
        more = [f"{dice.choice(NAMES)} waited {dice.choice(WHERE)} with {dice.choice(THINGS)}." for _ in range(90)]
    end = f"{name} left {thing} in {city}. When {name} came back for it, {name} went straight to"
    return {"text": " ".join([*more, end]), "word": city}


def texts(dice: random.Random) -> Document:
    """A story of a few sentences."""
    name = dice.choice(NAMES)
    sentences = [f"{name} was a {dice.choice(WORK)} from {dice.choice(CITIES)}."]
    for _ in range(dice.randrange(2, 9)):
        verb = dice.choice(("found", "lost", "painted", "sold", "carried"))
        sentences.append(f"One day {name} {verb} {dice.choice(THINGS)} {dice.choice(WHERE)}.")
    return {"story": " ".join(sentences)}


def sums(dice: random.Random) -> Document:
    """Two numbers, and what they are together."""
    a, b = dice.randrange(2, 30), dice.randrange(2, 30)
    return {"a": a, "b": b, "answer": str(a + b)}


_CHOICE = """\
output_type: multiple_choice
doc_to_text: "{text}"
doc_to_target: {target}
doc_to_choice: {choices}
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
_NORMED = """\
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""
KINDS: dict[str, tuple[Callable[[random.Random], Document], str]] = {
    "made_letters": (
        letters,
        _CHOICE.format(
            text="{{passage}}\\n{{question}}\\nA. {{options[0]}}\\nB. {{options[1]}}\\nC. {{options[2]}}\\n"
            "D. {{options[3]}}\\nAnswer:",
            target="answer",
            choices=json.dumps(list(LETTERS)),
        )
        + "fewshot_split: test\n",
    ),
    "made_endings": (endings, _CHOICE.format(text="{{text}}", target="label", choices='"{{endings}}"') + _NORMED),
    "made_boolean": (
        boolean,
        _CHOICE.format(
            text="{{passage}}\\nQuestion: {{question}}?\\nAnswer:", target="answer", choices='["no", "yes"]'
        ),
    ),
    "made_cloze": (
        cloze,
        """\
output_type: loglikelihood
doc_to_text: "{{text}}"
doc_to_target: "{{' ' ~ word}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
""",
    ),
    "made_texts": (
        texts,
        """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{story}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    ),
    "made_sums": (
        sums,
        """\
output_type: generate_until
doc_to_text: "2 + 3 = 5\\n11 + 7 = 18\\n{{a}} + {{b}} ="
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n", "."]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
filter_list:
  - name: number
    filter:
      - function: regex
        regex_pattern: "(\\\\d+)"
      - function: take_first
""",
    ),
}


def files() -> Iterator[tuple[str, str]]:
    """The files by name."""
    for name, (make, kind) in KINDS.items():
        dice = random.Random(name)
        lines = [json.dumps(make(dice), ensure_ascii=False) + "\n" for _ in range(DOCUMENTS)]
        yield f"{name}.jsonl", "".join(lines)
        head = f"# Made by config/harness/make_tasks.py.\ntask: {name}\ndataset_path: json\ndataset_kwargs:\n"
        yield (
            f"{name}.yaml",
            f"{head}  data_files:\n    test: {name}.jsonl\ntest_split: test\n{kind}metadata:\n  version: 1.0\n",
        )
    listed = "".join(f"  - {name}\n" for name in KINDS)
    yield (
        "made.yaml",
        f"# Made by config/harness/make_tasks.py.\ngroup: made\ntask:\n{listed}metadata:\n  version: 1.0\n",
    )


def main(folder: Path = FOLDER) -> None:
    """Writes the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
