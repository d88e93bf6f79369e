"""A model with an adapter beside it (`adapter_path`), on a mesh: what it scores is what its merged twin scores."""

import copy

import numpy as np
import pytest
from helpers.adapted_models import write_adapter
from helpers.family_models import describe_folder, layout, make_checkpoint, score, torch_logprobs

from levanter.commands.evaluate.config import EvalLmConfig
from levanter.config import load

LENGTH = 24
TOKENS = np.random.default_rng(9).integers(3, 250, (8, LENGTH)).astype(np.int32)
SEGMENTS = np.zeros((8, LENGTH), np.int32)


@pytest.fixture(scope="module")
def phi3(tmp_path_factory):
    """(folder of the base, folder of an adapter, log-probabilities by torch with merged weights, and without)

    The fifth: merged into what int8 makes of the base.
    """
    torch = pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("phi3")
    model = make_checkpoint("phi3", folder / "base")
    before = torch_logprobs(model, TOKENS, SEGMENTS)
    integers = copy.deepcopy(model)
    for module in integers.modules():
        if isinstance(module, torch.nn.Linear):
            with torch.no_grad():
                # As the formula says it: products with reciprocals, so that the integers are the same.
                scale = module.weight.abs().amax(dim=1, keepdim=True) * np.float32(1 / 127)
                module.weight.copy_((module.weight * (1 / scale)).round() * scale)
    rng, factors = np.random.default_rng(2), {}
    for layer in range(3):
        for end, inner, outer in (("self_attn.qkv_proj", 64, 128), ("mlp.down_proj", 96, 64)):
            name = f"model.layers.{layer}.{end}"
            a, b = (rng.standard_normal(shape).astype(np.float32) * 0.2 for shape in ((4, inner), (outer, 4)))
            factors |= {f"{name}.lora_A": a.astype(np.float32), f"{name}.lora_B": b.astype(np.float32)}
            for each in (model, integers):
                with torch.no_grad():
                    each.get_submodule(name).weight += torch.from_numpy((6 / 4 * (b @ a)).astype(np.float32))
    adapter = write_adapter(folder / "adapter", factors, r=4, lora_alpha=6)
    merged, of_integers = (torch_logprobs(each, TOKENS, SEGMENTS) for each in (model, integers))
    return folder / "base", adapter, merged, before, of_integers


@pytest.mark.parametrize("mesh", ["2x4", pytest.param("one", marks=pytest.mark.slow)])
def test_scores_are_those_of_merged_weights(phi3, mesh):
    base, adapter, merged, before, _ = phi3
    assert np.abs(merged - before).max() > 0.1, "the adapter must matter for this to say anything"
    described = describe_folder(base, mesh=layout("phi3", mesh), positions=LENGTH, adapter=str(adapter))
    (line,) = [check.message for check in described.checks if check.name == "adapter"]
    assert "2 kinds of projections, rank 4" in line
    _, found = score(described, TOKENS, SEGMENTS)
    np.testing.assert_allclose(found, merged, atol=2e-4, rtol=0)
    # A fused matrix' parts are read once each, and its factor A for each of them.
    names = [each.leaf.path for each in described.sharding.leaves]
    assert sum(name.endswith("q_proj.weight.a") for name in names) == 1
    assert sum(name.endswith(".weight.base") for name in names) == 4


def test_what_cannot_be_bound_is_refused(phi3, tmp_path):
    base, *_ = phi3

    def said(where, **how):
        described = describe_folder(base, positions=LENGTH, adapter=str(where), **how)
        return [(check.status, check.message) for check in described.checks if check.name == "adapter"]

    ((status, message),) = said(tmp_path)
    assert status == "unchecked" and "adapter_config.json" in message
    write_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj.lora_A": np.zeros((4, 64), np.float32)}, r=4)
    ((status, message),) = said(tmp_path / "other")
    assert status == "error" and "does not go with the model" in message


def test_of_integers(phi3):
    """The base in int8, the adapter beside it as it is."""
    base, adapter, merged, _, of_integers = phi3
    mesh = layout("phi3", "2x4")
    described = describe_folder(base, mesh=mesh, positions=LENGTH, adapter=str(adapter), quantize="int8")
    (line,) = [check.message for check in described.checks if check.name == "int8"]
    assert line.startswith("8 projections; bytes: "), line
    _, found = score(described, TOKENS, SEGMENTS)
    np.testing.assert_allclose(found, of_integers, atol=2e-4, rtol=0)
    assert np.abs(of_integers - merged).max() > 2e-3, "the integers must matter for this to say anything"
    held = {each.leaf.path: each.leaf.dtype.name for each in described.sharding.leaves}
    assert held["transformer.layers.stacked.self_attn.q_proj.weight.base.q"] == "int8"
    assert held["transformer.layers.stacked.self_attn.q_proj.weight.a"] == "float32"


def test_commands_take_one(phi3):
    base, adapter, *_ = phi3
    config = load(EvalLmConfig, ["--hf_checkpoint", str(base), "--adapter_path", str(adapter)])
    assert config.adapter_path == str(adapter)
