"""`export_lm_to_hf --int8`: what stands in the files by the format's formula, and that it is read back bit for bit."""

import json
import random
import shutil
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.family_models import CPU8, describe_folder, score
from helpers.llama_on_mesh import tiny_config
from helpers.saved_run import IDS, TEXT, write_checkpoint, write_tokenizer
from safetensors.numpy import load_file
from transformers.utils import is_compressed_tensors_available

from haliax_ext.abstract import with_arrays
from levanter.commands.cli.errors import run_entry_point
from levanter.commands.evaluate.eval_lm import EvalLmConfig
from levanter.commands.evaluate.eval_lm import main as evaluate
from levanter.commands.export.export_lm_to_hf import ConvertLmConfig, main
from levanter.commands.model.pretrained import ModelChoice, describe_pretrained, load_pretrained
from levanter.config import load

LAYER = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer")


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer, devices):
    return write_checkpoint(tmp_path_factory.mktemp("saved") / "run", tokenizer)


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "out"
    assert export(saved, out, "--dtype", "bfloat16", "--max_shard_bytes", "60000") == 0
    return out


def export(saved, out, *words):
    words = ["--checkpoint_path", str(saved), "--output_dir", str(out), "--int8", "true", *words]
    return run_entry_point(ConvertLmConfig, main, words)


def planned(mesh: str, **choice):
    trainer = load(EvalLmConfig, ["--hf_checkpoint", "x", "--trainer.mp", "bfloat16", "--trainer.mesh", mesh]).trainer
    model = ModelChoice(reference=None, model=None, tokenizer=None, trainer=trainer)
    return describe_pretrained(replace(model, **choice), CPU8, batch=lambda _: 8, positions=16)


def arrays(mesh: str, **choice):
    described = planned(mesh, **choice)
    for check in described.checks:
        if check.error is not None:
            raise check.error
    found = load_pretrained(described, described.resolved.spec.build(jax.devices()[:8]), show=False).arrays
    with_arrays(described.abstract, found)
    return {path: np.asarray(x) for path, x in found.items()}, described


def tensors_of(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def test_integers_are_packed_by_the_formats_formula(saved, exported):
    """Integer n of a word is (word >> 8n & 255) − 128; rows are output channels."""
    plain = exported.parent / "plain"
    words = ["--checkpoint_path", str(saved), "--output_dir", str(plain)]
    assert run_entry_point(ConvertLmConfig, main, words) == 0
    exact, found = tensors_of(plain), tensors_of(exported)
    document = json.loads((exported / "config.json").read_text())
    assert document["dtype"] == "bfloat16"
    assert document["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": [],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }
    assert len(list(exported.glob("model-*.safetensors"))) > 1
    matrices = [name for name in exact if "proj" in name or "lm_head" in name]
    assert len(matrices) == 2 * 7 + 1
    for name in matrices:
        weight = exact[name]
        scale, word, shape = (found.pop(f"{name}_{part}") for part in ("scale", "packed", "shape"))
        assert shape.tolist() == list(weight.shape) and scale.dtype == np.float32 and word.dtype == np.int32
        np.testing.assert_array_equal(scale[:, 0], np.abs(weight).max(1) * np.float32(1 / 127))
        q = np.stack([(word.view(np.uint32) >> (8 * n) & 255).astype(np.int64) - 128 for n in range(4)], -1)
        q = q.reshape(weight.shape)
        assert np.abs(q).max() == 127 and (np.abs(weight - q * scale) <= scale * 0.50001).all()
    rest = {name for name in exact if name not in matrices}
    assert found.keys() == rest and all(found[name].dtype.name == "bfloat16" for name in rest)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_it_is_read_back_bit_for_bit(quantize, saved, exported):
    """And is what `quantize: int8` makes of the checkpoint, on another mesh; asked for again, it stays so."""
    mine, _ = arrays("{axes: {data: 8}}", saved=str(saved), quantize="int8")
    cut = "{axes: {data: 2, model: 4}, shared_mapping: {vocab: model, embed: data}}"
    theirs, described = arrays(cut, reference=str(exported), quantize=quantize)
    integers = [path for path in mine if path.endswith((".q", ".scale"))]
    assert len(integers) == 2 * (7 + 1) and theirs.keys() == mine.keys()
    for path in mine:
        kept = slice(0, IDS) if "lm_head" in path or "embeddings" in path else slice(None)
        assert mine[path][kept].tobytes() == theirs[path][kept].tobytes(), path
    said = [check.message for check in described.checks if check.name == "int8"]
    assert len(said) == 1 and said[0].startswith("8 projections (8 stored as int8); bytes: ")


def test_a_tied_head_is_the_table_and_is_made_int8_again(tokenizer, tmp_path, devices):
    saved = write_checkpoint(tmp_path / "run", tokenizer, config=tiny_config(vocab_size=IDS, tie_word_embeddings=True))
    assert export(saved, tmp_path / "out") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == ["lm_head"]
    mine, _ = arrays("{axes: {data: 8}}", saved=str(saved), quantize="int8")
    theirs, _ = arrays("{axes: {data: 8}}", reference=str(tmp_path / "out"), quantize="int8")
    stored, _ = arrays("{axes: {data: 8}}", reference=str(tmp_path / "out"))
    assert mine.keys() == theirs.keys() and all(mine[path].tobytes() == theirs[path].tobytes() for path in mine)
    assert mine.keys() - stored.keys() == {"lm_head.weight.q", "lm_head.weight.scale"}


def test_plain_integers_and_16_bit_scales_are_read(exported, tmp_path):
    """As other tools write them: int8 under the weight's own name, −128 among them, scales in the model's dtype."""
    import ml_dtypes

    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exported / file, tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    document["quantization_config"]["format"] = "int-quantized"
    (tmp_path / "config.json").write_text(json.dumps(document))
    tensors = tensors_of(exported)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("_packed")]:
        base = name.removesuffix("_packed")
        shape = tuple(tensors.pop(f"{base}_shape"))
        tensors[base] = rng.integers(-128, 128, shape).astype(np.int8)
        tensors[f"{base}_scale"] = tensors[f"{base}_scale"].astype(ml_dtypes.bfloat16)
        del tensors[name]
    save_bfloat16(tensors, tmp_path / "model.safetensors")
    found, _ = arrays("{axes: {data: 2, model: 4}}", reference=str(tmp_path))
    path = "transformer.layers.stacked.mlp.down_proj.weight"
    np.testing.assert_array_equal(found[f"{path}.q"][1], tensors[LAYER])
    np.testing.assert_array_equal(found[f"{path}.scale"][1], tensors[f"{LAYER}_scale"][:, 0].astype(np.float32))


