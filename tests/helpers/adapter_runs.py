"""Runs of `train_lm` with adapters of a tiny Llama: made, described, executed in this process."""

from pathlib import Path

from helpers.family_models import CPU8

from levanter.commands.train.lm.train_lm import TrainLmConfig, describe
from levanter.commands.train.run import execute
from levanter.config import load
from levanter.runplan import Session
from levanter.tracker import NoopTracker


class Logged(NoopTracker):
    """Everything that is logged, by step."""

    def __init__(self):
        self.found: dict[int, dict[str, float]] = {}

    def log(self, metrics, *, step, commit=None):
        self.found.setdefault(step, {}).update(metrics)

    def losses(self):
        """The loss of each step."""
        return {step: each["train/loss"] for step, each in self.found.items() if "train/loss" in each}


def tiny_llama(folder: Path, **changes) -> Path:
    """A Llama of 61 ids as transformers writes it, float32."""
    import torch
    import transformers

    torch.manual_seed(1)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{
                "vocab_size": 61,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 32,
                "initializer_range": 0.2,
                **changes,
            }
        )
    ).save_pretrained(folder)
    return folder


def read(run: Path, *overrides: str) -> TrainLmConfig:
    """The configuration of a run."""
    return load(TrainLmConfig, ["--config_path", str(run), *overrides])


def describe_here(config: TrainLmConfig):
    """Its plan, on eight devices."""
    return describe(config, CPU8)


def train(config: TrainLmConfig, devices, *, run_id="run"):
    """(how it ended, what it logged)"""
    plan = describe_here(config).check()
    tracker = Logged()
    return execute(plan, plan.mesh.build(devices), Session(run_id=run_id, tracker=tracker)), tracker
