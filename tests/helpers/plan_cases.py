"""The runs whose plans are kept as golden texts: which config, on which pod, with which overrides, and the verdict.

A *case* is one question to preflight. Its plan (places, bytes by group, findings) is compared without compiling in
`make test`; those that compile also are compiled by `tests/aot/test_cases_compiled.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from haliax_ext.errors import gib
from haliax_ext.plan_report import summarize
from levanter.commands.evaluate import eval_lm
from levanter.commands.evaluate.needles import plan as needles_plan
from levanter.commands.evaluate.needles.config import EvalNeedlesConfig
from levanter.commands.harness import plan as harness_plan
from levanter.commands.harness.config import EvalHarnessConfig
from levanter.commands.memorize import eval_careless_lm
from levanter.commands.serve import serve
from levanter.commands.serve.config import ServeConfig
from levanter.commands.train.dpo import config as dpo_config
from levanter.commands.train.dpo import lora_config as lora_dpo_config
from levanter.commands.train.dpo import lora_dpo, train_dpo
from levanter.commands.train.lm import lora_config, lora_lm, train_lm
from levanter.config import ExplicitKeys, load_written
from levanter.eval.harness import task_discovery
from levanter.eval.harness.tasks import UnavailableTaskError
from levanter.plan.compile_cache import CompileCache
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.verdict import Verdict
from levanter.runplan import RunPlan, Target

CONFIGS = Path(__file__).parents[2] / "config"


def _without_documents(config: EvalHarnessConfig, target: Target, *, written: ExplicitKeys) -> RunPlan:
    """A list of tasks where neither lm_eval nor its documents are at hand, whether they are or not."""

    def absent(*_: object) -> None:
        raise UnavailableTaskError("eval_harness.task_spec: the documents cannot be had here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_discovery, "load_tasks", absent)
        return harness_plan.describe(config, target, written=written)


ENTRY_POINTS: Mapping[str, tuple[type, Any]] = {
    "eval_careless_lm": (eval_careless_lm.EvalCarelessLmConfig, eval_careless_lm.describe),
    "eval_harness": (EvalHarnessConfig, _without_documents),
    "eval_lm": (eval_lm.EvalLmConfig, eval_lm.describe),
    "eval_needles": (EvalNeedlesConfig, needles_plan.describe),
    "lora_dpo": (lora_dpo_config.LoraDpoConfig, lora_dpo.describe),
    "lora_lm": (lora_config.LoraLmConfig, lora_lm.describe),
    "serve": (ServeConfig, serve.describe),
    "train_dpo": (dpo_config.TrainDpoConfig, train_dpo.describe),
    "train_lm": (train_lm.TrainLmConfig, train_lm.describe),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run on one target.

    Attributes:
        name: of its golden texts.
        entry_point: which `main` describes it.
        config: the file below `config/`.
        target: the pod.
        overrides: command line arguments over the file.
        exit_code: of the plan, without compiling.
        compiled: exit code with the compiler's word; None where the compiler is not asked (its inputs alone do not
            fit, or it cannot be described).
        ci: whether CI compiles it; all others that compile are for `make test-aot`.
    """

    name: str
    entry_point: str
    config: str
    target: str
    overrides: tuple[str, ...] = ()
    exit_code: int = 0
    compiled: int | None = 0
    ci: bool = False

    @property
    def command(self) -> str:
        """What a user would type."""
        words = [
            "python -m levanter.main.plan",
            self.entry_point,
            f"--config_path config/{self.config}.yaml",
            f"--target {self.target}",
            *self.overrides,
        ]
        return " ".join(words)

    @property
    def figures(self) -> bool:
        """Whether the compiler's figures are kept: for what CI compiles, and what documents show."""
        documented = self.entry_point in ("eval_lm", "lora_dpo", "lora_lm", "train_dpo")
        return self.ci or documented or self.config.startswith("train/long/")

    def describe(self, target: Target) -> RunPlan:
        """The run on a target."""
        config_class, describe = ENTRY_POINTS[self.entry_point]
        loaded = load_written(config_class, ["--config_path", str(CONFIGS / f"{self.config}.yaml"), *self.overrides])
        return describe(loaded.config, target, written=loaded.written)

    def verdict(self, *, compiled: bool) -> Verdict:
        """Preflight's answer."""
        question = Question(
            target=self.target,
            describe=self.describe,
            provider=f"{__file__}:described",
            payload={"case": self.name},
            compile=compiled,
            kept=CompileCache.here() if compiled else None,
        )
        return preflight(question)