def test_a_config_alone_is_planned_as_int8(exported, tmp_path):
    """A quantized checkpoint that is elsewhere: its config.json says which weights are integers, and how many bytes."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exported / file, tmp_path)
    model = planned("{axes: {data: 8}}", reference=str(tmp_path))
    q = model.load_plan.by_path["lm_head.weight.q"]
    assert (q.sources, q.source_dtype, q.derived) == (("lm_head.weight",), np.dtype(np.int8), None)
    scale = model.load_plan.by_path["transformer.layers.stacked.mlp.up_proj.weight.scale"]
    assert scale.sources == tuple(f"model.layers.{n}.mlp.up_proj.weight_scale" for n in range(2))
    assert q.source_bytes == IDS * 64


def save_bfloat16(tensors, file):
    import torch
    from safetensors.torch import save_file as save

    def as_torch(x):
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(x))

    save({name: as_torch(x) for name, x in tensors.items()}, file)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (GPTQ, r"weights are quantized by 'gptq' of 4 bits \(quantization_config\.quant_method\), which is not read"),
        ({"quant_method": "awq", "bits": 4}, "weights are quantized by 'awq' of 4 bits"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "weights are quantized by 'bitsandbytes' "),
        ("int8", "quantization_config is 'int8', expected a mapping"),
        ({"num_bits": 4}, r"group_0\.weights\.num_bits is 4, not 8"),
        ({"symmetric": False}, r"group_0\.weights\.symmetric is False, not True"),
        ({"strategy": "group", "group_size": 128}, r"group_0\.weights\.strategy is 'group', not 'channel'"),
        ({"type": "float"}, r"group_0\.weights\.type is 'float', not 'int'"),
        (
            {"input_activations": {"num_bits": 8}},
            r"group_0\.input_activations: quantized activations are not supported",
        ),
        ({"format": "float-quantized"}, r"quantization_config\.format is 'float-quantized', not pack-quantized"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "a quantized cache of keys and values is not read"),
        ({"config_groups": {}}, r"quantization_config\.config_groups is \{\}, expected a mapping of groups"),
    ],
)
def test_other_formats_are_refused_by_name(block, said, exported, tmp_path, capsys):
    for file in exported.iterdir():
        shutil.copy(file, tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    own = document["quantization_config"]
    if isinstance(block, dict) and "quant_method" not in block:
        group = own["config_groups"]["group_0"]
        for key, value in block.items():
            place = own if key in own else group if key in group else group["weights"]
            place[key] = value
        block = own
    document["quantization_config"] = block
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=said) as refused:
        arrays("{axes: {data: 8}}", reference=str(tmp_path), quantize="int8")
    assert "W8A16" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{LAYER}_scale"), f"tensor '{LAYER}' is int8, and there is no '{LAYER}_scale'"),
        (lambda t: t.update({f"{LAYER}_scale": np.ones((1, 1), np.float32)}), "a scale per output channel"),
        (lambda t: t.update({f"{LAYER}_packed": np.ones((4, 4), np.int64)}), "expected int32"),
        (lambda t: t.pop(f"{LAYER}_packed"), f"{LAYER}_scale"),
        (lambda t: t.update({f"{LAYER}_packed": t[f"{LAYER}_packed"][:, :-1].copy()}), "says [64, 96]"),
        (lambda t: t.pop(f"{LAYER}_shape"), f"'{LAYER}_packed' has no '{LAYER}_shape'"),
        (lambda t: t.update({f"{LAYER}_shape": t[f"{LAYER}_shape"][::-1].copy()}), "says [96, 64]"),
        (lambda t: t.update({f"{LAYER}_shape": np.asarray([64, -96])}), "says [64, -96]"),
        (lambda t: t.update({f"{LAYER}_shape": np.asarray([64, 94])}), "rows that do not fill their integers"),
        (lambda t: t.update({f"{LAYER}_shape": np.ones(3, np.int64)}), "expected two integers"),
        (lambda t: t[f"{LAYER}_scale"].fill(np.nan), "are not finite"),
    ],
)
def test_damaged_folders_are_refused(change, said, exported, tmp_path):
    for file in exported.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copy(file, tmp_path)
    tensors = tensors_of(exported)
    change(tensors)
    if tensors.get("model.norm.weight") is not None:
        save_bfloat16(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        arrays("{axes: {data: 8}}", reference=str(tmp_path))


def test_layers_that_differ_are_refused_where_they_are_one_array(exported, tmp_path):
    for file in exported.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copy(file, tmp_path)
    tensors = tensors_of(exported)
    shape = tuple(tensors.pop(f"{LAYER}_shape"))
    del tensors[f"{LAYER}_packed"], tensors[f"{LAYER}_scale"]
    import ml_dtypes

    tensors[LAYER] = np.ones(shape, ml_dtypes.bfloat16)
    save_bfloat16(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{LAYER} is stored as bfloat16, but .* make it int8"):
        arrays("{axes: {data: 8}}", reference=str(tmp_path))
    _ignore(tmp_path, [LAYER.removesuffix(".weight")])
    with pytest.raises(ValueError, match=rf"is one array of 2 tensors, of which {LAYER} are not stored as int8"):
        arrays("{axes: {data: 8}}", reference=str(tmp_path))


def _ignore(folder, patterns):
    document = json.loads((folder / "config.json").read_text())
    document["quantization_config"]["ignore"] = patterns
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 20))])
def test_what_is_int8_must_be_what_the_configuration_says(seed, exported, tmp_path):
    """Which modules are plain in the files, and which are ignored, is drawn: they are read where both are the same."""
    import ml_dtypes

    from levanter.compat.hf.errors import ConfigMismatchError
    from levanter.compat.open import open_checkpoint

    draw = random.Random(20261128 + seed)
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    plain = set(draw.sample(kinds, draw.randrange(4)))
    ignored = plain if draw.random() < 0.5 else set(draw.sample(kinds, draw.randrange(4)))
    for file in exported.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            shutil.copy(file, tmp_path)
    tensors = tensors_of(exported)
    for name in [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]:
        if name.split(".")[-2] in plain:
            shape = tuple(tensors.pop(f"{name}_shape"))
            del tensors[f"{name}_packed"], tensors[f"{name}_scale"]
            tensors[name] = np.ones(shape, ml_dtypes.bfloat16)
    save_bfloat16(tensors, tmp_path / "model.safetensors")
    # By regular expressions or by the names of all modules, as recipes write them.
    by_name = [f"model.layers.{n}.{part}.{kind}" for n in range(2) for part in ("self_attn", "mlp") for kind in ignored]
    patterns = [rf"re:(.*\.)?{kind}$" for kind in ignored] if draw.random() < 0.5 else [*by_name, *ignored]
    _ignore(tmp_path, sorted(patterns))
    if plain == ignored:
        opened = open_checkpoint(str(tmp_path))
        assert {name.split(".")[-2] for name in opened.int8} == set(kinds) - plain
        return
    with pytest.raises(ConfigMismatchError) as refused:
        open_checkpoint(str(tmp_path))
    # The message names the first few tensors of all that contradict.
    assert any(kind in str(refused.value) for kind in plain ^ ignored)
    assert "correct quantization_config.ignore" in str(refused.value)


def test_a_family_whose_rows_are_no_channels_is_refused(tokenizer, tmp_path, capsys):
    from levanter.models.gpt2.config import Gpt2Config

    model = Gpt2Config(hidden_dim=32, num_layers=2, num_heads=4, max_seq_len=32, vocab_size=IDS)
    saved = write_checkpoint(tmp_path / "run", tokenizer, config=model)
    assert export(saved, tmp_path / "out") == 2
    assert "rows of transformer.h.{layers}.attn.c_attn.weight are not output channels" in capsys.readouterr().err


def test_it_is_evaluated_and_training_refuses_it(exported, tmp_path, capsys):
    from levanter.commands.train.lm.train_lm import TrainLmConfig
    from levanter.commands.train.lm.train_lm import main as train

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    data = f"{{components: {{t: {{source: {{type: url, validation_urls: ['{text}'], train_urls: ['{text}']}}}}}}}}"
    words = ["--data", data, "--trainer.tracker", "{type: noop}", "--trainer.log_dir", str(tmp_path / "logs")]
    there = ["--hf_checkpoint", str(exported)]
    assert run_entry_point(EvalLmConfig, evaluate, [*there, *words, "--max_eval_length", "32"]) == 0
    capsys.readouterr()
    began = ["--initialize_from_hf", str(exported), "--use_hf_model_config", "true", "--trainer.num_train_steps", "1"]
    assert run_entry_point(TrainLmConfig, train, [*began, *words, "--train_seq_len", "16"]) == 2
    assert "its weights are 8-bit integers, which take no updates" in capsys.readouterr().err
    assert run_entry_point(TrainLmConfig, train, ["--quantize", "int8", *words]) == 2
    assert "quantize: " in capsys.readouterr().err


def dequantized(folder) -> dict[str, np.ndarray]:
    """The weights of a folder as the format's formula has them, in float32."""
    found = tensors_of(folder)
    for name in [name for name in found if name.endswith("_packed")]:
        base = name.removesuffix("_packed")
        word, scale, shape = found.pop(name), found.pop(f"{base}_scale"), found.pop(f"{base}_shape")
        q = np.stack([(word.view(np.uint32) >> (8 * n) & 255).astype(np.int64) - 128 for n in range(4)], -1)
        found[base] = q.reshape(shape).astype(np.float32) * scale
    return {name: x.astype(np.float32) for name, x in found.items()}


