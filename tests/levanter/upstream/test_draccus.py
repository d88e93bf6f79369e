"""draccus itself builds our configurations, alone and inside a user's own dataclass, as upstream's scripts have it."""

import dataclasses
import importlib
import pkgutil
import subprocess
import sys

import draccus
import pytest

from levanter.config.plan_options import PlanOptions
from levanter.models import LlamaConfig, LmConfig
from levanter.optim import AdamConfig, OptimizerConfig
from levanter.trainer import TrainerConfig

ROOMS = (
    "config",
    "data",
    "optim",
    "trainer",
    "tracker",
    "mesh",
    "models",
    "commands",
    "layers",
    "infra",
    "distributed",
)
ENDINGS = ("Config", "Options", "Format", "DatasetSource", "Component")
NEEDED = {
    "HfDatasetSource": ["--id", "org/set"],
    "LoraLmConfig": ["--initialize_from_hf", "a"],
    "LoraDpoConfig": ["--initialize_from_hf", "a"],
    "ConvertLmConfig": ["--checkpoint_path", "a", "--output_dir", "b"],
    "BookConfig": ["--txt_path", "a"],
    "EvalLmConfig": ["--hf_checkpoint", "a"],
    "EvalHarnessConfig": ["--hf_checkpoint", "a", "--tasks", "b"],
    "HarnessTaskConfig": ["--task", "a"],
    "VizLmConfig": ["--hf_checkpoint", "a"],
    "EvalNeedlesConfig": ["--hf_checkpoint", "a"],
    "GapModelConfig": ["--hf_checkpoint", "a"],
    "PerplexityGapConfig": [
        *("--model.hf_checkpoint", "a", "--datasets"),
        "{a: {source: {type: url, validation_urls: [x]}}}",
    ],
    "GenerateConfig": ["--hf_checkpoint", "a"],
    "SampleLmConfig": ["--hf_checkpoint", "a"],
    "ServeConfig": ["--hf_checkpoint", "a"],
    "InferenceReplConfig": ["--checkpoint", "a"],
    "EvalCarelessLmConfig": ["--hf_checkpoint", "a", "--txt_path", "b"],
    "EvalSlidingLmConfig": [
        *("--hf_checkpoint", "a", "--data.components"),
        "{a: {source: {type: url, validation_urls: [x]}, format: {type: prebuilt}}}",
    ],
    "DynamicRotaryConfig": ["--original_max_position_embeddings", "64"],
    "LongRotaryConfig": [
        "--original_max_position_embeddings",
        "64",
        "--short_factor",
        "[1.0]",
        "--long_factor",
        "[2.0]",
    ],
    "PromptsLmDatasetFormat": ["--prompt", "question"],
}
"""What has no default."""
NOT_PARSED = {
    "AbsentModelConfig": "stands for a family that is not here; made by our reader only",
    "RoutedConfig": "a base of others",
    "LmConfig": "a choice, which draccus takes inside another class",
    "ModelAveragingConfig": "a choice, which draccus takes inside another class",
}


def public_configs() -> list[type]:
    found: dict[type, None] = {}
    for room in ROOMS:
        package = importlib.import_module(f"levanter.{room}")
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, cls in vars(module).items():
                here = isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == info.name
                if here and name.endswith(ENDINGS) and not name.startswith("_"):
                    found[cls] = None
    return list(found)


def test_every_public_configuration_is_parsed():
    classes = public_configs()
    assert len(classes) > 70 and {TrainerConfig, LlamaConfig, PlanOptions} <= set(classes)
    failed = {}
    for cls in classes:
        if cls.__name__ in NOT_PARSED:
            continue
        try:
            made = draccus.parse(cls, args=NEEDED.get(cls.__name__, []))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - all of them are listed
            failed[f"{cls.__module__}.{cls.__name__}"] = f"{type(error).__name__}: {error}"[:200]
        else:
            assert isinstance(made, cls)
    assert not failed


@dataclasses.dataclass
class MyConfig:
    """A user's own, with ours inside.

    Attributes:
        trainer: where it runs.
        rate: how fast, in %.
    """

    trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
    model: LmConfig = dataclasses.field(default_factory=LlamaConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=AdamConfig)
    rate: float = 1.0


def test_a_user_s_dataclass_around_ours(capsys):
    words = [
        "--trainer.num_train_steps",
        "7",
        "--model.type",
        "gpt2",
        "--optimizer.learning_rate",
        "0.5",
        "--rate",
        "2",
    ]
    made = draccus.parse(MyConfig, args=words)
    assert (made.trainer.num_train_steps, made.optimizer.learning_rate, made.rate) == (7, 0.5, 2.0)
    assert type(made.model).__name__ == "Gpt2Config"
    with pytest.raises(SystemExit) as end:
        draccus.parse(MyConfig, args=["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "how fast, in %." in said and "where it runs." in said


@pytest.mark.parametrize("first", ["draccus, levanter", "levanter, draccus"])
def test_whichever_is_imported_first(first):
    script = (
        f"import {first}, draccus.wrappers.docstring as d\n"
        "assert d.get_attribute_docstring.of_attributes_sections\n"
        "from levanter.data.config import CacheOptions\n"
        "assert draccus.parse(CacheOptions, args=['--batch_size', '3']).batch_size == 3\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_document_of_2024_is_read_by_draccus_parse(tmp_path):
    """Keys of any generation, and the command line behind them; configurations of others stay draccus's business."""
    from levanter.commands.train.lm.train_lm import TrainLmConfig

    path = tmp_path / "old.yaml"
    path.write_text(
        "data: {id: some/data}\nmodel: {type: gpt2, hidden_dim: 32, num_heads: 4, num_layers: 2, seq_len: 64}\n"
        "trainer: {train_batch_size: 32, fsdp_axis: embed, wandb: {project: p}}\n"
    )
    config = draccus.parse(TrainLmConfig, str(path), args=["--trainer.seed", "3"])
    assert (config.model.max_seq_len, config.trainer.seed, config.data.id) == (64, 3, "some/data")
    assert config.trainer.fsdp_axis == "embed" and config.trainer.wandb.project == "p"
