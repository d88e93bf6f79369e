"""Bad input of chats and preferences, as a user meets it: the command ends with 2 and one clear text, no traceback.

All of it is told before a weight is read and before anything is compiled.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.finetuning_inputs import talk
from helpers.preference_runs import LORA, TEMPLATE, assistant, document, pair, user, write_inputs, write_jsonl
from helpers.preference_runs import write_model as write_other_model

from levanter.commands.cli.errors import run_entry_point
from levanter.data.reference_store import ReferenceStore
from levanter.upstream.migrate import config_class

ADAPTED = {"adapter": LORA, "reference": {"type": "adapter_base"}}
REFUSING = "{% for message in messages %}{{ raise_exception('no talk of ' ~ message['role']) }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    where = write_inputs(tmp_path_factory.mktemp("bad"))
    # The tokenizer of this model has no template of its own.
    write_jsonl(where / "talk.jsonl", [talk(n) for n in range(16)])
    return where


def told(entry_point: str, made: dict[str, Any], folder: Path, capsys) -> str:
    """What the command says of a document, which it must refuse."""
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(made))
    main = importlib.import_module(f"levanter.main.{entry_point}").main
    assert run_entry_point(config_class(entry_point), main, ["--config_path", str(path)]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "loading weights" not in said.err and "compiling" not in said.err
    return said.err


def chats(folder: Path, out: Path, records: list[Any] | None = None, **format: Any) -> dict[str, Any]:
    """A document of `train_lm` on conversations."""
    made = document(folder, out)
    for key in ("reference",):
        del made[key]
    path = folder / "talk.jsonl"
    if records is not None:
        path = write_jsonl(out / "records.jsonl", [talk(0), *records])
    component = {"source": {"train_urls": [str(path)]}, "format": {"type": "chat", **format}}
    made["data"]["components"] = {"talk": component}
    return made


def said(*turns: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(turns)}


TEMPLATES = {
    "refuses": (REFUSING, "talk.jsonl:1: the chat template refuses these messages at its line 1 (no talk of user)"),
    "is missing": (None, "data set 'talk': chat_template: is missing, and the tokenizer "),
    "is a file that is not there": (
        "gone.jinja",
        "data.components.talk: chat_template: neither a Jinja template nor an existing file: gone.jinja: ",
    ),
    "is none": ("{% for message in %}", "not a Jinja template ("),
    "trains nothing": (TEMPLATE.replace("'assistant'", "'model'"), "talk.jsonl:1: nothing counts in the loss"),
    "begins twice": (
        "{{ bos_token }}" + TEMPLATE,
        "talk.jsonl:1: begins with <s> (id 1) twice",
    ),
    "never stops": (TEMPLATE.replace(" + eos_token", ""), "talk.jsonl:1: the counted part of an answer ends in "),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that(name, folder, tmp_path, capsys):
    template, expected = TEMPLATES[name]
    more = {} if template is None else {"chat_template": template}
    assert expected in told("train_lm", chats(folder, tmp_path, **more), tmp_path, capsys)


CONVERSATIONS = {
    "an unknown role": (said(user("a"), {"role": "robot", "content": "b"}), "message 2: unknown role 'robot'"),
    "a misspelt role": (said({"role": "usr", "content": "b"}), "unknown role 'usr'; did you mean `user`"),
    "no message": (said(), "the conversation is empty ('messages' has no message)"),
    "no messages": ({"text": "a"}, "no key 'messages'"),
    "a picture": (
        said({"role": "user", "content": [{"type": "image", "url": "x"}]}, assistant("b")),
        "message 1: content[0]: 'image', and only text is read",
    ),
    "no content": (said({"role": "user", "content": None}, assistant("b")), "message 1: content: missing"),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation_with(name, folder, tmp_path, capsys):
    record, expected = CONVERSATIONS[name]
    found = told("train_lm", chats(folder, tmp_path, [record], chat_template=TEMPLATE), tmp_path, capsys)
    assert f"{tmp_path}/records.jsonl:2: " in found and expected in found


def other_texts() -> dict[str, Any]:
    return {"chosen": [user("a"), pair(1)["chosen"][1]], "rejected": [user("b"), pair(1)["rejected"][1]]}


PAIRS = {
    "no common prompt": (other_texts(), "no common prompt: one begins with user: 'a', the other with user: 'b'"),
    "an empty completion": (
        {"prompt": [user("a")], "chosen": [assistant("")], "rejected": pair(1)["rejected"][1:]},
        "chosen: empty completion: the assistant says nothing after the prompt",
    ),
    "no answer": (
        {"prompt": [user("a")], "chosen": [user("b")], "rejected": pair(1)["rejected"][1:]},
        "empty completion: the assistant says nothing after the prompt",
    ),
    "an unknown role": (
        {"chosen": [{"role": "robot", "content": "a"}], "rejected": pair(1)["rejected"]},
        "unknown role 'robot'",
    ),
    "no rejected": ({"chosen": pair(1)["chosen"]}, "no key 'rejected'"),
    "no text": ({"chosen": pair(1)["chosen"], "rejected": 5}, "rejected"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_with(name, folder, tmp_path, capsys):
    record, expected = PAIRS[name]
    made = document(folder, tmp_path)
    path = write_jsonl(tmp_path / "records.jsonl", [pair(0), record])
    made["data"]["components"]["pairs"]["source"]["train_urls"] = [str(path)]
    found = told("train_dpo", made, tmp_path, capsys)
    assert f"{tmp_path}/records.jsonl:2" in found and expected in found


def test_one_text_as_both_answers_is_counted_and_refused_above_five_percent(folder, tmp_path, capsys):
    made = document(folder, tmp_path)
    twice = {"chosen": pair(3)["chosen"], "rejected": pair(3)["chosen"]}
    path = write_jsonl(tmp_path / "records.jsonl", [*(twice for _ in range(3)), *(pair(n) for n in range(37))])
    made["data"]["components"]["pairs"]["source"]["train_urls"] = [str(path)]
    found = told("train_dpo", made, tmp_path, capsys)
    assert "data set 'pairs': 3 of 40 pairs (7.5%) have the same text as chosen and rejected" in found


CONFIGURATIONS = {
    "beta 0": ({"beta": 0}, "beta: must be positive, got 0"),
    "beta -1": ({"beta": -1}, "beta: must be positive, got -1"),
    "smoothing ½": (
        {"loss": {"type": "robust", "label_smoothing": 0.5}},
        "loss.label_smoothing: must be from 0 to below 0.5, got 0.5",
    ),
    "separate without a path": (
        {"reference": {"type": "separate"}},
        "reference.model_path: type separate needs a separate model, and none is named",
    ),
    "a reference that is not there": (
        {"reference": {"type": "separate", "model_path": "/nowhere/at/all"}},
        "/nowhere/at/all: there is no such file or folder",
    ),
    "a base of integers that is made of nothing": (
        {
            **ADAPTED,
            "adapter": {**LORA, "base_dtype": "int8"},
            "initialize_from_hf": False,
            "use_hf_model_config": False,
        },
        "adapter.base_dtype: weights are quantized to int8 while a checkpoint is read",
    ),
    "rows that do not divide": (
        {"trainer": {"train_batch_size": 24, "per_device_parallelism": 2}},
        "trainer.train_batch_size 24 is not a multiple of 16",
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_with(name, folder, tmp_path, capsys):
    more, expected = CONFIGURATIONS[name]
    assert expected in told("train_dpo", document(folder, tmp_path, **more), tmp_path, capsys)


def test_a_reference_of_another_vocabulary(folder, tmp_path, capsys):
    write_other_model(tmp_path / "wide", vocab_size=336)
    for kind in ("separate", "precomputed"):
        made = document(folder, tmp_path, reference={"type": kind, "model_path": str(tmp_path / "wide")})
        expected = f"reference: {tmp_path / 'wide'} has 336 ids, the model that is trained has 320"
        assert expected in told("train_dpo", made, tmp_path, capsys)


def test_what_another_reference_said(folder, tmp_path, capsys):
    """Or of other pairs: the folder has a manifest, which says of what it is."""
    identity = {"reference": "acme/other", "reference_digest": "0" * 64, "set": "pairs/train", "pairs": 3}
    store = ReferenceStore(folder=str(tmp_path / "said" / "pairs" / "train"), identity=identity, pairs=3)
    (tmp_path / "said" / "pairs" / "train").mkdir(parents=True)
    store.begin()
    reference = {"type": "precomputed", "cache_dir": str(tmp_path / "said")}
    found = told("train_dpo", document(folder, tmp_path, reference=reference), tmp_path, capsys)
    assert (
        f"{store.folder}: these log-probabilities are of another reference, or of other pairs (they were made" in found
    )
    assert "with acme/other" in found and "pairs: made with 3, configured 40" in found
    manifest = Path(store.folder) / "manifest.json"
    manifest.write_text(json.dumps({"version": 1, "identity": 5}))
    assert "is no manifest" in told("train_dpo", document(folder, tmp_path, reference=reference), tmp_path, capsys)
