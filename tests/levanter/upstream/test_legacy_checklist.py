"""What a project that takes over upstream's users must do, point by point: `POINTS` says which tests show each."""

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path

import haliax as hax
import jax
import numpy as np
import pytest
from helpers import hf_folder

import levanter
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.export import export_lm_to_hf
from levanter.commands.export.export_lm_to_hf import ConvertLmConfig
from levanter.commands.memorize import eval_careless_lm
from levanter.commands.memorize.eval_careless_lm import EvalCarelessLmConfig
from levanter.commands.tokenize import cache_dataset
from levanter.commands.tokenize.cache_dataset import CacheDatasetConfig
from levanter.commands.train.lm import train_lm
from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.config import ConfigError, load, parse_text
from levanter.runplan import RunPlan, RunRefused, Target
from levanter.upstream.imports import find_spec

HERE = "tests/levanter/upstream/test_legacy_checklist.py"
LEGACY = "tests/levanter/config/test_legacy"
POINTS = {
    "1 both trainer styles in one document, a line for each key, contradictions refused": (
        f"{HERE}::test_an_old_document_trains_from_scratch_without_a_network",
        f"{HERE}::test_contradictory_mixtures_are_refused_with_both_keys",
        f"{HERE}::test_one_document_may_have_both_styles",
        f"{LEGACY}_keys.py::test_every_key_is_known",
        f"{LEGACY}_keys.py::test_no_row_of_the_table_is_silent",
        f"{LEGACY}_documents.py::test_a_document_means_what_it_meant",
        "tests/levanter/commands/model/test_unsupported.py::test_every_key_is_read_somewhere_or_listed",
    ),
    "2 both data styles, seq_len and max_seq_len, members by both names": (
        f"{LEGACY}_data.py",
        f"{HERE}::test_a_set_that_was_tokenized_before_needs_no_text",
        f"{HERE}::test_members_have_the_names_of_both_generations",
    ),
    "3 module paths of both generations": (
        f"{HERE}::test_module_paths_of_both_versions_are_importable",
        "tests/levanter/upstream/test_legacy_imports.py::test_every_name_is_there_and_told_once",
        "tests/levanter/upstream/test_legacy_imports.py::test_a_script_of_all_the_rest",
        "tests/levanter/upstream/test_legacy_imports.py::test_an_evaluation_of_2025_in_a_script",
    ),
    "4 both ways of entering a mesh, and none": (
        f"{HERE}::test_a_mesh_is_entered_both_ways_or_not_at_all",
        f"{HERE}::test_only_set_mesh_enters_a_mesh_inside_the_project",
        "tests/levanter/upstream/test_legacy_imports.py::test_a_script_loads_a_llama_and_computes_its_loss",
    ),
    "5 the loader places by the target's sharding, streams, names tensors, reports unused ones": (
        f"{HERE}::test_the_loader_names_every_tensor_that_is_wrong",
        "tests/levanter/compat/hf/test_converter.py::test_weights_arrive_whole_without_a_mesh_and_in_shards_on_one",
        "tests/haliax_ext/test_loading.py",
    ),
    "6 [mlp, heads] shards q, k and v, or says what is at stake": (
        f"{HERE}::test_tensor_parallel_heads_reach_q_k_and_v",
        f"{HERE}::test_unknown_axes_and_large_whole_arrays_are_refused_before_a_run",
        "tests/levanter/mesh/test_devices.py::test_report_of_attention_that_is_cut",
    ),
    "7 no padding row in a result": (
        f"{HERE}::test_no_padding_row_is_in_a_result",
        "tests/levanter/commands/memorize/test_eval_careless_lm.py::test_no_row_comes_from_filling_up_the_last_batch",
        "tests/levanter/memorization/test_runner.py",
    ),
    "8 mesh, mappings and bytes are printed before anything is fetched": (
        f"{HERE}::test_an_old_document_trains_from_scratch_without_a_network",
        f"{HERE}::test_the_mesh_is_printed_before_a_weight_is_read",
    ),
    "9 optional packages are optional": (
        f"{HERE}::test_optional_packages_are_optional",
        f"{HERE}::test_an_old_document_trains_from_scratch_without_a_network",
    ),
    "and checkpoints of upstream's trainer are refused by name": (
        f"{HERE}::test_checkpoints_of_upstream_are_refused_by_name",
    ),
}
"""Each point of the checklist → the tests of it: a file, or one test in it."""


