"""Texts that are no texts: halves of surrogate pairs, bytes that are not UTF-8, sequences for terminals."""

import json
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table
from helpers.tiny_runs import make_inputs

from levanter.io import printable

BAD, OK = 2, 0
HALF, LATIN = "half\ud800", "caf\udce9"
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J"
"""A color, the title of a window, and the 8-bit form of a sequence that clears the screen."""


def evaluated(**keys: str):
    def words(folder: Path) -> list[str]:
        values = {key: value.replace("FOLDER", str(folder)) for key, value in keys.items()}
        return [*make_inputs(folder).eval_lm(folder / "run")[1:], *(f"--{k}={v}" for k, v in values.items())]

    return words


def memorized(**keys: str):
    return lambda folder: [
        *make_inputs(folder).eval_careless_lm(folder / "run")[1:],
        *(f"--{key}={value}" for key, value in keys.items()),
    ]


def planned(place: str):
    return lambda folder: ["eval_lm", *evaluated()(folder), "--target", "v4-16", "--no-compile", "--json",
                           f"{folder}/{place}"]  # fmt: skip


def document(text: str):
    def words(folder: Path) -> list[str]:
        (folder / "run.yaml").write_text(text)
        return ["--config_path", str(folder / "run.yaml")]

    return words


def checkpoint(**keys: object):
    """An evaluation of a folder whose config.json says this."""

    def words(folder: Path) -> list[str]:
        given = make_inputs(folder).eval_lm(folder / "run")[1:]
        config = json.loads((folder / "model" / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps({**config, **keys}))
        return given

    return words


def named_set(folder: Path) -> list[str]:
    """An evaluation of a set whose name has sequences for terminals."""
    words = make_inputs(folder).eval_lm(folder / "run")[1:]
    path = Path(words[-1])
    config = json.loads(path.read_text())
    config["data"]["components"] = {f"a{ESCAPES}": config["data"]["components"]["docs"]}
    path.write_text(json.dumps(config))
    return words


SURROGATE = "half of a surrogate pair"
URLS = "data.components.docs.source.validation_urls"
ATTACKS = [
    Attack(name="half-in-an-output", command="eval_lm", words=evaluated(output_path=f"FOLDER/{HALF}"), code=BAD,
           says=("command line: output_path: character", SURROGATE)),
    Attack(name="half-in-a-title", command="eval_careless_lm", words=memorized(book_title=HALF), code=BAD,
           says=("command line: book_title: character 4 is " + SURROGATE,)),
    Attack(name="half-in-yaml", command="eval_lm", code=BAD,
           words=document('data:\n  components:\n    docs: {source: {validation_urls: ["\\ud800.jsonl"]}}\n'),
           says=(f"run.yaml:3: {URLS}[0]: character 0 is {SURROGATE}",)),
    Attack(name="half-in-a-key", command="eval_lm", code=BAD,
           words=document('data:\n  components:\n    "\\udfff": {source: {validation_urls: [x]}}\n'),
           says=("run.yaml:3: data.components: ", "is no text: character 0 is " + SURROGATE)),
    # A file name of another encoding is one that Linux has.
    Attack(name="latin-1-output", command="eval_lm", words=evaluated(output_path=f"FOLDER/{LATIN}"), code=OK),
    Attack(name="latin-1-plan", command="plan", words=planned(LATIN), code=OK),
    Attack(name="latin-1-title", command="eval_careless_lm", words=memorized(book_title=LATIN), code=BAD,
           says=("book_title: 'caf\\udce9' is no text: it was not UTF-8",)),
    Attack(name="escapes-in-a-name", command="eval_lm", code=BAD, words=evaluated(hf_checkpoint=f"./{ESCAPES}"),
           says=("\\x1b[31mred\\x1b]0;title\\x07\\x9b2J",)),
    Attack(name="escapes-in-a-word", command="eval_lm", code=BAD, words=[f"--{ESCAPES}=1"], says=("\\x1b",)),
    Attack(name="escapes-in-a-set", command="eval_lm", code=BAD, words=named_set, says=("\\x1b[31mred",)),
    Attack(name="escapes-in-config-json", command="eval_lm", code=BAD, words=checkpoint(model_type=ESCAPES),
           says=("\\x1b[31mred",)),
]  # fmt: skip
QUICK = ("half-in-an-output", "half-in-yaml", "latin-1-plan", "escapes-in-a-name")


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=QUICK))
def test_text_that_is_none(attack, tmp_path):
    outcome = strike(attack, tmp_path)
    judge(attack, outcome)
    controls = {character for character in outcome.text if not character.isprintable()} - {"\n", "\r", *"\ud800\udce9"}
    assert not controls, outcome.text


def test_printable_text_is_unchanged():
    text = "Γειά — 10 µs\n\tσ = 1 é 漢字"
    assert printable(text) == text
    assert printable("\x00\x1b\x7f\x85\r") == "\\x00\\x1b\\x7f\\x85\\x0d"
