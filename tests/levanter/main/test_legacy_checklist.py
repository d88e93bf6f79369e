"""What a project that takes over upstream's users must do, point by point; each test says where the rest of it is."""

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import hf_folder

from levanter.config import ConfigError, load, parse_text
from levanter.main import train_lm
from levanter.main.legacy_imports import find_spec
from levanter.main.train_lm import TrainLmConfig, describe
from levanter.run import RunRefused, Target

OLD_RUN = """
data:
  train_urls: ["{folder}/text.jsonl"]
  cache_dir: {folder}/cache
  tokenizer: {tokenizer}
model:
  type: llama
  seq_len: 16
  hidden_dim: 16
  intermediate_dim: 32
  num_layers: 1
  num_heads: 2
  num_kv_heads: 2
trainer:
  tracker: {{type: noop}}
  ray: {{auto_start_cluster: false}}
  mp: f32
  num_train_steps: 2
  train_batch_size: 8
  tensor_parallel_axes: ["mlp", "heads"]
  fsdp_axis: "embed"
  batch_axis: "batch"
  model_axis_size: 2
  checkpointer: {{base_path: {folder}/checkpoints, keep: []}}
optimizer: {{learning_rate: 0.01, warmup: 1}}
"""


@pytest.fixture
def no_network(monkeypatch):
    """Every name lookup and every connection that leaves this machine fails, and is remembered."""
    asked: list[str] = []

    def refuse(*where, **_):
        asked.append(str(where[:2]))
        raise OSError(f"no network in this test: {where[:2]}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: refuse(address))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked


def test_an_old_document_trains_from_scratch_without_a_network(tmp_path, no_network, devices, capsys):
    """Points 1, 2, 8 and 9: both styles, one line a key, the mesh before anything, and nothing fetched.

    On CPU, without `require_accelerator`: it stops a CPU run only where it is asked to.
    """
    assert len(devices) == 8
    tokenizer = hf_folder.write_folder(tmp_path / "tokenizer")
    for name in ("config.json", "model.safetensors"):
        (tokenizer / name).unlink()
    texts = ["the cat sat on the mat, didn't it? " * 4] * 40
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "old.yaml"
    path.write_text(OLD_RUN.format(folder=tmp_path, tokenizer=tokenizer))
    config = load(TrainLmConfig, ["--config_path", str(path)])
    done = train_lm.train(config)
    assert done.taken == 2 and done.loss is not None and np.isfinite(done.loss)
    assert no_network == []
    said = capsys.readouterr().out
    mesh = "mesh data 4 × replica 1 × model 2 × replica_dcn 1 (DCN) × data_dcn 1 (DCN)"
    assert mesh in said and "on each device: " in said
    assert said.index(mesh) < said.index("run ")


def test_an_accelerator_is_required_only_where_it_is_asked_for(tmp_path, devices):
    del devices
    path = tmp_path / "old.yaml"
    path.write_text(OLD_RUN.format(folder=tmp_path, tokenizer="passthrough"))
    config = load(TrainLmConfig, ["--config_path", str(path), "--trainer.require_accelerator", "true"])
    with pytest.raises(ValueError, match=r"trainer\.require_accelerator is true, but JAX sees only CPU"):
        train_lm.train(config)


def test_contradictory_mixtures_are_refused_with_both_keys():
    """Point 1. The rest: tests/levanter/config/test_legacy_trainer.py."""
    with pytest.raises(ConfigError) as caught:
        parse_text(TrainLmConfig, "trainer:\n  mesh: {axes: {model: 8}}\n  model_axis_size: 4\n")
    assert "trainer.model_axis_size: contradicts `trainer.mesh.axes.model`" in str(caught.value)


def test_module_paths_of_both_versions_are_importable():
    """Point 3. What is in them: tests/levanter/main/test_legacy_imports.py."""
    root = Path(train_lm.__file__).parents[1]
    for name in (
        "lora",
        "adaptor.lora",
        "main.sft",
        "main.sft_mixture",
        "main.cache_dataset",
        "main.eval_careless_lm",
        "main.eval_sliding_lm",
        "main.eval_sliding_total",
        "books.util",
        "data.text",
        "models.lm_model",
        "models.rotary",
        "utils.mesh",
        "utils.jax_utils",
        "compat.hf_checkpoints",
        "callbacks",
        "distributed",
        "eval_harness",
    ):
        path = root.joinpath(*name.split("."))
        here = path.is_dir() or path.with_suffix(".py").is_file()
        assert here or find_spec(f"levanter.{name}") is not None, name


def test_tensor_parallel_heads_reach_q_k_and_v():
    """Point 6, with the bytes at stake: model 4 leaves a quarter of q, k, v and o on a device."""
    text = (
        "data: {tokenizer: passthrough, vocab_size: 64}\n"
        "model: {type: llama, hidden_dim: 64, intermediate_dim: 128, num_layers: 2, num_heads: 8, num_kv_heads: 4}\n"
        "trainer: {tensor_parallel_axes: [mlp, heads], fsdp_axis: null, model_axis_size: 4, train_batch_size: 8}\n"
    )
    plan = describe(parse_text(TrainLmConfig, text), Target(name="local", platform="cpu", kind="cpu", devices=8))
    attention = [one for one in plan.sharding.leaves if "self_attn" in one.leaf.path and "weight" in one.leaf.path]
    parameters = [one for one in attention if one.leaf.path.endswith("_proj.weight")]
    assert {one.leaf.path.split(".")[-2] for one in parameters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for one in parameters:
        assert one.bytes_per_device * 4 == np.prod(one.leaf.shape) * one.leaf.dtype.itemsize, one.leaf.path


def test_unknown_axes_and_large_whole_arrays_are_refused_before_a_run():
    """Points 6 and 8, where upstream is silent."""
    model = (
        "model: {type: llama, hidden_dim: 64, intermediate_dim: 128, num_layers: 2, num_heads: 8, num_kv_heads: 4}\n"
    )
    data = "data: {tokenizer: passthrough, vocab_size: 64}\n"
    target = Target(name="local", platform="cpu", kind="cpu", devices=8)
    with pytest.raises(ValueError, match=r"embd.*did you mean.*embed"):
        describe(parse_text(TrainLmConfig, f"{data}{model}trainer: {{fsdp_axis: embd}}"), target)
    whole = (
        f"{data}{model}trainer: {{mesh: {{axes: {{model: 4}}, shared_mapping: {{mlp: model, heads: null}}, "
        "param_mapping: {}, hbm_gib: 0.0001}, train_batch_size: 8}\n"
    )
    with pytest.raises((ValueError, RunRefused), match="q_proj"):
        describe(parse_text(TrainLmConfig, whole), target).check()


OPTIONAL = ["git", "wandb", "ray", "fray", "zephyr", "iris", "matplotlib", "lm_eval", "tensorboardX", "tensorboard"]
OPTIONAL += ["prompt_toolkit", "torch", "trackio", "openai", "gcsfs", "s3fs"]


@pytest.mark.slow
def test_optional_packages_are_optional():
    """Point 9: entry points import with none of them to be found (runs that draw pictures need matplotlib)."""
    text = f"""
import sys
class No:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {set(OPTIONAL)!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, No)
import levanter.main.train_lm, levanter.main.eval_lm, levanter.main.cache_dataset, levanter.main.migrate
import levanter.main.plan, levanter.main.legacy_imports, levanter.main.facades.trainer
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_only_set_mesh_enters_a_mesh_inside_the_project():
    """Point 4, the project's half: no `with mesh:` of JAX's older kind."""
    root = Path(train_lm.__file__).parents[1]
    entered = []
    for path in [*root.rglob("*.py"), *(root.parents[1] / "haliax_ext").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.With):
                for item in node.items:
                    name = item.context_expr
                    if isinstance(name, ast.Name | ast.Attribute) and ast.unparse(name).endswith("mesh"):
                        entered.append(f"{path}:{node.lineno}")
    assert entered == []
