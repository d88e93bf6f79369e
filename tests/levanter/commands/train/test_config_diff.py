"""Every field of a training run's configuration is in one list: fixed, said or silent."""

import json
from dataclasses import fields

import pytest

from levanter.checkpoint import CheckpointRef
from levanter.commands.model.saved_model import model_metadata
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.config_diff import FIXED, REPORTED, SILENT, ChangedRunError, changes, judge
from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.run import PreferenceTask
from levanter.config import parse, plain
from levanter.data.config import LmDataConfig
from levanter.trainer.config import TrainerConfig

pytestmark = pytest.mark.quick


def keys() -> set[str]:
    nested = {"data": LmDataConfig, "trainer": TrainerConfig}
    own = {field.name for field in fields(TrainDpoConfig)}
    return (own - nested.keys()) | {f"{name}.{field.name}" for name, kind in nested.items() for field in fields(kind)}


def test_every_field_is_classified_once():
    keys_of_pairs = PreferenceTask.resume_keys
    # What only preferences have is fixed unless the task lists it.
    fixed = {"beta", "loss", "reference", "validation_split_fraction"}
    named = [*FIXED, *REPORTED, *SILENT, *fixed, *keys_of_pairs.reported, *keys_of_pairs.silent]
    assert len(named) == len(set(named))
    # Of these two, what matters most is fixed, and the rest is said.
    below = {"model.type", "model.initializer_range", "optimizer.type"}
    assert set(named) - below == keys()


BEGUN = {
    "data": {
        "tokenizer": "passthrough",
        "vocab_size": 61,
        "components": {"a": {"type": "direct", "datasets": {"train": ["1 2 3"]}}},
    },
    "model": {
        "type": "llama",
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_seq_len": 16,
    },
    "optimizer": {"type": "adam", "learning_rate": 0.01},
    "trainer": {"id": "run", "num_train_steps": 4, "train_batch_size": 8, "seed": 3},
}


def made(**changed):
    document = json.loads(json.dumps(BEGUN))
    for key, value in changed.items():
        *path, last = key.split("__")
        block = document
        for part in path:
            block = block.setdefault(part, {})
        block[last] = value
    config = parse(TrainLmConfig, overrides=document)
    return config, type(config.model)(**{**vars_of(config.model), "vocab_size": 61})


def vars_of(value):
    return {field.name: getattr(value, field.name) for field in fields(value)}


def saved(**more) -> CheckpointRef:
    config, model = made()
    metadata = json.loads(json.dumps({"config": plain(config), **model_metadata(model, tokenizer=None)}, default=str))
    return CheckpointRef(
        path="somewhere/step-4", step=4, kind="kept", metadata={**metadata, **more}, leaves={}, arrays="", saved_at=0.0
    )


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("model__activation_function", "gelu", 'model.activation_function: "silu" when it was saved, "gelu" now'),
        ("model__layer_norm_epsilon", 1e-3, "model.layer_norm_epsilon: 1e-05 when it was saved, 0.001 now"),
        ("model__initializer_range", 0.5, "model.initializer_range: 0.02 when it was saved, 0.5 now"),
        ("model__rope", {"type": "default", "theta": 500.0}, "model.rope: "),
        ("data__tokenizer", "gpt2", 'data.tokenizer: "passthrough" when it was saved, "gpt2" now'),
        (
            "data__components",
            {"a": {"type": "direct", "datasets": {"train": ["1"]}}},
            'data.components.a.datasets.train: ["1 2 3"] when it was saved, ["1"] now',
        ),
        ("data__shuffle", True, "data.shuffle: "),
        ("optimizer__type", "muon", 'optimizer.type: "adam" when it was saved, "muon" now'),
        ("trainer__seed", 4, "trainer.seed: 3 when it was saved, 4 now"),
        ("data_seed", 4, "data_seed: null when it was saved, 4 now"),
        ("initialize_from_hf", "some/model", "initialize_from_hf: "),
    ],
)
def test_what_must_not_change(key, value, line):
    config, model = made(**{key: value})
    with pytest.raises(ChangedRunError) as caught:
        judge(saved(), config, model)
    assert line in str(caught.value) and "1 difference:" in str(caught.value)
    config, model = made(**{key: value, "trainer__resume_with_changes": True})
    assert any(said.startswith(line) for said in judge(saved(), config, model))


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("trainer__num_train_steps", 9, "trainer.num_train_steps: 4 when it was saved, 9 now"),
        ("optimizer__learning_rate", 0.1, "optimizer.learning_rate: 0.01 when it was saved, 0.1 now"),
        ("optimizer__lr_schedule", "linear", "optimizer.lr_schedule: "),
        ("trainer__train_batch_size", 16, "trainer.train_batch_size: 8 when it was saved, 16 now"),
        ("train_seq_len", 8, "train_seq_len: null when it was saved, 8 now"),
        ("model__gradient_checkpointing", False, "model.gradient_checkpointing: "),
        ("model__max_seq_len", 8, "model.max_seq_len: 16 when it was saved, 8 now"),
        ("data__train_weights", {"a": 2.0}, "data.train_weights: "),
        ("trainer__mp", "p=f32,c=bfloat16", "trainer.mp: "),
        ("trainer__mesh", {"axes": {"model": 2}}, "trainer.mesh: "),
        ("trainer__tracker", {"type": "noop"}, "trainer.tracker: "),
        ("trainer__checkpointer", {"keep": [{"every": 7}]}, "trainer.checkpointer: "),
    ],
)
def test_what_may_change_is_said(key, value, line):
    said = judge(saved(), *made(**{key: value}))
    assert len(said) == 1 and said[0].startswith(line)


def test_nothing_changed_and_nothing_known():
    assert judge(saved(), *made()) == ()
    assert judge(saved(), *made(trainer__id="other", trainer__steps_per_eval=7)) == ()
    assert "unknown" in judge(saved(config=None), *made())[0]


def test_all_differences_are_listed():
    found = changes(saved(), *made(trainer__seed=4, model__activation_function="gelu", trainer__num_train_steps=9))
    assert [line.split(":")[0] for line in found.fixed] == ["model.activation_function", "trainer.seed"]
    assert [line.split(":")[0] for line in found.reported] == ["trainer.num_train_steps"]


def test_another_runs_checkpoint_is_taken_with_its_model_alone():
    config, model = made(trainer__seed=4, data__shuffle=True, trainer__initialize_from="somewhere")
    assert {line.split(":")[0] for line in judge(saved(), config, model)} >= {"trainer.seed", "data.shuffle"}
    config, model = made(model__activation_function="gelu", trainer__initialize_from="somewhere")
    with pytest.raises(ChangedRunError, match=r"model\.activation_function"):
        judge(saved(), config, model)