@pytest.mark.parametrize("point", POINTS)
def test_every_point_has_its_tests(point: str):
    root = Path(__file__).parents[3]
    for where in POINTS[point]:
        file, _, name = where.partition("::")
        tests = [node.name for node in ast.parse((root / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in tests if name else any(test.startswith("test_") for test in tests), where


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
    assert run_entry_point(TrainLmConfig, train_lm.main, ["--config_path", str(path)]) == 0
    assert [path.name for path in tmp_path.glob("checkpoints/*/step-*")] == ["step-2"]
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


def test_one_document_may_have_both_styles():
    """Point 1: a new mesh with an old model key and an old data block."""
    text = (
        "trainer: {mesh: {axes: {model: 2}}, wandb: {project: p}}\nmodel: {type: llama, seq_len: 64}\n"
        "data: {tokenizer: passthrough, vocab_size: 8, configs: {a: {train_urls: [a.jsonl]}}, train_weights: {a: 1}}\n"
    )
    config = parse_text(TrainLmConfig, text)
    assert (config.trainer.mesh.axes, config.model.max_seq_len, list(config.data.components)) == (
        {"model": 2},
        64,
        ["a"],
    )


def test_a_set_that_was_tokenized_before_needs_no_text(tmp_path, capsys):
    """Point 2: `cache_dataset` of 2025, then a mixture that names the cache alone; upstream's own cache is refused."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"1 2 3 {n} 5 6 7"}) + "\n" for n in range(60)))
    keys = "tokenizer: passthrough\nvocab_size: 61\n"
    path = tmp_path / "cache.yaml"
    path.write_text(
        f"train_urls: [{tmp_path}/text.jsonl]\n{keys}cache_dir: {tmp_path}/cache\ntracker: {{type: noop}}\n"
    )
    assert run_entry_point(CacheDatasetConfig, cache_dataset.main, ["--config_path", str(path)]) == 0
    assert "tracker: {type: noop} → trainer.tracker: {type: noop}" in capsys.readouterr().err

    small = "hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2"
    checkpoints = f"checkpointer: {{base_path: {tmp_path}/checkpoints}}"

    def plan_of(folder: str) -> RunPlan:
        text = (
            f"data:\n  configs: {{web: {{cache_dir: {tmp_path}/{folder}}}}}\n  train_weights: {{web: 1}}\n"
            "  tokenizer: passthrough\n  vocab_size: 61\n"
            f"model: {{type: llama, seq_len: 16, {small}}}\n"
            f"trainer: {{train_batch_size: 8, log_dir: {tmp_path}/logs, {checkpoints}}}\n"
        )
        return describe(parse_text(TrainLmConfig, text), Target(name="local", platform="cpu", kind="cpu", devices=8))

    plan = plan_of("cache")
    plan.check()
    said = [check.message for check in plan.checks]
    assert any(line.startswith("web: token store only; token store ") for line in said)
    assert "data.components.web: has no source; nothing is evaluated" in said
    (tmp_path / "old" / "train").mkdir(parents=True)
    (tmp_path / "old" / "train" / "shard_ledger.json").write_text('{"total_num_rows": 3, "is_finished": true}')
    with pytest.raises(ValueError, match=r"has no source, .*; upstream's token cache in this folder is not read"):
        plan_of("old").check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_members_have_the_names_of_both_generations():
    """Point 2, in scripts."""
    from levanter.models import LlamaConfig
    from levanter.trainer import TrainerConfig
    from levanter.upstream.facades.models import LmExample

    config = LlamaConfig(max_seq_len=16)
    assert config.Pos == config.max_Pos == hax.Axis("position", 16) and config.seq_len == config.max_seq_len == 16
    tokens = hax.named(np.arange(16), "position")
    by_weight = LmExample.causal(tokens, loss_weight=hax.ones(hax.Axis("position", 16)))
    by_mask = LmExample.causal(tokens, loss_mask=hax.ones(hax.Axis("position", 16)))
    assert (by_weight.loss_mask.array == by_mask.loss_weight.array).all() and by_mask.loss_weight.array.sum() == 15
    trainer = TrainerConfig(batch_axis="rows")
    assert trainer.batch_axis == trainer.batch_axis_name == "rows"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mesh_is_entered_both_ways_or_not_at_all(tmp_path, devices):
    """Point 4: `with trainer.device_mesh:`, `with trainer.use_device_mesh():`, and `load_pretrained` under each."""
    from levanter.compat.hf.converter import HFCheckpointConverter
    from levanter.trainer import TrainerConfig

    trainer = TrainerConfig(tensor_parallel_axes=["mlp", "heads"], model_axis_size=2, fsdp_axis="embed")
    converter = HFCheckpointConverter.from_hf(str(hf_folder.write_folder(tmp_path / "model")))

    def gate() -> jax.Array:
        return converter.load_pretrained(axis_mapping=rules).transformer.layers.stacked.mlp.gate_proj.weight.array

    rules: dict[str, object] = {}
    alone = gate()
    rules = trainer.parameter_axis_mapping
    with trainer.device_mesh as mesh:
        assert jax.sharding.get_mesh() == mesh == trainer.device_mesh and mesh.shape["model"] == 2
        first = gate()
    with trainer.use_device_mesh():
        assert jax.sharding.get_mesh().shape["model"] == 2
        second = gate()
    assert jax.sharding.get_mesh().empty
    assert len(alone.devices()) == 1 and first.sharding == second.sharding and len(first.devices()) == len(devices)
    assert first.sharding.shard_shape(first.shape) == (2, 24, 8)
    assert (np.asarray(alone) == np.asarray(first)).all() and (np.asarray(first) == np.asarray(second)).all()


def test_the_loader_names_every_tensor_that_is_wrong(tmp_path):
    """Point 5: missing and unused tensors, or those of another shape, by name, before a weight is read."""
    from levanter.compat.hf.converter import HFCheckpointConverter

    def refused(folder: str, weights: dict[str, np.ndarray]) -> str:
        path = hf_folder.write_folder(tmp_path / folder, weights=weights)
        with pytest.raises(ValueError) as caught:
            HFCheckpointConverter.from_hf(str(path)).load_pretrained()
        return str(caught.value)

    missing, unused = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"
    weights = hf_folder.tensors()
    weights[unused] = weights.pop(missing)[:, 0]
    said = refused("other", weights)
    assert missing in said and unused in said
    wrong = "model.layers.0.self_attn.k_proj.weight"
    weights = hf_folder.tensors()
    assert wrong in refused("short", {**weights, wrong: weights[wrong][:3]})


def test_no_padding_row_is_in_a_result(tmp_path):
    """Point 7: nine windows in batches of four give nine probabilities, none of them the 1.0 of a row of padding."""
    folder = hf_folder.write_folder(tmp_path / "model")
    (tmp_path / "book.txt").write_text("the cat sat on the mat, and the dog did not; " * 3)
    old = {
        "hf_checkpoint": str(folder),
        "txt_path": str(tmp_path / "book.txt"),
        "output_base_path": str(tmp_path / "out"),
        "chunk_size": 12,
        "prompt_tokens": 6,
        "token_mode": True,
        "cursor_inc_tokens": 5,
        "max_examples": 9,
        "eval_batch_size": 8,
        "use_dataloader": True,
        "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "tensor_parallel_axes": ["mlp"], "fsdp_axis": None},
    }
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert run_entry_point(EvalCarelessLmConfig, eval_careless_lm.main, ["--config_path", str(path)]) == 0
    found = np.load(tmp_path / "out" / "pz_data.npz")
    assert len(found["pz_values"]) == len(found["span_ranges"]) == 9
    assert (found["pz_values"] < 0.5).all()


def test_the_mesh_is_printed_before_a_weight_is_read(tmp_path, capsys, monkeypatch):
    """Point 8. What a plan is made of (config.json, headers, the tokenizer) is read before; no weight is."""
    from levanter.compat.hf.index import SafetensorsSource

    printed: list[str] = []
    read = SafetensorsSource.read

    def watched(self, *where, **how):
        printed.append(capsys.readouterr().out)
        return read(self, *where, **how)

    monkeypatch.setattr(SafetensorsSource, "read", watched)
    folder = hf_folder.write_folder(tmp_path / "model")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the cat sat on the mat. " * 8}) + "\n")
    document = {
        "hf_checkpoint": str(folder),
        "max_eval_length": 16,
        "data": {"components": {"a": {"source": {"validation_urls": [str(tmp_path / "text.jsonl")]}}}},
        "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "tensor_parallel_axes": ["mlp"], "model_axis_size": 2},
    }
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(document))
    assert run_entry_point(EvalLmConfig, eval_lm.main, ["--config_path", str(path)]) == 0
    assert "mesh data 4 × replica 1 × model 2" in printed[0] and "on each device: " in printed[0]
    assert "mlp: model" in printed[0] and "embed: " in printed[0]


UPSTREAM_FILES = {"manifest.ocdbt": b"\x0c\xdb", "d/5bc3641399f0c24a59827921febbf567": b"\x00"}
UPSTREAM_METADATA = '{"step": 7, "timestamp": "2026-06-18T10:00:00.000000", "is_temporary": false}'


@pytest.mark.parametrize("complete", [True, False], ids=["saved", "without metadata"])
@pytest.mark.parametrize(
    ("cls", "main", "document"),
    [
        (EvalLmConfig, eval_lm.main, "checkpoint_path: {path}"),
        (TrainLmConfig, train_lm.main, "initialize_from_checkpoint_path: {path}\ndata: {{tokenizer: passthrough}}"),
        (TrainLmConfig, train_lm.main, "trainer: {{load_checkpoint_path: {path}}}\ndata: {{tokenizer: passthrough}}"),
        (ConvertLmConfig, export_lm_to_hf.main, "checkpoint_path: {path}\noutput_dir: {path}/hf"),
    ],
    ids=["eval_lm", "train_lm", "train_lm-resume", "export_lm_to_hf"],
)
def test_checkpoints_of_upstream_are_refused_by_name(cls, main, document: str, *, complete: bool, tmp_path, capsys):
    """TensorStore's files, as upstream's trainer writes them: what they are, and what to do with them."""
    step = tmp_path / "run" / "step-7"
    for name, content in UPSTREAM_FILES.items():
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (step / name).write_bytes(content)
    if complete:
        (step / "metadata.json").write_text(UPSTREAM_METADATA)
    small = "model: {type: llama, hidden_dim: 16, intermediate_dim: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2, "
    path = tmp_path / "run.yaml"
    path.write_text(f"{document.format(path=step)}\n{small}max_seq_len: 16, vocab_size: 64}}\n")
    asked = ["--config_path", str(path), "--trainer.tracker.type", "noop", "--trainer.train_batch_size", "8"]
    assert run_entry_point(cls, main, asked) == 2
    said = capsys.readouterr().err
    assert f"{step}: a checkpoint of upstream Levanter (TensorStore), which cannot be read here" in said
    assert f"levanter.main.export_lm_to_hf --checkpoint_path {step}" in said and "initialize_from_hf" in said


def test_module_paths_of_both_versions_are_importable():
    """Point 3. What is in them: tests/levanter/upstream/test_legacy_imports.py."""
    root = Path(levanter.__file__).parent
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
import levanter.main.plan, levanter.upstream.imports, levanter.upstream.facades.trainer
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr


def test_only_set_mesh_enters_a_mesh_inside_the_project():
    """Point 4, the project's half: no `with mesh:` of JAX's older kind."""
    root = Path(levanter.__file__).parent
    entered = []
    for path in [*root.rglob("*.py"), *(root.parents[1] / "haliax_ext").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.With):
                for item in node.items:
                    name = item.context_expr
                    if isinstance(name, ast.Name | ast.Attribute) and ast.unparse(name).endswith("mesh"):
                        entered.append(f"{path}:{node.lineno}")
    assert entered == []