def scored_by_torch(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        logprobs = model(torch.from_numpy(TOKENS).long()).logits.double().log_softmax(-1)
    return logprobs[:, :-1].gather(-1, torch.from_numpy(TOKENS[:, 1:]).long()[..., None])[..., 0].numpy()


TOKENS = np.random.default_rng(5).integers(3, 300, (8, 16)).astype(np.int32)


def test_torch_gives_the_numbers_of_the_files_the_same_probabilities(exported):
    """Torch multiplies by what NumPy makes of the files; we by the integers, and by the scales afterwards."""
    import torch
    import transformers

    document = json.loads((exported / "config.json").read_text())
    del document["quantization_config"]
    config = transformers.LlamaConfig(**document, attn_implementation="eager")
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    weights = {name: torch.from_numpy(x) for name, x in dequantized(exported).items()}
    assert not theirs.load_state_dict(weights, strict=True).missing_keys
    described = describe_folder(exported, mesh="2x4", positions=16)
    _, found = score(described, TOKENS, np.zeros_like(TOKENS))
    np.testing.assert_allclose(found[:, :-1], scored_by_torch(theirs), atol=2e-4, rtol=0)


@pytest.mark.skipif(not is_compressed_tensors_available(), reason="the format's own library is not installed")
def test_transformers_makes_the_same_numbers_of_it(exported):
    import torch
    import transformers

    with warnings.catch_warnings():
        # transformers warns that it takes nothing from this but `dequantize`.
        warnings.simplefilter("ignore", UserWarning)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            exported,
            attn_implementation="eager",
            dtype=torch.float32,
            quantization_config=transformers.utils.quantization_config.CompressedTensorsConfig(dequantize=True),
        )
    found, _ = arrays("{axes: {data: 8}}", reference=str(exported))
    path = "transformer.layers.stacked.mlp.down_proj.weight"
    expected = found[f"{path}.q"][1].astype(np.float32) * found[f"{path}.scale"][1][:, None]
    mine = theirs.state_dict()[LAYER].float().numpy()
    np.testing.assert_allclose(mine.reshape(expected.shape), expected, rtol=1e-6)
    _, logprobs = score(describe_folder(exported, mesh="one", positions=16), TOKENS, np.zeros_like(TOKENS))
    np.testing.assert_allclose(logprobs[:, :-1], scored_by_torch(theirs), atol=2e-4, rtol=0)
