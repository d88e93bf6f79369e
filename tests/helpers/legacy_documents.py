"""Documents of both generations of upstream's users, and what each generation made of them.

The documents (`golden/legacy/documents`) are ours; they use the keys that upstream's own files use. What the 2025
generation resolves is written down here from its definition; what the June-2026 generation resolves, and which keys and
defaults it has, was asked of its own classes (`golden/legacy/upstream_june_2026.json`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from helpers.golden import GOLDEN

from levanter.config.errors import Problem
from levanter.config.includes import read_documents
from levanter.config.yaml_nodes import to_plain

FOLDER = GOLDEN / "legacy" / "documents"
PHYSICAL = {
    "data": "data",
    "data_dcn": "data",
    "replica": "replica",
    "replica_dcn": "replica",
    "model": "model",
    "group": "model",
}
"""Our mesh axis → the axis of the 2025 generation that it is a part of."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A document, the entry points that read it, and the devices it is resolved on: (devices, slices)."""

    file: str
    entry_points: tuple[str, ...] = ("train_lm",)
    places: tuple[tuple[int, int], ...] = ((8, 1), (16, 2))

    @property
    def path(self) -> Path:
        return FOLDER / self.file

    @property
    def name(self) -> str:
        return self.path.stem


CASES = (
    Case(file="01_gpt2_nano.yaml"),
    Case(file="02_gpt2_nano_mixture.yaml", entry_points=("train_lm", "eval_lm")),
    Case(file="03_gpt2_nano_fp8.yaml"),
    Case(file="04_gpt2_nano_tb.yaml"),
    Case(file="05_gpt2_nano_skip.yaml"),
    Case(file="06_gpt2_nano_harness.yaml"),
    Case(file="07_gpt2_hyena_nano.yaml"),
    Case(file="08_gpt2_small_fast.yaml"),
    Case(file="09_gpt2_small_fast_batch_schedule.yaml"),
    Case(file="10_gpt2_small_fast_ema.yaml"),
    Case(file="11_gpt2_small_fast_mix_chat.yaml"),
    Case(file="12_gpt2_small_fast_muon.yaml"),
    Case(file="13_gpt2_small_sophiah.yaml"),
    Case(file="14_llama2_7b.yaml"),
    Case(file="15_llama3_small_4k_yarn.yaml"),
    Case(file="16_llama_small_fast_remat.yaml"),
    Case(file="17_llama_7b_with_olmo_config.yaml", places=((64, 1), (128, 2))),
    Case(file="18_mixtral_8x7b.yaml", places=((32, 1), (64, 2))),
    Case(file="19_gemma_2b.yaml"),
    Case(file="sampler/20_sample_llama8b.yaml", entry_points=("sample_lm",)),
    Case(file="harness/21_eval_llama3.yaml", entry_points=("eval_harness",)),
    Case(file="22_sft_llama3_mixture.yaml", entry_points=("sft_mixture",)),
    Case(file="books/23_eval_careless_405b.yaml", entry_points=("eval_careless_lm",), places=((128, 1), (256, 2))),
    Case(file="books/24_eval_sliding_total_8b.yaml", entry_points=("eval_sliding_total",)),
    Case(file="books/25_eval_sliding_8b.yaml", entry_points=("eval_sliding_lm",)),
    Case(file="26_new_lora_dpo_tp4.yaml", entry_points=("train_dpo",), places=((8, 1), (32, 4))),
    Case(file="27_new_gpt2_context.yaml"),
    Case(file="28_new_fsdp_over_slices.yaml", places=((8, 1), (16, 2), (128, 32))),
    Case(file="finetuning/29_lora_lm_2025.yaml", entry_points=("lora_lm",)),
    Case(file="finetuning/30_new_lora_lm.yaml", entry_points=("lora_lm",), places=((8, 1),)),
    Case(file="finetuning/31_sft.yaml", entry_points=("sft",)),
    Case(file="finetuning/32_sft_mixture.yaml", entry_points=("sft_mixture",)),
    Case(file="finetuning/33_new_train_dpo.yaml", entry_points=("train_dpo",)),
    Case(file="finetuning/34_new_train_dpo_lora.yaml", entry_points=("train_dpo",), places=((8, 1),)),
    Case(file="finetuning/35_train_dpo_first.yaml", entry_points=("train_dpo",)),
    Case(file="finetuning/36_new_lora_dpo.yaml", entry_points=("lora_dpo",)),
    Case(file="harness/37_new_eval_harness.yaml", entry_points=("eval_harness",), places=((8, 1),)),
    Case(file="harness/38_eval_harness_2025.yaml", entry_points=("eval_harness",)),
    Case(file="gap/39_new_perplexity_gap.yaml", entry_points=("perplexity_gap",), places=((8, 1),)),
    Case(file="gap/40_perplexity_gap_2025.yaml", entry_points=("perplexity_gap",)),
    Case(file="gap/41_new_model_perplexity.yaml", entry_points=("perplexity_gap",), places=((8, 1),)),
)


