"""Seconds of kernels on GPUs against hand arithmetic."""

import pytest

from haliax_ext.hlo.kernel_work import KernelWork
from levanter.hardware import GENERATIONS, parse_accelerator
from levanter.plan.gpu_kernel_time import LAUNCH_SECONDS, SHARES, kernel_estimate, kernel_seconds, kernel_shares

pytestmark = pytest.mark.quick
H100 = parse_accelerator("h100x8")


def product(rows: int, columns: int, depth: int, *, batch: int = 1, itemsize: int = 2, nbytes: int = 0) -> KernelWork:
    return KernelWork(
        kind="matmul", flops=2.0 * batch * rows * columns * depth, nbytes=nbytes, rows=rows, columns=columns,
        depth=depth, batch=batch, itemsize=itemsize,
    )  # fmt: skip


def test_a_large_product_runs_at_the_share_of_its_architecture():
    """16,896 rows of 132 tiles of 128, 8,192 columns of 32 tiles of 256: whole waves of 132 cores."""
    seconds = kernel_seconds(product(16896, 8192, 8192), H100) - LAUNCH_SECONDS
    assert seconds == pytest.approx(2 * 16896 * 8192 * 8192 / (989e12 * SHARES[9].matmul))


def test_the_last_wave_of_tiles_counts_whole():
    """One tile more than the cores have takes two waves."""
    whole, more = (kernel_seconds(product(128 * tiles, 256, 512), H100) - LAUNCH_SECONDS for tiles in (132, 133))
    assert more / whole == pytest.approx(2.0, rel=0.01)


def test_float32_is_half_and_eight_bits_are_twice_as_fast():
    one, half, twice = (
        kernel_seconds(product(16896, 8192, 8192, itemsize=size), H100) - LAUNCH_SECONDS for size in (2, 4, 1)
    )
    assert (half / one, twice / one) == (pytest.approx(2.0), pytest.approx(0.5))


def test_a_kernel_takes_at_least_the_time_of_its_bytes_and_of_its_launch():
    copied = KernelWork(kind="memory", nbytes=2 << 30)
    assert kernel_seconds(copied, H100) == pytest.approx((2 << 30) / (3350e9 * SHARES[9].memory) + LAUNCH_SECONDS)
    row = product(1, 4096, 4096, nbytes=2 * 4096 * 4096)
    assert kernel_seconds(row, H100) == pytest.approx(2 * 4096**2 / (3350e9 * SHARES[9].memory) + 2e-6, rel=0.01)
    assert kernel_seconds(KernelWork(kind="memory", nbytes=4), H100) == pytest.approx(LAUNCH_SECONDS, rel=0.01)


def test_every_gpu_has_shares_and_no_tpu_has():
    for generation in GENERATIONS:
        if generation.gpu is None:
            assert kernel_estimate(parse_accelerator("v6e-8")) is None
        else:
            pod = parse_accelerator(f"{generation.name}x1")
            shares = kernel_shares(pod)
            assert 0.3 < shares.matmul < 1 and 0.3 < shares.attention < 1 and 0.5 < shares.memory < 1
            assert kernel_estimate(pod) is not None
