"""What is trained whole beside adapters, and adapters of an output head: losses and gradients against torch, and peft.

The files are peft's where it is installed (extra `judges`); else they are made by hand, with the same names.
"""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.adapted_models import TOKENS, loaded, logits, read_adapter, write_adapter
from helpers.family_models import make_checkpoint
from safetensors.numpy import load_file

from haliax_ext.abstract import leaves, map_arrays
from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.peft import plan_peft, write_peft
from levanter.data import next_tokens
from levanter.models.adapters import target_groups
from levanter.models.precision import Precision
from levanter.trainer.loss import LmBatch, LmObjective
from levanter.trainer.objective import AtStep
from levanter.trainer.step import StepRecipe, sums_and_gradients

torch = pytest.importorskip("torch")
SCALE = 1.5
CASES = {
    # family: (modules with factors, modules that are whole)
    "llama": (["self_attn.q_proj", "mlp.down_proj"], ["model.embed_tokens", "lm_head"]),
    "olmo2": (["self_attn.v_proj"], ["self_attn.q_norm", "post_attention_layernorm", "model.norm"]),
    "qwen3_biases": (["self_attn.o_proj"], ["model.embed_tokens"]),
    "mistral": (["self_attn.k_proj", "lm_head"], []),
    "gpt_neox": (["mlp.dense_4h_to_h"], ["final_layer_norm", "embed_in"]),
}
"""Of an untied model, norms, a tied one's table, a head with factors, norms with biases."""


def chosen(model, ends):
    return [name for name, _ in model.named_modules() if name.endswith(tuple(ends)) and ends]


def by_hand(name, model, folder):
    """An adapter's folder, and torch's parameters by the names that they have there; they are the model's from here."""
    generator = np.random.default_rng(7)
    factors, copies = CASES[name]
    tensors, own = {}, {}

    def some(shape):
        return (0.2 * generator.standard_normal(shape)).astype(np.float32)

    model.requires_grad_(False)
    for module in chosen(model, copies):
        for part, parameter in model.get_submodule(module).named_parameters(recurse=False):
            parameter.data += torch.from_numpy(some(parameter.shape))
            tensors[f"{module}.{part}"] = parameter.numpy().copy()
            own[f"{module}.{part}"] = parameter.requires_grad_(True)
    for module in chosen(model, factors):
        rows, columns = model.get_submodule(module).weight.shape
        pair = [torch.nn.Parameter(torch.from_numpy(some(shape))) for shape in ((4, columns), (rows, 4))]
        for which, each in zip("AB", pair, strict=True):
            own[f"{module}.lora_{which}.weight"] = each
            tensors[f"{module}.lora_{which}.weight"] = each.detach().numpy().copy()
        torch.nn.utils.parametrize.register_parametrization(model.get_submodule(module), "weight", _Sum(*pair))
    tied = bool(copies) and model.config.tie_word_embeddings
    config = {"modules_to_save": copies or None, "target_modules": factors, "ensure_weight_tying": tied}
    named = {key.removesuffix(".weight"): x for key, x in tensors.items() if key.endswith(".weight")}
    write_adapter(folder, named, lora_alpha=6, **config)
    if others := {key: x for key, x in tensors.items() if not key.endswith(".weight")}:
        from safetensors.numpy import save_file

        file = folder / "adapter_model.safetensors"
        save_file({**load_file(file), **{f"base_model.model.{key}": x for key, x in others.items()}}, file)
    return model, own


class _Sum(torch.nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, weight):
        return weight + SCALE * (self.b @ self.a)


def by_peft(name, model, folder):
    """Likewise, made by the package."""
    peft = pytest.importorskip("peft")
    factors, copies = CASES[name]
    tied = bool(copies) and model.config.tie_word_embeddings
    how = {"modules_to_save": list(copies) or None, "ensure_weight_tying": tied}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=list(factors), task_type="CAUSAL_LM", **how)
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    own = {}
    for key, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            plain = key.replace(".default", "").replace("modules_to_save.", "").removeprefix("base_model.model.")
            own[plain] = parameter
    return adapted, own


JUDGES = {"torch": by_hand, "peft": by_peft}


