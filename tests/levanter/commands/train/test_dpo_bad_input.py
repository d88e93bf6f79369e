"""`train_dpo` and `lora_dpo`: what is refused, with its text; documents of both generations, and their migration."""

import json

import pytest
import yaml
from helpers.preference_runs import LOCAL, LORA, document, pair, user, write_inputs, write_jsonl

from levanter.commands.train.dpo.config import TrainDpoConfig
from levanter.commands.train.dpo.lora_config import LoraDpoConfig
from levanter.commands.train.dpo.train_dpo import describe
from levanter.commands.train.lm.train_lm import TrainLmConfig
from levanter.commands.train.lm.train_lm import describe as describe_lm
from levanter.config import ConfigError, parse
from levanter.data import DataError, build_training
from levanter.data.component_formats import PAIRS
from levanter.runplan import RunRefused
from levanter.upstream.migrate import migrate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("preferences"))


REFUSED = {
    "smoothing of a type that has none": (
        {"loss": {"type": "ipo", "label_smoothing": 0.1}},
        "label_smoothing: 0.1, but ipo has none",
    ),
    "a margin of a type that has none": (
        {"loss": {"type": "sigmoid", "gamma": 1.0}},
        "gamma: 1, but sigmoid has no margin",
    ),
    "sums of simpo": (
        {"loss": {"type": "simpo", "length_normalized": False}, "reference": None},
        "length_normalized: false, but simpo",
    ),
    "unknown loss": ({"loss": {"type": "kto"}}, "loss.type"),
    "a reference of simpo": (
        {"loss": {"type": "simpo"}},
        "reference: simpo compares with no reference; leave it out",
    ),
    "adapter_base without adapter": (
        {"reference": {"type": "adapter_base"}},
        "reference: type adapter_base compares with the adapter's base; add adapter: {type: lora}",
    ),
    "precomputed of nothing": (
        {"reference": {"type": "precomputed"}, "initialize_from_hf": False, "use_hf_model_config": False},
        "reference.model_path: null means the Hugging Face checkpoint that the run begins from, and it begins from "
        "none (hf_checkpoint, initialize_from_hf); name the reference",
    ),
    "both ways to store": (
        {"reference": {"type": "precomputed"}, "reference_eval_cache": {"mode": "build_or_load"}},
        "reference_eval_cache: a precomputed reference stores validation pairs too; leave it out",
    ),
    "all of a set held out": (
        {"validation_split_fraction": 1.0},
        "validation_split_fraction: must be from 0 to below 1, got 1.0",
    ),
    "z-loss": ({"z_loss_weight": 0.1}, "z_loss_weight: preferences have no z-loss; leave it out"),
    "both ways to hold out": (
        {"data": {"num_validation_sequences": {"pairs": 3}}},
        "validation_split_fraction and data.num_validation_sequences: both hold pairs out of the training sets; set "
        "one of them to null",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(folder, name):
    more, expected = REFUSED[name]
    made = {key: value for key, value in document(folder, **more).items() if value is not None}
    with pytest.raises(ConfigError) as error:
        parse(TrainDpoConfig, overrides=made)
    assert expected in str(error.value)


def planned(folder, **more):
    return describe(parse(TrainDpoConfig, overrides=document(folder, **more)), LOCAL)


def test_a_reference_that_is_not_there(folder, tmp_path):
    with pytest.raises(ValueError, match=r"gone: there is no such file or folder"):
        planned(folder, reference={"type": "separate", "model_path": str(tmp_path / "gone")})
    with pytest.raises(ValueError, match=r"reference.model_path: .*gone"):
        planned(folder, reference={"type": "separate", "model_path": str(tmp_path / "gone"), "is_hf": False})


def test_no_folder_to_store_in(folder):
    with pytest.raises(ValueError, match=r"reference.cache_dir: names no folder, and data.cache_dir is null"):
        planned(folder, reference={"type": "precomputed"}, data={"cache_dir": None})


def test_pairs_that_do_not_divide(folder):
    with pytest.raises(ValueError, match=r"trainer.train_batch_size 12 is not a multiple of 8 ways"):
        planned(folder, trainer={"train_batch_size": 12})


def test_text_is_no_pair_and_pairs_are_no_text(folder):
    component = {"source": {"train_urls": [str(folder / "train.jsonl")]}}
    plan = planned(folder, data={"components": {"pairs": component}})
    with pytest.raises(RunRefused, match=r"data.components.pairs.format: `preference_chat` are read; `text` is not"):
        plan.check()
    made = document(folder)
    own = {key: made[key] for key in ("data", "initialize_from_hf", "use_hf_model_config", "train_seq_len", "trainer")}
    with pytest.raises(ValueError, match=r"preference_chat"):
        describe_lm(parse(TrainLmConfig, overrides=own), LOCAL).check()


def built(folder, path, out, **format):
    made = document(folder, out, format=format)
    made["data"]["components"]["pairs"]["source"]["train_urls"] = [str(path)]
    config = parse(TrainDpoConfig, overrides=made)
    tokenizer = describe(config, LOCAL).work.tokenizer
    return build_training(
        config.data, tokenizer, positions=config.positions, batch_sizes=[(0, 8)], seed=0, formats=PAIRS
    )


def test_a_text_longer_than_a_row_is_refused_by_default(folder, tmp_path):
    long = {"chosen": [user("a " * 60), pair(1)["chosen"][1]], "rejected": [user("a " * 60), pair(1)["rejected"][1]]}
    write_jsonl(tmp_path / "long.jsonl", [pair(0), long])
    with pytest.raises(DataError, match=r"data set 'pairs': 1 of 2 pairs have a text longer than a row of 48 tokens"):
        built(folder, tmp_path / "long.jsonl", tmp_path)
    found = built(folder, tmp_path / "long.jsonl", tmp_path, slice_strategy="drop")
    assert len(found.sets[0].rows) == 1


OLDEST = """
data:
  tokenizer: MODEL
  cache_dir: OUT/tokens
  components:
    prefs: {source: {type: url, train_urls: [FOLDER/train.jsonl]}, format: {type: preference_chat}}
model: {type: llama}
train_seq_len: 48
trainer:
  mp: f32
  train_batch_size: 8
  num_train_steps: 2
  model_axis_size: 1
  checkpointer: {save_interval: 10m, base_path: OUT/checkpoints}
optimizer: {learning_rate: 5e-7, weight_decay: 0.0, warmup: 0.1}
reference_model_path: MODEL
reference_is_hf: true
beta: 0.01
validation_split_fraction: null
initialize_from_hf: MODEL
use_hf_model_config: true
hf_save_steps: 1000
"""


def filled(text: str, folder, out) -> str:
    return text.replace("MODEL", str(folder / "model")).replace("FOLDER", str(folder)).replace("OUT", str(out))


def test_the_earlier_reference_is_translated_and_migrated(folder, tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text(filled(OLDEST, folder, tmp_path))
    config = parse(TrainDpoConfig, paths=[str(path)])
    assert (config.reference.model_path, config.reference.is_hf, config.beta) == (str(folder / "model"), True, 0.01)
    done = migrate(str(path), "train_dpo")
    assert {change.key for change in done.changes} >= {"reference_model_path", "reference_is_hf"}
    document_now = yaml.safe_load(done.text)
    assert document_now["reference"] == {"type": "separate", "model_path": str(folder / "model"), "is_hf": True}
    (tmp_path / "new.yaml").write_text(done.text)
    assert parse(TrainDpoConfig, paths=[str(tmp_path / "new.yaml")]) == config


PUBLISHED = """
data:
  tokenizer: MODEL
  cache_dir: OUT/tokens
  shuffle: true
  permutation_type: feistel
  components:
    prefs:
      source: {type: url, train_urls: [FOLDER/train.jsonl]}
      cache_dir: OUT/tokens/prefs
      format: {type: preference_chat, pack: false, slice_strategy: raise}
      shuffle: true
train_seq_len: 48
trainer:
  seed: 42
  mp: p=f32,c=bfloat16
  train_batch_size: 8
  num_train_steps: 2
  model_averaging: null
  ray: {auto_start_cluster: false}
  checkpointer: {base_path: OUT/checkpoints, save_interval: 10m, keep: [{every: 500}]}
  tracker: {type: noop}
optimizer: {learning_rate: 5e-6, weight_decay: 0.01, warmup: 0.1, lr_schedule: cosine, max_grad_norm: 1.0}
lora: {r: 8, alpha: 8.0, dropout: 0.0}
initialize_from_hf: MODEL
use_hf_model_config: true
beta: 0.1
validation_split_fraction: 0.05
merged_hf_save_path: OUT/merged
peft_hf_upload: false
hf_save_steps: 1000
"""


def test_a_document_of_lora_dpo_as_they_are_published(folder, tmp_path):
    path = tmp_path / "published.yaml"
    path.write_text(filled(PUBLISHED, folder, tmp_path))
    config = parse(LoraDpoConfig, paths=[str(path)])
    plan = describe(config.training, LOCAL)
    assert not plan.errors and "adapters" in plan.resident_bytes
    assert "data.components.prefs.shuffle" in {change.key for change in migrate(str(path), "lora_dpo").changes}


def test_parameters_of_a_checkpoint_are_taken_without_its_optimizer(tmp_path):
    path = tmp_path / "old.yaml"
    path.write_text("initialize_from_checkpoint_path: gs://acme/checkpoints\n")
    config = parse(TrainDpoConfig, paths=[str(path)])
    assert config.initialize_from_checkpoint_path is None
    assert config.initialize_model_from_checkpoint_path == "gs://acme/checkpoints"


def test_b_zero_alone_means_that_a_is_random(tmp_path):
    """Before `a_init_mode` there was no other way; its default of today contradicts, and is refused by upstream too."""
    path = tmp_path / "old.yaml"
    path.write_text("initialize_from_hf: acme/llama\nlora: {r: 64, alpha: 64.0, zero_init_b: true}\n")
    assert parse(LoraDpoConfig, paths=[str(path)]).lora.a_init_mode == "random"
    (change,) = [change for change in migrate(str(path), "lora_dpo").changes if "a_init_mode" in change.key]
    assert change.now == "lora.a_init_mode: random"
    path.write_text("adapter: {type: lora, zero_init_b: true}\nreference: {type: adapter_base}\n")
    assert parse(TrainDpoConfig, paths=[str(path)]).lora.a_init_mode == "random"


def test_defaults_are_upstreams():
    config = TrainDpoConfig()
    found = {
        "beta": config.beta,
        "reference": (type(config.reference).__name__, config.reference.model_path, config.reference.is_hf),
        "validation_split_fraction": config.validation_split_fraction,
        "reference_eval_cache": (config.reference_eval_cache.mode, config.reference_eval_cache.cache_dir),
        "hf_save_steps": config.hf_save_steps,
        "lm_validation_prefix": config.lm_validation_prefix,
        "scheduled_eval_steps": config.scheduled_eval_steps,
        "run_initial_eval": config.run_initial_eval,
        "loss": (config.loss.type, config.loss.label_smoothing),
    }
    assert found == {
        "beta": 0.1,
        "reference": ("SeparateReferenceConfig", "", True),
        "validation_split_fraction": 0.1,
        "reference_eval_cache": ("disabled", None),
        "hf_save_steps": 10_000,
        "lm_validation_prefix": "lm_eval",
        "scheduled_eval_steps": None,
        "run_initial_eval": False,
        "loss": ("sigmoid", 0.0),
    }
    same = LoraDpoConfig(initialize_from_hf="acme/llama").training
    assert type(same.reference).__name__ == "AdapterBaseReferenceConfig" and same.lora is not None
    assert (same.beta, same.validation_split_fraction, same.hf_save_steps) == (0.1, 0.1, 10_000)


def test_adapters_in_a_document_of_lora_dpo(folder):
    made = {key: value for key, value in document(folder).items() if key not in ("reference", "adapter")}
    config = parse(LoraDpoConfig, overrides={**made, "lora": {k: v for k, v in LORA.items() if k != "type"}})
    assert config.training.lora.r == 4 and json.dumps(config.training.positions) == "48"
