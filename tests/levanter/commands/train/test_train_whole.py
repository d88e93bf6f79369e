"""`train_lm` with whole copies beside adapters, an adapter of the head, and adapters to begin with."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.adapter_runs import describe_here, read, tiny_llama, train
from helpers.train_processes import write_run
from safetensors.numpy import load_file

from haliax_ext.abstract import leaves
from levanter.checkpoint import CheckpointMismatchError
from levanter.models.adapters import AdapterError

LORA = "type: lora, r: 4, alpha: 8, zero_init_b: true, a_init_mode: peft"
OF_HEAD = f"{{{LORA}, target_modules: [q_proj, lm_head], modules_to_save: [embed_tokens, norm]}}"
MESH = ("--trainer.mesh", "{axes: {data: 4, model: 2}, shared_mapping: {vocab: model, mlp: model, heads: model}}")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    return tiny_llama(tmp_path_factory.mktemp("pretrained"))


def config_of(folder: Path, pretrained: Path, adapter: str, *more: str, steps: int = 4):
    run = write_run(folder, steps=steps)
    begun = ("--initialize_from_hf", str(pretrained), "--use_hf_model_config", "true")
    return read(run, *begun, "--adapter", adapter, *MESH, "--trainer.checkpointer.keep", "[{every: 2}]", *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pretrained, devices):
    """Four steps of a table, a norm, and factors of q and of the head; (config, ended, logged)"""
    folder = tmp_path_factory.mktemp("whole")
    saved = ("--peft_save_path", str(folder / "adapters"), "--merged_hf_save_path", str(folder / "merged"))
    config = config_of(folder, pretrained, OF_HEAD, *saved, "--data.num_validation_sequences", "{numbers: 8}")
    return config, *train(config, devices)


def test_the_plan_says_what_is_copied_and_what_the_head_costs(trained, pretrained):
    config, _, _ = trained
    plan = describe_here(config)
    (line,) = [check.message for check in plan.checks if check.name == "adapter"]
    # 61 rows are 62 over two shards.
    factors, copies = 4 * (2 * (16 + 16) + 16 + 62), 62 * 16 + 16
    assert line.startswith(f"2 adapters are trained, {factors + copies:,} parameters, {copies:,} of them whole copies")
    assert "(embeddings.token_embeddings.weight, transformer.norm.weight), beside " in line
    (head,) = [check.message for check in plan.checks if check.name == "adapter of the head"]
    assert head.startswith("rank 4: "), head
    groups = plan.resident_bytes
    assert {"adapters", "embedding", "norm", "frozen embedding", "frozen head", "frozen mlp"} <= groups.keys()
    # The copies are counted where a full step's parameters are, and spare nothing.
    bare = f"{{{LORA}, target_modules: [q_proj, lm_head]}}"
    other = describe_here(
        replace(
            config,
            adapter=read(Path(config.trainer.checkpointer.base_path).parent / "run.yaml", "--adapter", bare).adapter,
        )
    )
    (with_copies,), (without,) = ([each for each in p.workloads if each.program == "train_step"] for p in (plan, other))
    assert with_copies.flops_full == without.flops_full, "a table is looked up in, and a norm multiplies nothing"


def files(ended, config):
    own = load_file(Path(ended.exported) / "adapter_model.safetensors")
    merged = load_file(Path(config.merged_hf_save_path) / "run" / "step-4" / "model.safetensors")
    return own, merged


def test_what_is_saved_and_merged(trained, pretrained):
    config, ended, logged = trained
    assert 0 < logged.found[3]["eval/loss"] < 10
    own, merged = files(ended, config)
    said = json.loads((Path(ended.exported) / "adapter_config.json").read_text())
    assert said["modules_to_save"] == ["embed_tokens", "model.norm"] and not said["ensure_weight_tying"]
    assert said["target_modules"] == ["lm_head", "q_proj"]
    base, prefix = load_file(pretrained / "model.safetensors"), "base_model.model."
    table = own[f"{prefix}model.embed_tokens.weight"]
    assert table.shape == (61, 16) and np.abs(table - base["model.embed_tokens.weight"]).max() > 1e-3
    assert own[f"{prefix}lm_head.lora_B.weight"].shape == (61, 4) and own[f"{prefix}lm_head.lora_B.weight"].any()
    assert merged.keys() == base.keys()
    for name, x in base.items():
        module = f"{prefix}{name.removesuffix('.weight')}"
        a, b = (own.get(f"{module}.lora_{which}.weight") for which in "AB")
        wanted = own.get(f"{prefix}{name}", x) + (0 if a is None else 2 * (b @ a))
        np.testing.assert_allclose(merged[name], wanted, atol=1e-6, err_msg=name)


def test_resumed_bit_for_bit_and_by_nobody_else(trained, tmp_path, devices):
    config, ended, logged = trained
    trainer = replace(config.trainer, load_checkpoint_path=str(Path(ended.checkpoint.path).parent / "step-2"))
    trainer = replace(trainer, checkpointer=replace(trainer.checkpointer, base_path=str(tmp_path)))
    again = replace(config, trainer=trainer, peft_save_path=str(tmp_path / "a"), merged_hf_save_path=None)
    ended_again, found = train(again, devices)
    assert found.losses() == {step: logged.losses()[step] for step in (2, 3)}
    own, other = (load_file(Path(each.exported) / "adapter_model.safetensors") for each in (ended, ended_again))
    assert all(x.tobytes() == other[name].tobytes() for name, x in own.items())
    fewer = replace(again, adapter=replace(config.adapter, modules_to_save=["norm"]))
    fewer = replace(fewer, trainer=replace(trainer, resume_with_changes=True))
    (said,) = [
        check.message for check in describe_here(fewer).checks if isinstance(check.error, CheckpointMismatchError)
    ]
    assert "embeddings.token_embeddings.weight: trained whole when it was saved, frozen now" in said


def test_adapters_to_begin_with(trained, pretrained, tmp_path, devices):
    config, ended, _ = trained
    begun = replace(config.adapter, initialize_from=ended.exported)
    still = config_of(tmp_path, pretrained, OF_HEAD, "--optimizer.learning_rate", "0.0", steps=1)
    still = replace(still, adapter=begun, peft_save_path=str(tmp_path / "adapters"))
    again, _ = train(still, devices)
    own, other = (load_file(Path(each.exported) / "adapter_model.safetensors") for each in (ended, again))
    assert own.keys() == other.keys() and all(x.tobytes() == other[name].tobytes() for name, x in own.items())
    wrong = replace(begun, r=3, modules_to_save=["norm"], target_modules=["q_proj", "k_proj"])
    with pytest.raises(AdapterError) as caught:
        describe_here(replace(still, adapter=wrong))
    said = str(caught.value)
    assert said.startswith("adapter.initialize_from: it has other adapters than the run trains; 4 differ:")
    assert "self_attn.k_proj: none in " in said and "rank 3, scale 2.66667 (k_proj) in this run" in said
    assert "lm_head: rank 4, scale 2 (lm_head) in " in said
    assert "embeddings.token_embeddings.weight: whole in " in said and "not whole in this run" in said


@pytest.mark.slow
def test_a_tied_table_is_the_head_s_too(tmp_path, devices):
    """One table is trained; the merged model has one, which is what was trained."""
    pytest.importorskip("torch")
    base = tiny_llama(tmp_path / "base", tie_word_embeddings=True)
    adapter = f"{{{LORA}, target_modules: [o_proj], modules_to_save: [embed_tokens]}}"
    saved = ("--peft_save_path", str(tmp_path / "adapters"), "--merged_hf_save_path", str(tmp_path / "merged"))
    config = config_of(tmp_path / "run", base, adapter, *saved, steps=4)
    ended, logged = train(config, devices)
    assert logged.losses()[3] < logged.losses()[0]
    own, merged = files(ended, config)
    assert json.loads((Path(ended.exported) / "adapter_config.json").read_text())["ensure_weight_tying"]
    name = "model.embed_tokens.weight"
    assert own["base_model.model.lm_head.weight"].tobytes() == own[f"base_model.model.{name}"].tobytes()
    assert "lm_head.weight" not in merged and merged[name].tobytes() == own[f"base_model.model.{name}"].tobytes()
    for named in ("lm_head", "embed_tokens"):
        with pytest.raises(AdapterError, match=r"adapter.modules_to_save: \[embed_tokens\] trains it whole"):
            describe_here(replace(config, adapter=replace(config.adapter, target_modules=[named])))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ("[embed_tokenz]", "'embed_tokenz' names no module; did you mean embed_tokens"),
        ("[mlp]", "only norms, tables and the output head are trained whole beside adapters"),
        ("[lm_head]", "'lm_head' is trained whole, and adapter.target_modules gives it an adapter; leave one out"),
    ],
)
def test_what_is_not_copied(pretrained, tmp_path, names, says):
    adapter = f"{{{LORA}, target_modules: [q_proj, lm_head], modules_to_save: {names}}}"
    with pytest.raises(AdapterError) as caught:
        describe_here(config_of(tmp_path, pretrained, adapter))
    assert says in str(caught.value)


@pytest.mark.slow
def test_copies_begin_as_the_model_s(pretrained, tmp_path, devices):
    """Without a step, a merged model is the base."""
    everything = "[embed_tokens, norm, lm_head, input_layernorm, post_attention_layernorm]"
    adapter = f"{{{LORA}, target_modules: [q_proj], modules_to_save: {everything}}}"
    config = config_of(tmp_path, pretrained, adapter, "--optimizer.learning_rate", "0.0", steps=1)
    plan = describe_here(config)
    init = plan.program("init_adapters")
    copied = leaves(init.input("copied").value)
    assert len(copied) == 5
    ended, _ = train(replace(config, peft_save_path=str(tmp_path / "adapters")), devices)
    found, base = (
        load_file(Path(ended.exported) / "adapter_model.safetensors"),
        load_file(pretrained / "model.safetensors"),
    )
    names = [name for name in base if "norm" in name or "embed" in name or "lm_head" in name]
    assert len(names) == 7
    for name in names:
        assert found[f"base_model.model.{name}"].tobytes() == base[name].tobytes()


RENEWED = ("--reinit_tokens", '["7", "60"]')


@pytest.mark.parametrize("kind", ["adapters", pytest.param("everything", marks=pytest.mark.slow)])
def test_rows_that_begin_anew(pretrained, tmp_path, devices, kind):
    """Those of two tokens, in table and head; without a step everything else is the base's."""
    still = ("--optimizer.learning_rate", "0.0", *RENEWED)
    if kind == "adapters":
        adapter = f"{{{LORA}, target_modules: [q_proj], modules_to_save: [embed_tokens, lm_head]}}"
        saved = ("--peft_save_path", str(tmp_path / "adapters"))
        ended, _ = train(config_of(tmp_path, pretrained, adapter, *still, *saved, steps=1), devices)
        found = load_file(Path(ended.exported) / "adapter_model.safetensors")
        found = {name.removeprefix("base_model.model."): x for name, x in found.items() if "lora" not in name}
    else:
        saved = ("--hf_save_path", str(tmp_path / "exports"))
        ended, _ = train(config_of(tmp_path, pretrained, "{type: none}", *still, *saved, steps=1), devices)
        found = load_file(Path(ended.exported) / "model.safetensors")
    base = load_file(pretrained / "model.safetensors")
    for name, x in found.items():
        moved = np.abs(x - base[name]).reshape(len(x), -1).max(axis=1) > 0
        assert np.flatnonzero(moved).tolist() == ([7, 60] if name in TABLES else []), name
    assert found.keys() >= TABLES
    assert np.abs(found["lm_head.weight"][7] - found["model.embed_tokens.weight"][7]).max() > 1e-3


TABLES = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--reinit_tokens", "true"), "reinit_tokens: true meant the tokens of one model's tokenizer; list"),
        (
            RENEWED,
            "embeddings.token_embeddings.weight is frozen while adapters are trained, so its new rows would stay "
            "random; name it in adapter.modules_to_save, or leave it as it is with reinit_embeddings: false",
        ),
        ((*RENEWED, "--initialize_from_hf", "false", "--use_hf_model_config", "false"), "begins from no Hugging Face"),
        (
            (*RENEWED, "--reinit_embeddings", "false", "--reinit_lm_head", "false"),
            "so nothing is reinitialized",
        ),
    ],
)
def test_rows_that_cannot_begin_anew(pretrained, tmp_path, words, says):
    with pytest.raises(ValueError) as caught:
        describe_here(config_of(tmp_path, pretrained, f"{{{LORA}, target_modules: [q_proj]}}", *words))
    assert says in str(caught.value)
