"""Options of XLA for each accelerator, in addition to its defaults.

Options are part of a Program, so the run on the devices and the plan without them compile the same. Every Program has
the *default* options, without which published speeds are not reproduced. *Tuned* options are added to Programs that
train, score or generate, unless `trainer.compiler: default` leaves them out: options that publishers set for a
generation, as far as this compiler accepts them and gains by them. Each option has its reason;
`benchmarks/compiler_options.py` compares them (docs/preflight/compiler-options.md). Options of one platform are never
passed to another, whose compiler would refuse them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

CompilerMode = Literal["default", "tuned"]
Work = Literal["train", "score", "generate"]
"""Kinds of Programs that have tuned options: train steps, scoring, generation. Programs that initialize, load and save
arrays have the default options."""

Layout = Literal["fsdp", "fsdp_and_tensor", "other"]
"""Kinds of layouts. `fsdp`: parameters are sharded over mesh axes of the batch, and nothing over other ones.
`fsdp_and_tensor`: in addition features or heads are sharded over others. `other`: neither, or whole experts."""
LAYOUTS: tuple[Layout, ...] = ("fsdp", "fsdp_and_tensor", "other")

WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
NO_OPERAND_MIB = "1000000"
"""A threshold above the size of any operand."""


@dataclass(frozen=True, kw_only=True)
class CompilerOption:
    """An option of XLA, and why it is set.

    Attributes:
        name: in XLA.
        value: as text.
        why: the reason, a line.
    """

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.why})"


_DEFAULT: Mapping[str, tuple[CompilerOption, ...]] = {
    # Windowed einsum cuts a matmul whose operand is gathered into a ring of small ones, to overlap the two. On v4 the
    # compiler chooses it for every FSDP matmul and then estimates 36 % more cycles for the same step of Llama 2 7B on
    # v4-32 than without (and the published runs, which turn it off, are reproduced without). The threshold is the least
    # size of an operand in MiB for which the compiler considers it, set above every operand here.
    "TPU v4": (
        CompilerOption(
            name=WINDOWED,
            value=NO_OPERAND_MIB,
            why="rings of small matmuls (windowed einsum) take 36 % more cycles here than whole gathers",
        ),
    ),
}


def _no_rings(times: str) -> CompilerOption:
    """The option that replaces rings by whole gathers; `times` is the cost of rings in cycles."""
    return CompilerOption(
        name=WINDOWED,
        value=NO_OPERAND_MIB,
        why=f"under FSDP rings of small matmuls (windowed einsum) take {times} the cycles of whole gathers",
    )


VECTOR_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
PUBLISHERS_VECTOR_MEMORY = 98304
"""KiB of vector memory that publishers of fast runs on v6e allow a fusion."""
_VECTOR_MEMORY = CompilerOption(
    name=VECTOR_MEMORY,
    value=str(PUBLISHERS_VECTOR_MEMORY),
    why="fusions with 96 of 128 MiB of vector memory take 0.7 to 0.8 times the cycles, as publishers set it",
)

_TUNED_GENERATING: Mapping[str, tuple[CompilerOption, ...]] = {
    kind: (
        CompilerOption(
            name="xla_tpu_scoped_vmem_limit_kib",
            value="65536",
            why=f"with 64 of 128 MiB of vector memory a decode step in int8 takes {times} times the cycles",
        ),
    )
    # 70B with int8 weights and cache, 32 rows of 8,192 positions: 55.1 → 46.0 million cycles on v5e-8, 31.8 → 30.6 on
    # v6e-8. With 96 MiB v6e took more than with 64, and less than with 16.
    for kind, times in (("TPU v5 lite", 0.84), ("TPU v6 lite", 0.96))
}
"""Options of Programs that generate text, in any layout."""

_TUNED: Mapping[tuple[str, Work, Layout], tuple[CompilerOption, ...]] = {
    ("TPU v6 lite", "train", "fsdp"): (_no_rings("1.7 to 1.9 times"),),
    ("TPU v6 lite", "score", "fsdp"): (_no_rings("1.5 to 1.8 times"), _VECTOR_MEMORY),
    ("TPU v5 lite", "train", "fsdp"): (_no_rings("1.5 to 1.6 times"),),
    ("TPU v5 lite", "score", "fsdp"): (_no_rings("1.2 to 1.5 times"),),
    ("TPU v5", "train", "fsdp"): (_no_rings("1.15 times"),),
    ("TPU v5", "train", "fsdp_and_tensor"): (_no_rings("1.2 times"),),
}
"""Options by kind of device, of work and of layout. Other combinations were not compared, or gained nothing."""

PUBLISHED: Collection[str] = frozenset(
    (
        WINDOWED,
        "xla_enable_async_all_gather",
        "xla_enable_async_all_reduce",
        "xla_enable_async_collective_permute",
        "xla_enable_async_reduce_scatter_fusion",
        "xla_latency_hiding_scheduler_rerun",
        "xla_lhs_prioritize_async_depth_over_stall",
        "xla_max_concurrent_async_collective_permutes",
        "xla_max_concurrent_host_send_recv",
        "xla_sc_disable_megacore_partitioning",
        "xla_sc_enable_instruction_fusion",
        "xla_should_add_loop_invariant_op_in_chain",
        "xla_should_allow_loop_variant_parameter_in_chain",
        "xla_tpu_aggressive_opt_barrier_removal",
        "xla_tpu_assign_all_reduce_scatter_layout",
        "xla_tpu_choose_faster_windowed_einsum_over_mem",
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "xla_tpu_decompose_all_gather_einsum",
        "xla_tpu_decompose_einsum_reduce_scatter",
        "xla_tpu_enable_ag_backward_pipelining",
        "xla_tpu_enable_all_experimental_scheduler_features",
        "xla_tpu_enable_all_gather_offload_tracing",
        "xla_tpu_enable_all_reduce_offload_tracing",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce",
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "xla_tpu_enable_latency_hiding_scheduler",
        "xla_tpu_enable_scheduler_memory_pressure_tracking",
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
        "xla_tpu_enable_windowed_einsum_for_all_gather",
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter",
        "xla_tpu_host_transfer_overlap_limit",
        "xla_tpu_megacore_fusion_allow_ags",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_tpu_prefer_async_allgather_to_allreduce",
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter",
        "xla_tpu_scheduler_percent_shared_memory_limit",
        "xla_tpu_scoped_vmem_limit_kib",
        "xla_tpu_spmd_threshold_for_allgather_cse",
        "xla_tpu_use_bundle_aware_cost_model_for_fusions",
        "xla_tpu_use_minor_sharding_for_major_trivial_input",
    )
)
"""Options that publishers of fast TPU runs set and that this compiler knows."""

_OWNERS: Mapping[str, tuple[str, ...]] = {
    "cpu": ("xla_cpu_",),
    "gpu": ("xla_gpu_",),
    "tpu": ("xla_tpu_", "xla_jf_", "xla_sc_", "xla_msa_", "xla_mosaic_"),
}
"""Platform → prefixes of the names of its options."""


def default_options(platform: str, kind: str) -> tuple[CompilerOption, ...]:
    """The options that every Program on these devices has.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        kind: the vendor's name of one device, as JAX reports it (`TPU v4`).
    """
    return _DEFAULT.get(kind, ()) if platform == "tpu" else ()


def tuned_options(platform: str, kind: str, *, work: Work, layout: Layout) -> tuple[CompilerOption, ...]:
    """The options of Programs of a kind with tuning, including the default options.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        kind: the vendor's name of one device.
        work: the kind of Programs.
        layout: of the run.
    """
    default = default_options(platform, kind)
    added = _TUNED.get((kind, work, layout), ())
    # `_TUNED` is keyed by kinds of TPUs, so on other platforms nothing is added by it.
    added = (*added, *(_TUNED_GENERATING.get(kind, ()) if work == "generate" else ())) if platform == "tpu" else ()
    return (*(option for option in default if option.name not in as_values(added)), *added)


def as_values(options: Iterable[CompilerOption]) -> dict[str, str]:
    """Options in the form that JAX passes to XLA: name → value."""
    return {option.name: option.value for option in options}


def compiler_options(platform: str, kind: str) -> dict[str, str]:
    """The default options of XLA for programs on these devices, name → value.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        kind: the vendor's name of one device.
    """
    return as_values(default_options(platform, kind))


def platform_of_option(name: str) -> str | None:
    """The platform that alone has an option of this name; None where the name does not say.

    Args:
        name: of an option of XLA.
    """
    if name in PUBLISHED:
        return "tpu"
    return next((platform for platform, starts in _OWNERS.items() if name.startswith(starts)), None)