def described(payload: Mapping[str, Any], target: Target) -> RunPlan:
    """What the compile worker calls."""
    return CASES[payload["case"]].describe(target)


def _scoring(name: str, target: str, *overrides: str, config: str = "v4-256", **keys: Any) -> Case:
    return Case(
        name=f"405b_{name}",
        entry_point="eval_lm",
        config=f"eval/llama3.1_405b_{config}",
        target=target,
        overrides=overrides,
        **keys,
    )


def _family(config: str, target: str, **keys: Any) -> Case:
    """A well-known model that is not Llama 3.1 405B in 16 bits scores a book."""
    name = f"{config}_{target}"
    return Case(name=name, entry_point="eval_lm", config=f"eval/{config}", target=target, compiled=None, **keys)


def _windows(name: str, target: str, *, config: str, **keys: Any) -> Case:
    return Case(
        name=f"405b_windows_{name}",
        entry_point="eval_careless_lm",
        config=f"memorization/llama3.1_405b_{config}",
        target=target,
        **keys,
    )


def _training(name: str, config: str, target: str, *overrides: str, **keys: Any) -> Case:
    return Case(name=name, entry_point="train_lm", config=f"train/{config}", target=target, overrides=overrides, **keys)


def _adapted(config: str, target: str, **keys: Any) -> Case:
    return Case(name=f"lora_{config}", entry_point="lora_lm", config=f"lora/{config}", target=target, **keys)


def _preferring(entry_point: str, config: str, target: str, **keys: Any) -> Case:
    return Case(name=f"dpo_{config}", entry_point=entry_point, config=f"dpo/{config}", target=target, **keys)


def _published() -> list[Case]:
    """Runs whose speed is published; `tests/aot/test_published.py` compiles them."""
    configs = sorted((CONFIGS / "train/published").glob("*.yaml"))
    return [
        _training(
            f"published_{path.stem}",
            f"published/{path.stem}",
            _pod_in(path.stem),
            exit_code=3 if path.stem in _TOO_DEEP else 0,
            compiled=None,
        )
        for path in configs
    ]


_TOO_DEEP = ("llama3.1_405b_v6e-256", "llama3.1_405b_v6e-256_fsdp")
"""Published runs that do not fit as this project compiles them at full depth: heaps of 36.5 and 42.1 of 31.25 GiB.
Their times are of fewer layers."""


def _pod_in(stem: str) -> str:
    """`v4-256` of `llama2_70b_v4-256_seq2048`."""
    return next(part for part in stem.split("_") if re.fullmatch(r"v\d\w*-\d+", part))


