"""Tiny models for the evaluation harness, asked by ours and by lm_eval's own model of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from helpers.hf_folder import CONFIG, tensors, write_folder
from tokenizers import Tokenizer, processors

from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.harness.eval_harness import HarnessResult, describe, execute
from levanter.eval.harness.config import HarnessConfig
from levanter.runplan import RunPlan, Target
from levanter.trainer.config import TrainerConfig

TASKS = Path(__file__).resolve().parents[2] / "config" / "harness" / "tasks"
CPU8 = Target(name="local", platform="cpu", kind="cpu", devices=8)
CONTEXT = 128
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tiny_llama(folder: Path, *, bos: bool = True) -> Path:
    """A Llama whose tokenizer puts BOS before a text, with a chat template."""
    config = {**CONFIG, "max_position_embeddings": CONTEXT, "torch_dtype": "float32"}
    weights = {
        name: each.astype(np.float32) if "norm" in name else 0.15 * each.astype(np.float32)
        for name, each in tensors(config).items()
    }
    write_folder(folder, config=config, weights=weights)
    if bos:
        built = Tokenizer.from_file(str(folder / "tokenizer.json"))
        built.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
        built.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def tiny_gpt2(folder: Path) -> Path:
    """A GPT-2 with learned positions, whose tokenizer puts nothing before a text."""
    import torch
    import transformers

    write_folder(folder)
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=320, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def harness_config(model: str | Path, tasks: str, *, limit: int | None = 12, **block: Any) -> EvalHarnessConfig:
    """A run on the made tasks."""
    trainer = {key: block.pop(key) for key in ("per_device_eval_parallelism",) if key in block}
    return EvalHarnessConfig(
        eval_harness=HarnessConfig(**block),
        tasks=tasks or None,
        limit=limit,
        include_path=str(TASKS),
        hf_checkpoint=str(model),
        trainer=TrainerConfig(mp="f32", **trainer),
    )


def by_ours(config: EvalHarnessConfig, target: Target = CPU8) -> tuple[HarnessResult, RunPlan[Any]]:
    """A run of ours in this process."""
    plan = describe(config, target).check()
    return execute(plan, plan.mesh.build(jax.devices()[: target.devices])), plan


def by_hflm(model: Any, tokenizer: Any, tasks: str, *, limit: int | None = 12, **more: Any) -> Mapping[str, Any]:
    """The same by lm_eval's model of transformers."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from levanter.eval.harness.tasks import silence_lm_eval

    length = more.pop("max_length", CONTEXT)
    judge = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=8, max_length=length)
    forwarded = more.pop("forwarded", None)
    if forwarded is not None:
        called = judge._model_call
        # Tokens of every forward pass, padding included.
        judge._model_call = lambda inps, **each: forwarded.append(inps.numel()) or called(inps, **each)
    with silence_lm_eval(), _within(TASKS):
        found = simple_evaluate(
            model=judge,
            tasks=tasks.split(","),
            limit=limit,
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
            **{"fewshot_as_multiturn": False, **more},
        )
    assert found is not None
    return found


class _within:
    """A folder as that of the process: lm_eval reads relative files there."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> None:
        import os

        self._before = os.getcwd()
        os.chdir(self._folder)

    def __exit__(self, *_: object) -> None:
        import os

        os.chdir(self._before)
