"""What XLA is told for an accelerator, beyond its defaults.

The options belong to the Program, so the run on the devices and the plan without them are compiled alike. Each has the
measurement that put it here; a platform without one gets none, and no option of one platform ever reaches another,
whose compiler would refuse it.
"""

from collections.abc import Mapping

_TPU: Mapping[str, Mapping[str, str]] = {
    # Windowed einsum cuts a matmul whose operand is gathered into a ring of small ones, to overlap the two. On v4 the
    # compiler chooses it for every FSDP matmul and then estimates 36 % more cycles for the same step of Llama 2 7B on
    # v4-32 than without (and the published runs, which turn it off, are reproduced without). The threshold is the size
    # of an operand, in MiB, from which it is considered: one that no operand has.
    "TPU v4": {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"},
}


def compiler_options(platform: str, kind: str) -> dict[str, str]:
    """The options of XLA for programs on these devices.

    Args:
        platform: `cpu`, `gpu` or `tpu`.
        kind: the vendor's name of one device, as JAX reports it (`TPU v4`).
    """
    return dict(_TPU.get(kind, {})) if platform == "tpu" else {}
