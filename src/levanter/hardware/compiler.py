"""What XLA is told for an accelerator, beyond its defaults.

The options belong to the Program, so the run on the devices and the plan without them are compiled alike. Each has the
measurement that put it here; a platform without one gets none, and no option of one platform ever reaches another,
whose compiler would refuse it.

Tried for v6e and left out, with Llama 3.1 405B scoring on v6e-64 (data 8 × model 8), libtpu 0.0.42.1:

    as it is                                   2.74 s of cycles + 1.71 s exposed, compiled in 29 s
    no windowed einsum                         2.06 s           + 2.32 s: the gathers that it hid; no faster
    xla_tpu_scoped_vmem_limit_kib=98304        2.23 s           + 1.71 s, compiled in 466 s (on a busy machine)

The last is what tuned runs are published with. It is 18 % fewer cycles for a compiler that takes several times longer.
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
