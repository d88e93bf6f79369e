"""Numbers that make no sense: refused when the configuration is read, by key, range, file and line.

`tests/levanter/config/test_validators.py` asks this of every number of every configuration; here it is what a user
sees.
"""

import json

import pytest
from helpers.attacks import Attack, judge, strike, table

BAD = 2


def train(text: str):
    """Words for training by a document with one line of nonsense at its end, line 3."""

    def prepared(folder):
        path = folder / "train.yaml"
        path.write_text("model: {type: llama, hidden_dim: 32, intermediate_dim: 64, num_heads: 2, num_kv_heads: 2}\n"
                        "data: {tokenizer: passthrough, vocab_size: 64}\n" + text + "\n")  # fmt: skip
        return ["--config_path", str(path)]

    return prepared


def checkpoint(**keys: object):
    """Words for an evaluation of a Hugging Face folder whose config.json says this."""

    def prepared(folder):
        known = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
                 "num_hidden_layers": 2, "vocab_size": 64, "rms_norm_eps": 1e-5}  # fmt: skip
        (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **known, **keys}))
        (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        return ["--hf_checkpoint", str(folder)]

    return prepared


def row(name: str, text: str, *says: str) -> Attack:
    return Attack(name=name, command="train_lm", words=train(text), code=BAD, says=("train.yaml:3: ", *says))


def rope(name: str, text: str, *says: str) -> Attack:
    words = ["--model.type", "llama", "--model.rope", text]
    return Attack(name=name, command="train_lm", words=words, code=BAD, says=("command line: model.rope.", *says))


ATTACKS = [
    row("nan-learning-rate", "optimizer: {learning_rate: .nan}", "optimizer.learning_rate: must be a finite number"),
    row("infinite-learning-rate", "optimizer: {learning_rate: .inf}", "optimizer.learning_rate: must be a finite"),
    row("huge-learning-rate", "optimizer: {learning_rate: 1e999}", "optimizer.learning_rate: must be a finite number"),
    row("no-epsilon", "optimizer: {epsilon: 0}", "optimizer.epsilon: must be above 0 and at most 1, got 0.0"),
    row("negative-epsilon", "optimizer: {epsilon: -1e-8}", "optimizer.epsilon: must be above 0 and at most 1"),
    row("nan-average", "trainer: {model_averaging: {type: ema, beta: .nan}}", "beta: must be a finite number from 0"),
    row("endless-steps", "trainer: {num_train_steps: 1e30}", "trainer.num_train_steps: must be from 1 to 2147483647"),
    row("negative-epoch", "epoch: -1", "epoch: must not be negative, got -1"),
    row("negative-memory", "trainer: {mesh: {hbm_gib: -4}}", "trainer.mesh.hbm_gib: must be positive, got -4.0"),
    row("nameless-axis", "trainer: {mesh: {axes: {'': 2}}}", "axes: '' is not a name"),
    row("nameless-mesh-axis", "trainer: {mesh: {param_mapping: {embed: ''}}}", "embed: '' is not a valid mesh axis"),
    row("empty-checkpoint-path", "trainer: {checkpointer: {base_path: ''}}", "base_path: must name a file, a folder"),
    row("empty-begin", "initialize_from_checkpoint_path: ''", "initialize_from_checkpoint_path: must name"),
    row("many-digits", "trainer: {seed: " + "9" * 5000 + "}", "trainer.seed: expected an integer"),
    row("empty-log-dir", "trainer: {log_dir: ''}", "trainer.log_dir: expected a path"),
    rope("shrinking-rope", "{type: yarn, factor: 0.1}", "factor: must be at least 1, got 0.1"),
    rope("huge-rope", "{type: linear, factor: 1e11}", "factor: must be from 1 to 1000000"),
    rope("rope-base", "{type: default, theta: 0.5}", "theta: must be above 1, got 0.5"),
    row("negative-alpha", "adapter: {type: lora, alpha: -16}", "adapter.alpha: must be positive, got -16"),
    row("huge-alpha", "adapter: {type: lora, alpha: 1e11}", "adapter.alpha: must be above 0 and at most 1000000"),
    row("negative-alpha-of-a-module", "adapter: {type: lora, alpha_pattern: {q_proj: -1}}", "alpha_pattern.q_proj: mu"),
    Attack(name="negative-factor-in-config-json", command="eval_lm", code=BAD,
           words=checkpoint(rope_scaling={"rope_type": "linear", "factor": -8.0}),
           says=("config.json", "factor", "must be at least 1, got -8")),
    Attack(name="negative-init", command="train_lm", code=BAD,
           words=["--model.type", "llama", "--model.initializer_range", "-0.02"],
           says=("command line: model.initializer_range: must not be negative, got -0.02",)),
    Attack(name="nan-weights-of-a-mixture", command="train_lm", code=BAD, words=["--data.train_weights", "{a: .nan}"],
           says=("command line: data.train_weights.a: must be a finite number",)),
    Attack(name="empty-checkpoint", command="eval_lm", code=BAD, words=["--checkpoint_path", "''"],
           says=("checkpoint_path: must name",)),
    Attack(name="nan-epsilon-in-config-json", command="eval_lm", code=BAD, words=checkpoint(rms_norm_eps=float("nan")),
           says=("config.json", "rms_norm_eps", "finite number")),
    Attack(name="negative-epsilon-in-config-json", command="eval_lm", code=BAD, words=checkpoint(rms_norm_eps=-1),
           says=("config.json", "rms_norm_eps", "must be above 0 and at most 1, got -1")),
    Attack(name="huge-layers-in-config-json", command="eval_lm", code=BAD, words=checkpoint(num_hidden_layers=10**30),
           says=("config.json", "num_hidden_layers", "must be from 1 to 10000")),
]  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=7))
def test_a_senseless_number(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
