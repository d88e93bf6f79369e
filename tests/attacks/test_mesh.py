"""Meshes that would waste chips, and rules of a mesh that mean nothing: refused by the plan and by the run."""

import json
from pathlib import Path

import pytest
from helpers.attacks import Attack, judge, strike, table

BAD, OK = 2, 0
MODEL = {"type": "llama", "hidden_dim": 32, "intermediate_dim": 64, "num_heads": 4, "num_kv_heads": 4, "num_layers": 2,
         "max_seq_len": 64}  # fmt: skip

GPT2 = {"type": "gpt2", "hidden_dim": 32, "num_heads": 4, "num_layers": 2, "max_seq_len": 64}


def training(mesh: dict[str, object], *, model: dict[str, object] | None = None, **more: object):
    """The document of a training run on 8 devices."""

    def prepared(folder: Path) -> list[str]:
        trainer = {"train_batch_size": 8, "num_train_steps": 2, "mesh": mesh, "log_dir": str(folder / "logs")}
        data = {"tokenizer": "passthrough", "vocab_size": 64, "components": {
            "numbers": {"type": "direct", "datasets": {"train": ["1 2 3 4"]}}}}  # fmt: skip
        document = {"model": MODEL if model is None else model, "data": data, "trainer": trainer, **more}
        (folder / "train.yaml").write_text(json.dumps(document))
        return ["--config_path", str(folder / "train.yaml")]

    return prepared


def planned(*args: object, **more: object):
    words = training(*args, **more)
    return lambda folder: ["train_lm", *words(folder), "--target", "v5e-8", "--no-compile"]


CONTEXT = (
    "mesh axis context 8 shards nothing: the 8 devices along it would do the same work",
    "compute_mapping: {position: context}, param_mapping: {embed: [data, context]}, attention_mapping: auto",
    "config/mesh/context.yaml",
    "allow_idle_axes: [context]",
)
PRESET = {"compute_mapping": {"position": "context"}, "param_mapping": {"embed": ["data", "context"]},
          "attention_mapping": "auto"}  # fmt: skip
IDLE = {"axes": {"context": 8}}
ATTACKS = [
    Attack(name="context-run", command="train_lm", words=training(IDLE), code=BAD, says=CONTEXT),
    Attack(name="context-plan", command="plan", words=planned(IDLE), code=BAD,
           says=("mesh axis context 8 shards nothing", "allow_idle_axes: [context]")),
    Attack(name="context-with-the-preset", command="plan", words=planned({**IDLE, **PRESET}), code=OK,
           never=("shards nothing",)),
    Attack(name="context-allowed", command="plan", words=planned({**IDLE, "allow_idle_axes": ["context"]}), code=OK,
           says=("mesh axis context 8 shards nothing, as allow_idle_axes allows",)),
    Attack(name="no-such-idle-axis", command="plan", words=planned({"allow_idle_axes": ["contxt"]}), code=BAD,
           says=("allow_idle_axes", "'contxt' is not a mesh axis")),
    Attack(name="unmapped-model-axis", command="plan", code=BAD,
           words=planned({"axes": {"model": 4}, "shared_mapping": {"mlp": None, "heads": None}}),
           says=("mesh axis model 4 shards nothing", "shared_mapping: {mlp: model, heads: model, vocab: model}")),
    Attack(name="experts-of-a-dense-model", command="plan", code=BAD,
           words=planned({"axes": {"expert": 4}, "shared_mapping": {"expert": "expert"}}),
           says=("mesh axis expert 4 shards nothing",)),
    Attack(name="upstream's-keys", command="plan", code=BAD,
           words=lambda folder: [
               "train_lm", *training({})(folder), "--trainer.mesh={}", "--trainer.model_axis_size=4",
               "--target", "v5e-8", "--no-compile"],
           says=("mesh axis model 4 shards nothing",)),
    Attack(name="override-of-nothing", command="train_lm", code=BAD,
           words=training({"overrides": {"**.slef_attn": {"embed": None}}}),
           says=("trainer.mesh.overrides['**.slef_attn'] matches no parameter; did you mean **.self_attn or",)),
    Attack(name="replicated-nothing", command="plan", code=BAD,
           words=planned({"allow_replicated": ["lm_haed.weight", "modle"]}),
           says=("allow_replicated: 'lm_haed.weight' matches no parameter and is",
                 "'modle' matches no parameter and is no mesh axis; did you mean model?")),
    Attack(name="replicated-something", command="plan", code=OK,
           words=planned({"allow_replicated": ["lm_head.weight", "model"], "overrides": {"**.*norm": {"embed": None}}}),
           never=("matches no",)),
    Attack(name="rows-longer-than-the-model", command="plan", code=OK, words=planned({}, train_seq_len=128),
           says=("train_seq_len: rows of 128 tokens exceed model.max_seq_len, 64", "model.max_seq_len: 128")),
    Attack(name="rows-beyond-learned-positions", command="plan", code=BAD,
           words=planned({}, model=GPT2, train_seq_len=128),
           says=("train_seq_len: rows of 128 tokens exceed the model's max_seq_len, 64",)),
    Attack(name="adapters-of-nothing", command="train_lm", code=BAD,
           words=training({}, adapter={"type": "lora", "target_modules": ["q_porj"]}),
           says=("q_porj", "q_proj")),
]  # fmt: skip
QUICK = ("context-run", "context-plan", "context-allowed", "override-of-nothing", "replicated-nothing",
         "rows-longer-than-the-model")  # fmt: skip


@pytest.mark.parametrize("attack", table(ATTACKS, in_make_test=QUICK))
def test_a_mesh_that_wastes_or_means_nothing(attack, tmp_path):
    judge(attack, strike(attack, tmp_path))