@cache
def newest() -> Mapping[str, Any]:
    """The keys of marin-levanter 0.2.227, by its own classes: `tests/upstream/config_keys.py`."""
    return json.loads((GOLDEN / "legacy" / "upstream_0_2_227.json").read_text())


def june_2026() -> Mapping[str, Any]:
    """What the June-2026 generation's own classes say."""
    return json.loads((GOLDEN / "legacy" / "upstream_june_2026.json").read_text())


def written(case: Case) -> dict[str, Any]:
    """A document as its author wrote it, includes in place."""
    problems: list[Problem] = []
    document = to_plain(read_documents([str(case.path)], problems))
    assert not problems
    return document


def resolved_2025(trainer: Mapping[str, Any], *, devices: int, slices: int) -> "Resolved":
    """What the 2025 generation made of the old keys of `trainer:`.

    Its axes `replica` and `data` spanned slices and chips at once; tensor-parallel axes went over `axis_resources`,
    FSDP axes over everything else; parameters had all of the compute mapping too.
    """
    model, replica_ici = trainer.get("model_axis_size", 1), trainer.get("replica_ici_axis_size", 1)
    replica_dcn = trainer.get("replica_dcn_axis_size", 1)
    replica = (slices if replica_dcn == -1 else replica_dcn) * replica_ici
    sizes = {"replica": replica, "data": devices // (replica * model), "model": model}
    compute: dict[str, tuple[str, ...]] = {a: (m,) for a, m in trainer.get("axis_resources", {}).items()}
    compute |= dict.fromkeys(trainer.get("tensor_parallel_axes") or (), ("model",))
    compute |= {trainer.get("batch_axis", "batch"): ("replica", "data")}
    fsdp = trainer.get("fsdp_axis", "embed")
    params = compute | {a: (m,) for a, m in trainer.get("parameter_axis_resources", {}).items()}
    params |= dict.fromkeys([fsdp] if isinstance(fsdp, str) else fsdp or (), ("data",))
    return Resolved(sizes=sizes, compute=compute, params=params)


def resolved_2026(mesh: Mapping[str, Any], *, devices: int, slices: int) -> "Resolved":
    """What the June-2026 generation made of a `mesh:` block, as its own class said."""
    (found,) = [
        one for one in june_2026()["meshes"] if (one["mesh"], one["devices"], one["slices"]) == (mesh, devices, slices)
    ]

    def tuples(mapping: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        return {a: (m,) if isinstance(m, str) else tuple(m) for a, m in mapping.items() if m is not None}

    sizes = {**found["axes"], **found["dcn_axes"]}
    return Resolved(sizes=sizes, compute=tuples(found["compute"]), params=tuples(found["params"]))


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Mesh axes with their sizes, and logical axis → mesh axes, as one generation has them."""

    sizes: Mapping[str, int]
    compute: Mapping[str, tuple[str, ...]]
    params: Mapping[str, tuple[str, ...]]
