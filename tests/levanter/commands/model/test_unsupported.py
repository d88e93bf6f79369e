"""No key is a silent no-op: what is asked for and not carried is refused, or said to have no effect."""

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers import hf_folder, not_carried

import levanter
from levanter.commands.catalog import ENTRY_POINTS
from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.model.unsupported import REFUSED, unsupported_option_checks
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import ConfigError, load, load_written, parse, parse_text, read
from levanter.config.schema import choice_names, config_fields, is_choice, union_members
from levanter.config.upstream.unsupported import NOT_CARRIED, NotCarried
from levanter.runplan import Check, Target
from levanter.trainer.config import TrainerConfig
from levanter.upstream.migrate import config_class

MODEL = {"type": "llama", "hidden_dim": 32, "intermediate_dim": 48, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
BASE = {"model": MODEL, "data": {"tokenizer": "passthrough", "vocab_size": 64}, "trainer": {"train_batch_size": 8}}
CPU = Target(name="local", platform="cpu", kind="cpu", devices=8)
ASKED = {"labeled_eval": {"labeled_eval": {"a": 1}}}


def told(cls: type, overrides: dict[str, Any]) -> list[Check]:
    loaded = read(cls, overrides=overrides)
    return unsupported_option_checks(loaded.config, loaded.written)


WITHOUT_A_FIELD = {row.key: row for row in NOT_CARRIED}


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_what_is_asked_for_and_not_here_is_refused(key: str):
    (check,) = told(TrainLmConfig, {**ASKED.get(key, {key: "x"})})
    assert check.status == "error"
    assert check.message == f"{key}: {REFUSED[key]}"


@pytest.mark.parametrize("row", NOT_CARRIED, ids=lambda row: row.key)
def test_what_no_class_has_is_refused_or_said_to_have_no_effect(row: NotCarried):
    cls, document = not_carried.document(row)
    (check,) = told(cls, document)
    assert (check.status, check.message) == ("error" if row.refused else "note", row.message)
    assert row.message == f"{row.key}: {row.why}" if row.refused else row.message.startswith(f"{row.key}: no effect; ")
    # What asks for nothing is taken out without a word.
    for nothing in (False, None, "none", *not_carried.NEUTRAL.get(row.name, ())):
        assert told(*not_carried.document(row, nothing)) == []


def test_a_key_of_the_wandb_tracker_is_unknown_to_others():
    with pytest.raises(ConfigError, match="service_teardown_timeout: unknown key"):
        told(TrainLmConfig, {"trainer": {"tracker": {"type": "trackio", "service_teardown_timeout": 3.0}}})


@pytest.mark.parametrize("row", [row for row in NOT_CARRIED if row.refused], ids=lambda row: row.key)
def test_a_caller_that_ignores_explicit_keys_gets_an_error(row: NotCarried):
    """`parse` returns no `ExplicitKeys`, so its caller could not check them."""
    cls, document = not_carried.document(row)
    with pytest.raises(ConfigError, match=re.escape(f"{row.key}: {row.why}")):
        parse(cls, overrides=document)
    with pytest.raises(ConfigError, match=re.escape(f"{row.key}: {row.why}")):
        parse_text(cls, json.dumps(document))
    if not isinstance(not_carried.VALUES.get(row.name), list) and "*" not in row.key:
        with pytest.raises(ConfigError, match=re.escape(f"{row.key}: {row.why}")):
            load(cls, [f"--{key}={json.dumps(value)}" for key, value in flat(document)])


def test_keywords_that_no_class_has_any_more():
    with pytest.raises(ValueError, match=r"TrainerConfig\(…\): trainer.quantization: .*would change the results"):
        TrainerConfig(quantization={"int8": True})
    with pytest.raises(ValueError, match=r"(?s)TrainLmConfig.*log_entropy: not supported yet.*hf_upload: exports"):
        TrainLmConfig(log_entropy=True, hf_upload="me/model")
    with pytest.raises(ValueError, match=r"EvalLmConfig\(…\): log_top2_gap: not supported yet"):
        EvalLmConfig(hf_checkpoint="x", log_top2_gap=True)
    assert TrainerConfig(quantization=None, shutdown_at_exit=False, log_jaxprs=False, seed=3) == TrainerConfig(seed=3)
    assert TrainLmConfig(log_entropy=False) == TrainLmConfig()
    with pytest.warns(DeprecationWarning, match=r"trainer.log_xla_hlo: no effect; `levanter.main.plan"):
        assert TrainerConfig(log_xla_hlo=True) == TrainerConfig()
    with pytest.raises(TypeError, match="log_top2_gap"):
        TrainLmConfig(log_top2_gap=True)  # never was one of its keys
    with pytest.raises(TypeError, match="quantisation"):
        TrainerConfig(quantisation=None)


def test_a_key_of_another_entry_point_is_unknown_and_a_misspelt_one_gets_a_hint():
    with pytest.raises(ConfigError, match="log_top2_gap: unknown key"):
        parse(TrainLmConfig, overrides={"log_top2_gap": True})
    with pytest.raises(ConfigError, match=r"quantisation: unknown key; did you mean .?quantization"):
        parse(TrainLmConfig, overrides={"trainer": {"quantisation": {"int8": True}}})


def test_defaults_ask_for_nothing():
    assert told(TrainLmConfig, {}) == []
    assert told(EvalLmConfig, {"hf_checkpoint": "x"}) == []
    assert told(TrainLmConfig, {"trainer": {"log_jaxprs": False}, "adapter": None}) == []


def test_a_run_is_refused_and_names_all_of_them(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {shutdown_at_exit: true}\nmerged_hf_upload: out\n")
    loaded = load_written(TrainLmConfig, ["--config_path", str(path), *(f"--{k}={v}" for k, v in flat(BASE))])
    with pytest.raises(ValueError, match=r"(?s)merged_hf_upload.*shutdown_at_exit"):
        describe(loaded.config, CPU, written=loaded.written).check()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("asked")
    hf_folder.write_folder(where / "model")
    (where / "text.jsonl").write_text('{"text": "the cat sat on the mat"}\n')
    turns = '{"role": "user", "content": "the cat"}, {"role": "assistant", "content": " sat"}'
    (where / "rows.jsonl").write_text(f'{{"messages": [{turns}]}}\n')
    (where / "book.txt").write_text("the cat sat on the mat " * 20)
    return where


@pytest.mark.parametrize("name", ["eval_lm", "viz_logprobs", "eval_careless_lm", "eval_sliding_lm"])
def test_every_entry_point_refuses_what_it_does_not_carry(name: str, folder):
    texts = {"data": {"components": {"a": {"source": {"validation_urls": [str(folder / "text.jsonl")]}}}}}
    rows = {
        "data": {"components": {"a": {"source": {"validation_urls": [str(folder / "rows.jsonl")]}, "format": CHAT}}}
    }
    own = {
        "eval_lm": texts,
        "viz_logprobs": texts,
        "eval_careless_lm": {
            "txt_path": str(folder / "book.txt"),
            "output_base_path": str(folder / "out"),
            "chunk_size": 20,
            "prompt_tokens": 10,
        },
        "eval_sliding_lm": {**rows, "output_base_path": str(folder / "out")},
    }[name]
    module, cls = importlib.import_module(f"levanter.main.{name}"), config_class(name)

    def said(**trainer: Any) -> str:
        """What is wrong with a run, when its document is read or when it is described."""
        document = {"hf_checkpoint": str(folder / "model"), **own, "trainer": {"tracker": {"type": "noop"}, **trainer}}
        try:
            loaded = read(cls, overrides=document)
            plan = module.describe(loaded.config, CPU, written=loaded.written)
        except ValueError as error:
            return str(error)
        return "\n".join(check.message for check in plan.checks if check.status == "error")

    assert said() == ""
    asked = {"quantization": {"int8": True}, "use_explicit_mesh_axes": True, "shutdown_at_exit": True}
    for key, value in asked.items():
        assert WITHOUT_A_FIELD[f"trainer.{key}"].message in said(**{key: value})


def flat(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in block.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# Keys below a block that is refused as a whole, and those that only entry points use which are not here.
BELOW = ("eval_harness_steps",)
ELSEWHERE = ("chosen_field", "rejected_field", "slice_strategy")
CHAT = {"type": "chat", "chat_template": "{{ messages[0]['content'] }}", "mask_user_turns": False, "single_turn": True}
WITHOUT_MEANING_HERE = ("use_cpu", "comparison_is_hf")
"""An export uses no device anyway; the second model that `comparison_is_hf` is of is refused."""
NOT_UPSTREAM_EITHER = ("optimizer.lr",)
"""Keys that upstream reads and does not use."""


def keys_below(cls: type, path: tuple[str, ...], seen: tuple[type, ...]) -> Iterator[str]:
    for name, one in config_fields(cls).items():
        yield ".".join((*path, name))
        for outer in union_members(one.type):
            for member in (outer, *get_args(outer)):
                if not isinstance(member, type) or member in seen:
                    continue
                choices = choice_names(member) if is_choice(member) else ()
                classes = [member.get_choice_class(name) for name in choices] or [member]
                for each in classes:
                    if dataclasses.is_dataclass(each) and "Absent" not in each.__name__:
                        yield from keys_below(each, (*path, name), (*seen, cls, each))


def test_every_key_is_read_somewhere_or_listed():
    """A key that no code mentions is a no-op; the list above is what such keys are held against.

    A model's keys are its family's business: tests/levanter/models.
    """
    root = Path(levanter.__file__).parent
    not_readers = ("absent", "facades", "legacy", "not_carried", "migration_tables")
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for path in root.rglob("*.py")
        if not any(part in str(path.relative_to(root)) for part in not_readers)
    )
    mentioned = set(re.findall(r"\.([a-zA-Z_]\w*)\b", code)) | set(re.findall(r"\"([a-zA-Z_]\w*)\"", code))
    listed = {
        *REFUSED,
        *NOT_UPSTREAM_EITHER,
        *WITHOUT_MEANING_HERE,
        *(key.partition(".")[0] for key in REFUSED),
    }
    listed -= {"trainer"}
    silent = []
    for cls in map(config_class, (*ENTRY_POINTS, "cache_dataset")):
        for key in keys_below(cls, (), ()):
            name = key.rpartition(".")[2]
            if key.startswith("model."):
                continue
            if name not in mentioned and key not in listed and not key.startswith(BELOW) and name not in ELSEWHERE:
                silent.append(key)
    assert dict.fromkeys(silent) == {}
