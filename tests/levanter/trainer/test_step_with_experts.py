"""A train step of a mixture of experts against PyTorch: the loss, what the routers add to it, and the gradient."""

import numpy as np
import pytest
from helpers.llama_on_mesh import VOCAB, named_arrays
from helpers.train_steps import POSITIONS, ROWS, TOKENS, Setup
from safetensors.numpy import load_file

from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from levanter.models import MixtralConfig
from levanter.trainer.loss import LmObjective

WEIGHTS = (0.05, 0.02)
CONFIG = MixtralConfig(
    hidden_dim=64,
    intermediate_dim=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    n_routed_experts=4,
    layer_norm_epsilon=1e-5,
    max_seq_len=POSITIONS,
    sliding_window=None,
    lbl_coef=WEIGHTS[0],
    rzl_coef=WEIGHTS[1],
    vocab_size=VOCAB,
)


def setup(axes, rules, per_device=-1):
    spec = MeshSpec.of(**axes)
    mapping = AxisMapping({"batch": "data", **rules})
    return Setup(
        spec,
        Mappings(params=AxisMapping({**rules, "embed": "data"}), compute=mapping),
        per_device=per_device,
        packed=False,
        config=CONFIG,
        objective=LmObjective(chunk=12, auxiliary_weights=CONFIG.auxiliary_weights),
    )


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """A checkpoint's tensors, and by torch: loss, both losses of the routers, norm of the gradient of their sum."""
    torch = pytest.importorskip("torch")
    from transformers import MixtralConfig as HfMixtralConfig
    from transformers import MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = MixtralForCausalLM(
        HfMixtralConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            attn_implementation="eager",  # pyright: ignore
        )
    ).float()
    rng = np.random.default_rng(3)
    for key, parameter in model.named_parameters():
        noise = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)).astype(np.float32))
        parameter.data = 1 + 0.1 * noise if key.endswith("norm.weight") else 0.15 * noise
    folder = tmp_path_factory.mktemp("mixtral")
    model.save_pretrained(folder)
    tokens = torch.from_numpy(TOKENS[0]).long()
    out = model(tokens, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))
    routers = [logits.reshape(ROWS * POSITIONS, 4) for logits in out.router_logits]
    balance = sum(load_balancing_loss_func((x,), num_experts=4, top_k=2) / 2 for x in routers)
    z = sum(x.logsumexp(-1).square().mean() for x in routers)
    (loss + WEIGHTS[0] * balance + WEIGHTS[1] * z).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    numbers = {
        "loss": loss.item(),
        "load_balancing_loss": WEIGHTS[0] * balance.item(),
        "router_z_loss": WEIGHTS[1] * z.item(),
        "grad_norm": norm.item(),
    }
    return load_file(folder / "model.safetensors"), numbers


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(setup({"data": 2, "model": 4}, {"expert": "model"}), id="an expert each"),
        pytest.param(
            setup({"data": 2, "model": 2}, {"mlp": "model", "vocab": "model"}),
            id="features cut",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_equals_torch(mesh, torchs, devices):
    tensors, expected = torchs
    history, _ = mesh.run(devices, arrays=named_arrays(CONFIG, tensors), steps=1)
    for name, value in expected.items():
        assert history[0][name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.slow
def test_parts_of_a_batch_are_each_in_balance(torchs, devices):
    """Balance is not a sum over tokens: in parts it is the mean of the parts' own."""
    tensors, expected = torchs
    mesh = setup({"data": 2}, {"expert": None}, per_device=4)
    history, _ = mesh.run(devices, arrays=named_arrays(CONFIG, tensors), steps=1)
    assert history[0]["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert history[0]["router_z_loss"] == pytest.approx(expected["router_z_loss"], rel=1e-4)
    assert history[0]["load_balancing_loss"] == pytest.approx(expected["load_balancing_loss"], rel=0.05)
