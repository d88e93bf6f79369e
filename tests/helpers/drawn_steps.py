"""Train steps that nobody tuned to: drawn by a seed, and the refused runs of a report on the advice of `plan`.

Half of the drawn ones have experts or vocabularies of 150,000 ids and more, a third are for two slices. The heap of
each, as the TPU compiler assigns it, is in `tests/golden/step_memory.json`.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from helpers.plan_cases import CASES, Case

from levanter.hardware import parse_accelerator
from levanter.plan.compile_cache import CompileCache
from levanter.plan.preflight.state import Question
from levanter.runplan import RunPlan, Target

SEED = 1952
COUNT = 30
LATER_SEED, LATER_COUNT = 77_301, 9
"""Of steps that were drawn and compiled once the bound was done."""
_LLAMA = {"type": "llama", "gradient_checkpointing": True}
_QWEN = {"type": "qwen3", "vocab_size": 151_936, "gradient_checkpointing": True}
_GEMMA = {"type": "gemma2", "vocab_size": 256_000, "gradient_checkpointing": True}


def _dense(base: Mapping[str, Any], hidden: int, mlp: int, layers: int, heads: int, kv: int, **more: Any):
    return {
        **base,
        "hidden_dim": hidden,
        "intermediate_dim": mlp,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv,
        **more,
    }


def _experts(kind: str, experts: int, chosen: int, **shape: Any) -> dict[str, Any]:
    number = "n_routed_experts" if kind == "mixtral" else "num_experts"
    width = {} if kind == "mixtral" else {"moe_intermediate_dim": shape["mlp"]}
    return {
        **_dense({"type": kind, "gradient_checkpointing": True}, **shape),
        number: experts,
        "num_experts_per_tok": chosen,
        **width,
    }


PLAIN: tuple[tuple[float, dict[str, Any]], ...] = (
    (1.2, _dense(_LLAMA, 2048, 8192, 16, 32, 8, vocab_size=128_256, tie_word_embeddings=True)),
    (3.2, _dense(_LLAMA, 3072, 8192, 28, 24, 8, vocab_size=128_256, tie_word_embeddings=True)),
    (6.7, _dense(_LLAMA, 4096, 11_008, 32, 32, 32, vocab_size=32_000)),
    (8.0, _dense(_LLAMA, 4096, 14_336, 32, 32, 8, vocab_size=128_256)),
    (13.0, _dense(_LLAMA, 5120, 13_824, 40, 40, 40, vocab_size=32_000)),
    (34.0, _dense(_LLAMA, 8192, 22_016, 48, 64, 8, vocab_size=32_000)),
    (69.0, _dense(_LLAMA, 8192, 28_672, 80, 64, 8, vocab_size=32_000)),
)
"""Billions of parameters, and the model."""
WIDE: tuple[tuple[float, dict[str, Any]], ...] = (
    (1.7, _dense(_QWEN, 2048, 6144, 28, 16, 8, tie_word_embeddings=True)),
    (8.2, _dense(_QWEN, 4096, 12_288, 36, 32, 8)),
    (14.8, _dense(_QWEN, 5120, 17_408, 40, 40, 8)),
    (2.6, _dense(_GEMMA, 2304, 9216, 26, 8, 4)),
    (9.2, _dense(_GEMMA, 3584, 14_336, 42, 16, 8)),
    (46.7, _experts("mixtral", 8, 2, hidden=4096, mlp=14_336, layers=32, heads=32, kv=8, vocab_size=32_000)),
    (12.0, _experts("mixtral", 8, 2, hidden=2048, mlp=7168, layers=32, heads=16, kv=8, vocab_size=32_000)),
    (30.5, _experts("qwen3_moe", 128, 8, hidden=2048, mlp=768, layers=48, heads=32, kv=4, vocab_size=151_936)),
    (15.0, _experts("qwen3_moe", 64, 4, hidden=2048, mlp=1024, layers=32, heads=16, kv=4, vocab_size=151_936)),
)
"""The same with experts or many ids."""
PODS = ("v4-32", "v4-64", "v5e-16", "v5e-64", "v5p-16", "v5p-64", "v6e-8", "v6e-32", "v6e-64")


@dataclass(frozen=True, kw_only=True)
class DrawnStep:
    """A train step.

    Attributes:
        name: in the file of its figures.
        target: the pod.
        overrides: command-line arguments over the file of `case`.
    """

    name: str
    target: str
    overrides: tuple[str, ...]

    @property
    def case(self) -> Case:
        """It as a case."""
        return replace(CASES["llama2_7b_v4-32"], name=self.name, target=self.target, overrides=self.overrides)


def _yaml(value: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {str(entry).lower()}" for key, entry in value.items()) + "}"


_MIXTRAL_22B = _experts("mixtral", 8, 2, hidden=6144, mlp=16_384, layers=56, heads=48, kv=8, vocab_size=32_000)
_QWEN_30B = {**WIDE[7][1], "head_dim": 128, "intermediate_dim": 6144}
_LLAMA_70B = _dense(_LLAMA, 8192, 28_672, 80, 64, 8, vocab_size=128_256)
_WHOLE_EXPERTS = "--trainer.mesh.shared_mapping={expert: model, mlp: null}"


def _step(name: str, target: str, model: Mapping[str, Any], positions: int, *words: str) -> DrawnStep:
    fields = {"gradient_checkpointing": True, **model, "max_seq_len": positions}
    return DrawnStep(name=name, target=target, overrides=(f"--model={_yaml(fields)}", *words))


REFUSED: Mapping[str, DrawnStep] = {
    step.name: step
    for step in (
        _step(
            "mixtral_8x7b_v5e-64", "v5e-64", WIDE[5][1], 4096,
            "--trainer.train_batch_size=128", "--trainer.mesh.axes={data: -1, model: 8}", _WHOLE_EXPERTS,
        ),
        _step(
            "qwen3_30b_a3b_v6e-32", "v6e-32", _QWEN_30B, 4096,
            "--trainer.train_batch_size=256", "--trainer.mesh.axes={data: -1, model: 4}", _WHOLE_EXPERTS,
        ),
        _step(
            "mixtral_8x22b_v5p-64", "v5p-64", _MIXTRAL_22B, 4096,
            "--trainer.train_batch_size=256", "--trainer.mesh.axes={data: -1, model: 8}", _WHOLE_EXPERTS,
        ),
        _step("gemma2_9b_v5e-16", "v5e-16", {**WIDE[4][1], "head_dim": 256}, 8192, "--trainer.train_batch_size=64"),
        _step(
            "llama3_8b_v5e-16_kept", "v5e-16", {**PLAIN[3][1], "gradient_checkpointing": False}, 4096,
            "--trainer.train_batch_size=64",
        ),
        _step("qwen3_14b_v5e-32", "v5e-32", {**WIDE[2][1], "head_dim": 128}, 4096, "--trainer.train_batch_size=256"),
        _step("llama3_70b_2xv6e-32", "2xv6e-32", _LLAMA_70B, 4096, "--trainer.train_batch_size=64"),
        _step("mixtral_8x7b_h100x64", "h100x64", WIDE[5][1], 4096, "--trainer.train_batch_size=64"),
        _step("llama3_1b_v5e-1", "v5e-1", PLAIN[0][1], 2048, "--trainer.train_batch_size=1"),
        _step("llama3_8b_v5e-16_32_rows", "v5e-16", PLAIN[3][1], 4096, "--trainer.train_batch_size=512"),
        _step("llama3_8b_v5e-64_64_rows", "v5e-64", PLAIN[3][1], 4096, "--trainer.train_batch_size=4096"),
    )
}  # fmt: skip
"""Runs that do not fit. Six of the layouts that were suggested for the first seven were refused, too; for three of them
`plan` found nothing (70B, 1B and the GPUs), though something fits."""
FOLLOWED: Mapping[str, tuple[str, ...]] = {
    "mixtral_8x7b_v5e-64": ("--trainer.mesh.axes={data: 64, model: 1}", "--trainer.per_device_parallelism=1"),
    "qwen3_30b_a3b_v6e-32": ("--trainer.mesh.residual_mapping={embed: model}",),
    "mixtral_8x22b_v5p-64": (
        "--trainer.mesh.residual_mapping={embed: model}", "--trainer.per_device_parallelism=16",
    ),
    "gemma2_9b_v5e-16": ("--trainer.per_device_parallelism=1",),
    "llama3_8b_v5e-16_kept": ("--model.gradient_checkpointing=true",),
    "qwen3_14b_v5e-32": ("--trainer.per_device_parallelism=2",),
    "llama3_70b_2xv6e-32": ("--trainer.mesh.param_mapping={embed: [replica_dcn, data]}",),
}  # fmt: skip
"""By name of a refused run, the first suggestion that it once got; for 70B the mapping that fits."""


def draw(seed: int = SEED, count: int = COUNT) -> tuple[DrawnStep, ...]:
    """The train steps of a seed: half are dense with few ids, a third are for two slices."""
    random_ = random.Random(seed)
    return tuple(_one(random_, number) for number in range(count))


def _one(random_: random.Random, number: int) -> DrawnStep:
    while True:
        billions, model = random_.choice(WIDE if number % 2 else PLAIN)
        slices = 2 if number % 3 == 2 else 1
        pod = random_.choice(PODS)
        accelerator = parse_accelerator(f"{slices}x{pod}" if slices > 1 else pod)
        devices = accelerator.devices
        inside = devices // slices
        tensor = random_.choice((1, 1, 2, 4))
        # FSDP is inside a slice: each has a whole copy of the weights.
        share = 12e9 * billions / inside / accelerator.hbm_bytes
        ways = inside // tensor
        if 0.1 < share < 0.75 and model["hidden_dim"] % ways == 0:
            break
    rows = random_.choice((1, 2, 4, 8))
    positions = random_.choice((1024, 2048, 4096, 8192))
    while rows * positions > 16_384:
        rows //= 2
    policy = random_.choice((True, True, True, "long"))
    experts = "num_experts_per_tok" in model
    residual = tensor > 1 and random_.random() < 0.5
    whole = tensor > 1 and experts and random_.random() < 0.5
    overrides = [
        f"--model={_yaml({**model, 'max_seq_len': positions, 'gradient_checkpointing': policy})}",
        f"--trainer.train_batch_size={rows * slices * ways}",
        f"--trainer.mesh.axes={{data: -1, model: {tensor}}}",
    ]
    if residual:
        overrides.append("--trainer.mesh.residual_mapping={embed: model}")
    if whole:
        overrides.append("--trainer.mesh.shared_mapping={expert: model, mlp: null}")
    words = [model["type"], f"{billions:g}b", accelerator.name, f"{rows}x{positions}", f"tp{tensor}"]
    words += ["residual"] * residual + ["experts"] * whole + ["long"] * (policy == "long")
    return DrawnStep(name=f"{number:02d}_" + "_".join(words), target=accelerator.name, overrides=tuple(overrides))


def steps_by_name() -> Mapping[str, DrawnStep]:
    """The drawn steps, and the layouts that were once suggested for refused ones, by name."""
    followed = (
        replace(step, name=f"followed_{name}", overrides=(*step.overrides, *FOLLOWED[name]))
        for name, step in REFUSED.items()
        if name in FOLLOWED
    )
    later = (replace(step, name=f"later_{step.name}") for step in draw(LATER_SEED, LATER_COUNT))
    return {step.name: step for step in (*draw(), *later, *followed)}


def described(payload: Mapping[str, Any], target: Target) -> RunPlan:
    """What the compile worker calls."""
    case = replace(CASES["llama2_7b_v4-32"], target=target.name, overrides=tuple(payload["overrides"]))
    return case.describe(target)


def question(step: DrawnStep, *, compile: bool = False) -> Question:
    """The question whether a step fits."""

    def with_words(words: tuple[str, ...]) -> Question:
        overrides = (*step.overrides, *words)
        case = replace(step.case, overrides=overrides)
        return Question(
            target=step.target,
            describe=case.describe,
            provider=f"{__file__}:described",
            payload={"overrides": list(overrides)},
            compile=compile,
            kept=CompileCache.here() if compile else None,
            varied=with_words,
        )

    return with_words(())