_SEVENTY, _DEPTH_24 = "llama2_70b_v4-256", "llama_0.78b_64k_v6e-8"
_LONG = f"long/{_DEPTH_24}"
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        _scoring("as_published", "v4-256", config="as_published", exit_code=3, compiled=None),
        _scoring("old_style", "v4-256", config="old_style", ci=True),
        _scoring("v4-256", "v4-256", ci=True),
        _scoring("v4-256_f32", "v4-256", "--trainer.mp=f32", ci=True),
        _scoring("v4-128", "v4-128"),
        _scoring("v4-64", "v4-64", ci=True),
        _scoring("v5p-64", "v5p-64"),
        _scoring("v6e-64", "v6e-64", ci=True),
        _scoring("v6e-256", "v6e-256"),
        _windows("as_published", "v4-256", config="as_published", exit_code=3, compiled=None),
        _windows("v4-256", "v4-256", config="v4-256", ci=True),
        *(
            _family(config, target)
            for config in ("gemma3_27b", "mixtral_8x22b", "qwen2.5_72b", "qwen3_235b_a22b")
            for target in ("v4-256", "v5p-128", "v6e-64", "v6e-256")
        ),
        # Half the weights on an eighth of the chips; tests/aot/test_int8_405b.py compiles them.
        _family("llama3.1_405b_int8", "v4-32"),
        _family("llama3.1_405b_int8", "v5e-32"),
        _windows("int8_v4-32", "v4-32", config="int8", compiled=None),
        _windows("int8_v5e-32", "v5e-32", config="int8", compiled=None),
        _scoring("v5e-64", "v5e-64", compiled=None),
        _training("nano_v4-8", "nano", "v4-8"),
        _training("llama_100m_v6e-8", "llama_100m_v6e-8", "v6e-8"),
        _training("llama_1b_v6e-64", "llama_1b_v6e-64", "v6e-64"),
        _training("llama2_7b_v4-32", "llama2_7b_v4-32", "v4-32"),
        _training("llama2_13b_v4-64", "llama2_13b_v4-64", "v4-64"),
        _training("llama2_70b_v4-256", _SEVENTY, "v4-256", ci=True),
        _training("llama2_70b_v4-256_seq2048", "llama2_70b_v4-256_seq2048", "v4-256"),
        # The residual stream whole over `model`, as upstream's default has it, and cut along `position` instead.
        _training(
            "llama2_70b_v4-256_whole", _SEVENTY, "v4-256", "--trainer.mesh.residual_mapping.embed=null",
            compiled=3, ci=True,
        ),
        _training(
            "llama2_70b_v4-256_position", _SEVENTY, "v4-256", "--trainer.mesh.residual_mapping.embed=null",
            "--trainer.mesh.residual_mapping.position=model",
        ),
        _training("llama3_8b_v6e-128", "llama3_8b_v6e-128", "v6e-128"),
        _training("llama3_8b_2xv6e-128", "llama3_8b_2xv6e-128", "2xv6e-128"),
        _training(
            "llama3_8b_v6e-128_embed4", "llama3_8b_v6e-128_embed4", "v6e-128", exit_code=3, compiled=3, ci=True
        ),
        _training("llama_0.78b_64k_tp1", _DEPTH_24, "v6e-8", "--trainer.mesh.axes.model=1"),
        _training("llama_0.78b_64k_tp2", _DEPTH_24, "v6e-8", "--trainer.mesh.axes.model=2"),
        _training("llama_0.78b_64k_tp4", _DEPTH_24, "v6e-8"),
        _training(
            "llama_0.78b_64k_tp8", _DEPTH_24, "v6e-8", "--trainer.mesh.axes.model=8", exit_code=2, compiled=None
        ),
        _training(
            "llama_0.78b_64k_as_published", f"{_DEPTH_24}_as_published", "v6e-8", exit_code=3, compiled=3, ci=True,
        ),
        _training(
            "llama_0.78b_64k_as_published_tp4", f"{_DEPTH_24}_as_published", "v6e-8", "--trainer.mesh.axes.model=4",
        ),
        _training(
            "llama_0.78b_64k_as_published_recomputed", f"{_DEPTH_24}_as_published", "v6e-8",
            "--model.gradient_checkpointing=true",
        ),
        _training(
            "llama_0.78b_64k_as_published_kept", f"{_DEPTH_24}_as_published", "v6e-8",
            "--model.gradient_checkpointing=false", exit_code=3, compiled=3, ci=True,
        ),
        # Positions over all chips, keys gathered or in a ring; over four of them, and heads exchanged.
        _training(
            "llama_0.78b_64k_context8_gather", _LONG, "v6e-8", "--trainer.mesh.attention_mapping=gather", compiled=None
        ),
        _training("llama_0.78b_64k_context8_ring", _LONG, "v6e-8"),
        _training("llama_0.78b_64k_context4", _LONG, "v6e-8", "--trainer.mesh.axes.context=4"),
        # 64K in a ring and 1M are compiled by hand: docs/performance.md.
        *(
            _training(f"llama3.1_8b_{n}_v5p-128", f"long/llama3.1_8b_long_{n}_v5p-128", "v5p-128", compiled=None)
            for n in ("64k", "1m")
        ),
        _training("llama3.1_8b_256k_v5p-128", "long/llama3.1_8b_long_256k_v5p-128", "v5p-128"),
        _training("llama3.1_8b_128k_v6e-64", "long/llama3.1_8b_long_128k_v6e-64", "v6e-64", compiled=None),
        *(
            _training(f"llama3.1_70b_128k_{pod}", f"long/llama3.1_70b_long_128k_{pod}", pod, compiled=None)
            for pod in ("v5p-256", "v6e-256")
        ),
        # Longer sequences on eight chips; twice as long is compiled by hand: docs/performance.md.
        _training(
            "llama_0.78b_256k", _LONG, "v6e-8", "--model.max_seq_len=262144", "--trainer.train_batch_size=2",
        ),
        _training(
            "llama_0.78b_512k", _LONG, "v6e-8", "--model.max_seq_len=524288", "--trainer.train_batch_size=1",
            compiled=None,
        ),
        _adapted("llama3_8b_v5p-8", "v5p-8"),
        _adapted("llama3_8b_v6e-8", "v6e-8"),
        _adapted("llama3_8b_2xv6e-16", "2xv6e-16", compiled=None),
        _adapted("llama3_70b_v5e-16", "v5e-16"),
        _adapted("llama3_70b_v6e-64", "v6e-64"),
        _adapted("mixtral_8x7b_v6e-16", "v6e-16"),
        _preferring("train_dpo", "llama3_8b_v5p-8", "v5p-8"),
        _preferring("lora_dpo", "lora_llama3_8b_v5e-16", "v5e-16"),
        # `tests/aot/test_harness.py` compiles it.
        Case(
            name="harness_llama3.1_8b_v4-64",
            entry_point="eval_harness",
            config="harness/llama3.1_8b",
            target="v4-64",
            compiled=None,
        ),
        # Compiled by hand: docs/long-context.md.
        Case(
            name="needles_llama3.1_8b_v6e-8",
            entry_point="eval_needles",
            config="eval/llama3.1_8b_needles_v6e-8",
            target="v6e-8",
            compiled=None,
        ),
        *_published(),
    )
}  # fmt: skip