def loss_of(model) -> torch.Tensor:
    ids = torch.from_numpy(TOKENS.astype(np.int64))
    found = model(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(found.reshape(-1, found.shape[-1]), ids[:, 1:].reshape(-1))


def gradients(adapters, model):
    """(loss, gradient of every parameter that is trained, in the structure of the adapters)"""
    objective = LmObjective(chunk=7, weights=False, segments=False)
    recipe = StepRecipe(
        objective=objective,
        optimizer=None,
        schedule=lambda _: 0.0,
        precision=Precision.parse("f32"),  # pyright: ignore
    )
    batch = LmBatch(
        tokens=hax.named(jnp.asarray(TOKENS), ("batch", "position")),
        targets=hax.named(jnp.asarray(next_tokens(TOKENS)), ("batch", "position")),
    )
    scale = jnp.float32(1 / (TOKENS.shape[0] * (TOKENS.shape[1] - 1)))
    at = AtStep(step=jnp.int32(0))
    step = eqx.filter_jit(lambda a, m, b: sums_and_gradients(recipe, a, m, b, at, scale))
    sums, grads = step(adapters, model, batch)
    return float(sums["loss"]), grads


def arrays_of(tree):
    found = {}
    map_arrays(lambda leaf, x: found.__setitem__(leaf.path, np.asarray(x)) or x, tree)
    return found


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    ("name", "judge"),
    # What torch says about three families, peft says about the other two.
    [(name, judge) for name in CASES for judge in JUDGES if judge == "peft" or name not in ("olmo2", "gpt_neox")],
)
def test_losses_and_gradients(name, judge, tmp_path):
    theirs, own = JUDGES[judge](name, make_checkpoint(name, tmp_path / "base"), tmp_path / "theirs")
    _, rules, model = loaded(tmp_path / "base")
    targets, adapters = read_adapter(tmp_path / "theirs", model, rules)
    theirs.eval()
    expected = loss_of(theirs)
    expected.backward()
    found, grads = gradients(adapters, model)
    assert found == pytest.approx(expected.item(), rel=1e-6)
    # A gradient is written as an adapter is, so it has the names of one.
    every = target_groups(model, rules)
    plan = plan_peft(targets, every, rules, leaves(adapters), use_rslora=False, base=None)
    write_peft(plan, arrays_of(grads), tmp_path / "gradient")
    mine = {
        key.removeprefix("base_model.model."): x
        for key, x in load_file(tmp_path / "gradient/adapter_model.safetensors").items()
    }
    if judge == "peft" and "lm_head" in CASES[name][0]:
        # Unasked, peft writes the matrix of such a head too.
        assert mine.pop("lm_head.base_layer.weight").any()
    if theirs.config.tie_word_embeddings and CASES[name][1]:
        # The one table under both of its names, which is what peft looks for.
        np.testing.assert_array_equal(mine.pop("lm_head.weight"), mine["model.embed_tokens.weight"])
    assert mine.keys() == own.keys()
    for key, parameter in own.items():
        wanted = parameter.grad.numpy()
        assert np.abs(wanted).max() > 0, key
        np.testing.assert_allclose(mine[key], wanted, atol=1e-4 * np.linalg.norm(wanted), rtol=0, err_msg=key)
    _is_read_back(name, judge, theirs, tmp_path, (plan, adapters, model, rules))


def _is_read_back(name, judge, theirs, tmp_path, ours) -> None:
    """Ours → file → ours, bit for bit; and → peft, with no key missing or left over, and the same logits."""
    plan, adapters, model, rules = ours
    arrays = arrays_of(adapters)
    write_peft(plan, arrays, tmp_path / "ours")
    _, again = read_adapter(tmp_path / "ours", model, rules)
    for path, x in arrays_of(again).items():
        np.testing.assert_array_equal(x, arrays[path], err_msg=path)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(logits(again.bound_to(model)), expected, atol=2e-4 * np.abs(expected).max(), rtol=0)
    if judge == "torch":
        return
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
    )
    read = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    said = set(peft.get_peft_model_state_dict(read))
    assert said == set(load_file(tmp_path / "ours" / "adapter_model.safetensors"))
    with torch.no_grad():
        found = read(torch.from_numpy(TOKENS.astype(np.int64))).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max(), rtol=0)


def test_a_copied_table_whose_head_is_the_old_one_is_refused(tmp_path):
    """Of a tied model, peft leaves the head as it was unless it is told not to; that is no tied model any more."""
    by_hand("qwen3_biases", make_checkpoint("qwen3_biases", tmp_path / "base"), tmp_path / "theirs")
    import json

    file = tmp_path / "theirs" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ensure_weight_tying": False}))
    _, rules, model = loaded(tmp_path / "base")
    with pytest.raises(CheckpointError, match="the head kept the one of the base: with ensure_weight_tying: true"):
        read_adapter(tmp_path / "theirs", model, rules)
