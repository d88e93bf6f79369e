"""The `model:` block of a run beside the checkpoint that it begins from: what is set has to be the checkpoint's.

The checkpoints are well-known ones, of which a plan knows config.json without a network.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from pathlib import Path

import pytest

from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.dpo.lora_config import LoraDpoConfig
from levanter.commands.train.lm.lora_config import LoraLmConfig
from levanter.commands.train.resolved import resolve_base
from levanter.compat.hf.errors import ConfigMismatchError
from levanter.compat.hf.known_configs import known_config
from levanter.config import load_written

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parents[4] / "config"
DOCUMENTS = [
    *((path, LoraLmConfig) for path in sorted((CONFIGS / "lora").glob("*_v*.yaml"))),
    *((path, LoraDpoConfig) for path in sorted((CONFIGS / "dpo").glob("lora_*.yaml"))),
]
MIXTRAL = CONFIGS / "lora" / "mixtral_8x7b_v6e-16.yaml"


def base(config_class, *words: str):
    """The (reference, source) of a document's checkpoint."""
    loaded = load_written(config_class, list(words))
    training = getattr(loaded.config, "training", loaded.config)
    return training.pretrained, resolve_base(training, loaded.written)


@pytest.mark.parametrize(("path", "config_class"), DOCUMENTS, ids=[path.stem for path, _ in DOCUMENTS])
def test_documents_of_ours_agree_with_the_checkpoint(path, config_class):
    reference, source = base(config_class, "--config_path", str(path))
    assert known_config(reference) is not None, "a document of a checkpoint that no plan knows"
    assert source.checks[0].message.startswith(f"the known config.json of {reference}")
    assert not [check for check in source.checks if check.name == "model block"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "hidden_dim",
            "2048",
            r"model\.hidden_dim is 2048, the known config\.json of mistralai/.* says 4096",
        ),
        ("n_routed_experts", "16", r"model\.n_routed_experts is 16, .* says 8"),
        ("rope.theta", "10000", r"model\.rope.* 10000"),
    ],
)
def test_a_block_that_contradicts_the_checkpoint_is_refused(key, value, message):
    """It was a note, and the plan was of another model than the document says."""
    words = ("--config_path", str(MIXTRAL), f"--model.{key}", value)
    with pytest.raises(ConfigMismatchError, match=message):
        base(LoraLmConfig, *words)


def test_a_block_of_another_family_is_refused_where_it_says_so():
    name = "mistralai/Mixtral-8x7B-v0.1"
    _, source = base(LoraLmConfig, "--initialize_from_hf", name)
    assert source.architecture.n_routed_experts == 8
    with pytest.raises(ConfigMismatchError, match=r"model\.type is 'llama', the checkpoint's model is 'mixtral'"):
        base(LoraLmConfig, "--initialize_from_hf", name, "--model", "{type: llama, gradient_checkpointing: false}")


def test_the_key_of_upstream_lets_the_block_give_way():
    words = ("--initialize_from_hf", "Qwen/Qwen2.5-0.5B", "--model", "{type: qwen, hidden_dim: 64}")
    _, source = base(TrainLmConfig, *words, "--use_hf_model_config", "true")
    assert source.architecture.hidden_dim == 896
    assert any("the checkpoint's architecture is used instead" in check.message for check in source.checks)
    with pytest.raises(ConfigMismatchError, match=r"hidden_dim is 64"):
        base(TrainLmConfig, *words)