def verdict_text(case: Case, verdict: Verdict) -> str:
    """A verdict without the compiler as text: a function of the config and the target alone."""
    lines = [case.command, "", f"exit code {verdict.exit_code}: {verdict.headline}", ""]
    # What the first stage finds on this machine (files, tokenizers) is not a function of the config.
    for stage in verdict.stages[1:]:
        lines.append(f"{stage.name:<9} {stage.status:<9} {stage.message}")
    if verdict.plan is None:
        lines += ["", *(finding for stage in verdict.stages for finding in stage.findings)]
    else:
        lines += ["", *_budget_lines(verdict), "", summarize(verdict.plan.sharding), "", *_loading_lines(verdict)]
        lines += [f"note: {note}" for note in verdict.notes]
    return "\n".join(lines)


def _budget_lines(verdict: Verdict) -> list[str]:
    budget = verdict.budget
    assert budget is not None
    lines = [f"inputs of {name}: {size:,} bytes = {gib(size)}" for name, size in budget.arguments.items()]
    lines += [f"  {group:<14} {gib(size):>12}" for group, size in budget.groups.items()]
    lines.append(f"  {'replicated on every chip':<14} {gib(budget.replicated_bytes):>7}")
    lines.append("largest on a chip")
    lines += [f"  {gib(r.nbytes):>12}  {r.path} {r.dtype} {r.spec}" for r in budget.residents[:5]]
    return lines


def _loading_lines(verdict: Verdict) -> list[str]:
    load = verdict.load
    if load is None:
        return ["loading: nothing is planned"]
    leaf, extra = load.device_transient
    return [
        f"loading: {gib(load.source_bytes)} read {load.amplification:.3f} times by {len(load.bytes_by_host)} hosts, "
        f"at most {gib(max(load.bytes_by_host))} each",
        f"  on a chip at most {gib(load.device_peak)}, {gib(extra)} of it beyond the shards ({leaf})",
        f"  on a host at most {gib(load.host_peak)}",
    ]
