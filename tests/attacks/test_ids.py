"""Names of runs, data sets and trackers that become folders and lead elsewhere: refused before anything is made."""

import json
import os
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table

BAD = 2
NAMES = {"up": "../../escape", "absolute": "/tmp/escape", "nothing": "", "here": ".", "line": "a\nb", "nul": "a\0b"}


def document(folder: Path, **keys: object) -> list[str]:
    path = folder / "document.yaml"
    path.write_text(json.dumps(keys))
    return ["--config_path", str(path)]


def evaluated(**trainer: object):
    return lambda folder: document(folder, hf_checkpoint="not/there", trainer=trainer)


def trained(**data: object):
    return lambda folder: document(folder, data=data)


def component(name: str, **source: object) -> dict[str, object]:
    return {"components": {name: {"source": {"type": "url", "train_urls": ["x.jsonl"], **source}}}}


ATTACKS = [
    *(
        Attack(name=f"run-{name}", command="eval_lm", words=evaluated(id=text), code=BAD, says=("id: ",))
        for name, text in NAMES.items()
    ),
    *(
        Attack(name=f"set-{name}", command="train_lm", words=trained(**component(text)), code=BAD,
               says=("data", "name" if name != "nothing" else "must not be empty"))
        for name, text in NAMES.items() if name not in ("line", "nul")
    ),
    Attack(name="set-between", command="train_lm", words=trained(**component("a/../../b")), code=BAD, says=("'..'",)),
    Attack(name="long", command="train_lm", words=lambda folder: document(folder, trainer={"id": "x" * 5000}), code=BAD,
           says=("longer than 200 bytes",)),
    Attack(name="hub-set", command="train_lm", code=BAD, says=("../../x", "OWNER/NAME"),
           words=trained(components={"a": {"source": {"type": "hf", "id": "../../x"}}})),
    Attack(name="wandb", command="eval_lm", words=evaluated(tracker={"type": "wandb", "id": "../x"}), code=BAD,
           says=("tracker: id", "one name")),
    Attack(name="trackio", command="eval_lm", words=evaluated(tracker={"type": "trackio", "project": "../x"}), code=BAD,
           says=("tracker: project", "one name")),
    Attack(name="event-files", command="eval_lm", code=BAD, says=("tracker: filename_suffix", "one name"),
           words=evaluated(tracker={"type": "tensorboard", "filename_suffix": "/../x"})),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=len(ATTACKS)))
def test_a_name_that_leads_elsewhere(attack, tmp_path, monkeypatch):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    judge(attack, strike(attack, inside))
    assert sorted(os.listdir(inside)) == ["document.yaml"] and os.listdir(tmp_path) == ["a"]


def test_a_name_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "../../escape")
    attack = Attack(name="RUN_ID", command="eval_lm", words=evaluated(), code=BAD, says=("$RUN_ID", "one name"))
    judge(attack, strike(attack, tmp_path))
