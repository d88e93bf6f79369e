"""Adapters of peft that a seed draws: read as peft reads them, or refused with what to do. Skipped without peft.

Drawn are the family, targets (projections, the embedding table, the head), ranks and values of `alpha` of single layers
and modules, layers without adapters, rsLoRA, full copies, and a vocabulary that was resized. Judge: peft's logits.
"""

import random
from pathlib import Path

import numpy as np
import pytest
from helpers.adapted_models import TOKENS, described_logits
from helpers.family_models import make_checkpoint
from safetensors.numpy import load_file

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

SEED = 20261128
FAMILIES = {
    "llama": (["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "embed_tokens", "lm_head"),
    "qwen3": (["q_proj", "v_proj", "o_proj", "down_proj"], "embed_tokens", "lm_head"),
    "phi3": (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], "embed_tokens", "lm_head"),
    "gpt2": (["c_attn", "c_proj", "c_fc"], "wte", None),
}


@pytest.fixture(name="bases", scope="module")
def bases_fixture(tmp_path_factory):
    """A base of each family that is needed, written once."""
    folders: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            make_checkpoint(name, folders[name])
        return folders[name]

    return base


def drawn_config(draw: random.Random, name: str, layers: int) -> dict[str, object]:
    """The arguments of a `LoraConfig`."""
    projections, table, head = FAMILIES[name]
    targets = draw.sample(projections, draw.randint(1, len(projections)))
    config: dict[str, object] = {"r": draw.choice([1, 2, 4]), "lora_alpha": draw.choice([1, 3, 8])}
    if draw.random() < 0.35:
        targets.append(table)
    if head is not None and draw.random() < 0.2:
        targets.append(head)
    if draw.random() < 0.5:
        where = f"{draw.randrange(layers)}.{'.*' if draw.random() < 0.3 else ''}"
        config["alpha_pattern"] = {f"{where}.*{draw.choice(targets[:1])}": draw.choice([2, 5, 64])}
    if draw.random() < 0.5:
        config["rank_pattern"] = {rf"{draw.randrange(layers)}\..*{draw.choice(targets[:2])}": draw.choice([1, 3, 6])}
    if draw.random() < 0.3:
        config["layers_to_transform"] = sorted(draw.sample(range(layers), draw.randint(1, layers)))
    config["use_rslora"] = draw.random() < 0.3
    if draw.random() < 0.2 and table not in targets:
        config["modules_to_save"] = [draw.choice([x for x in (table, head) if x is not None and x not in targets])]
    return config | {"target_modules": targets}


def their_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()


def write_theirs(draw: random.Random, base: Path, name: str, folder: Path) -> tuple[np.ndarray, dict[str, object]]:
    """Writes an adapter as peft does; its logits, and what was drawn."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    config = drawn_config(draw, name, model.config.num_hidden_layers)
    resized = draw.random() < 0.25
    torch.manual_seed(draw.randrange(1000))
    if resized:
        model.resize_token_embeddings(model.config.vocab_size + draw.choice([-8, 3, 16]))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(0.2 * torch.randn(parameter.shape))
            elif "modules_to_save" in key:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    adapted.save_pretrained(folder)
    drawn = config | {"family": name, "resized": resized, "tied": bool(model.config.tie_word_embeddings)}
    return their_logits(adapted), drawn


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 80))])
def test_drawn_adapters(bases, seed, tmp_path):
    draw = random.Random(SEED + seed)
    name = draw.choice(sorted(FAMILIES))
    expected, drawn = write_theirs(draw, bases(name), name, tmp_path / "adapter")
    actual = described_logits(bases(name), adapter=str(tmp_path / "adapter"))
    if isinstance(actual, str):
        table = FAMILIES[name][1]
        targets = [*drawn["target_modules"], *drawn.get("modules_to_save", ())]
        # What a model of ours cannot hold is a tied table of which only the embedding was changed. And of a resized
        # model peft writes only the tables that have adapters, if one has: the file lacks the other.
        lost = drawn["resized"] and any(x in targets for x in FAMILIES[name][1:])
        assert lost or (drawn["tied"] and table in targets), f"{drawn}: {actual}"
        assert "merge_and_unload" in actual, actual
        return
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    if drawn["resized"] and not any("layers" not in key and key.endswith(".weight") for key in stored):
        # Named for single layers, a table is no target: peft then writes none, and the model is that of the base's ids.
        ids = min(expected.shape[-1], actual.shape[-1])
        expected, actual = expected[..., :ids], actual[..., :ids]
    np.testing.assert_allclose(actual, expected, atol=3e-4 * np.abs(expected).max(), rtol=0, err_msg=str(drawn))
