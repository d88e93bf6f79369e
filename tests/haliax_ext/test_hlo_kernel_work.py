"""The work of kernels of a GPU program, read from texts as XLA's GPU compiler prints them, against hand counts."""

import pytest

from haliax_ext.hlo import read_figures
from haliax_ext.hlo.kernel_work import KernelWork, kernel_work, unstated_workspace
from haliax_ext.hlo.parser import parse_module
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick
TEXT = """HloModule jit_step, is_scheduled=true, num_partitions=4

%tiles (p: bf16[64,128]) -> bf16[64,128] {
  ROOT %p = bf16[64,128]{1,0} parameter(0)
}

%gemm (a: bf16[64,128], b: bf16[128,512]) -> bf16[64,512] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,512]{1,0} parameter(1)
  %nested = bf16[64,128]{1,0} fusion(%a), kind=kCustom, calls=%tiles
  ROOT %dot = bf16[64,512]{1,0} dot(%nested, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%batched (c: f32[8,32,16], d: f32[8,16,32]) -> f32[8,32,32] {
  %c = f32[8,32,16]{2,1,0} parameter(0)
  %d = f32[8,16,32]{2,1,0} parameter(1)
  ROOT %scores = f32[8,32,32]{2,1,0} dot(%c, %d), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, \
rhs_contracting_dims={1}
}

%elementwise (e: f32[1024]) -> f32[1024] {
  %e = f32[1024]{0} parameter(0)
  ROOT %twice = f32[1024]{0} add(%e, %e)
}

ENTRY %main (x: bf16[64,128], w: bf16[128,512], q: bf16[2,256,4,64], c: f32[8,32,16], d: f32[8,16,32], e: f32[1024]) \
-> bf16[64,512] {
  %x = bf16[64,128]{1,0} parameter(0)
  %w = bf16[128,512]{1,0} parameter(1)
  %q = bf16[2,256,4,64]{3,2,1,0} parameter(2)
  %c = f32[8,32,16]{2,1,0} parameter(3)
  %d = f32[8,16,32]{2,1,0} parameter(4)
  %e = f32[1024]{0} parameter(5)
  %scores = f32[8,32,32]{2,1,0} fusion(%c, %d), kind=kCustom, calls=%batched, \
metadata={op_name="jit(step)/attention/dot"}
  %start = (bf16[16,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %product = bf16[64,512]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm, metadata={op_name="jit(step)/mlp/dot"}
  %done = bf16[64,128]{1,0} all-gather-done(%start)
  %forward = (bf16[2,4,256,64]{3,1,2,0}, f32[2,4,256]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"mask_type": "CAUSAL"}}
  %backward = (bf16[2,4,256,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"mask_type": "NO_MASK"}}
  %library = (bf16[64,512]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %twice = f32[1024]{0} fusion(%e), kind=kLoop, calls=%elementwise
  ROOT %result = bf16[64,512]{1,0} get-tuple-element(%library), index=0
}
"""
PAIRS = 2 * 4 * 256 * 256


def work(name: str) -> KernelWork:
    module = parse_module(TEXT)
    return kernel_work(module, module.entry, module.entry.by_name[name])


@pytest.mark.parametrize("name", ["product", "library"])
def test_a_product_by_a_kernel_and_by_a_library(name):
    kernel = work(name)
    assert (kernel.kind, kernel.flops) == ("matmul", 2 * 64 * 128 * 512)
    assert (kernel.batch, kernel.rows, kernel.columns, kernel.depth, kernel.itemsize) == (1, 64, 512, 128, 2)
    inputs, result = 2 * (64 * 128 + 128 * 512), 2 * 64 * 512
    assert kernel.nbytes == inputs + result + (4096 if name == "library" else 0)


def test_a_batch_of_products():
    kernel = work("scores")
    assert (kernel.flops, kernel.batch, kernel.rows, kernel.columns) == (2 * 8 * 32 * 32 * 16, 8, 32, 32)
    assert (kernel.depth, kernel.itemsize) == (16, 4)


def test_attention_computes_the_half_that_its_own_mask_leaves():
    assert work("forward").flops == 2 * 2 * PAIRS * 64 / 2
    # Without a mask of its own the kernel computes every pair: five products in the backward pass.
    assert work("backward").flops == 2 * 5 * PAIRS * 64
    assert work("forward").kind == work("backward").kind == "attention"


def test_what_makes_no_products_moves_bytes():
    assert work("twice") == KernelWork(kind="memory", nbytes=2 * 4 * 1024)


def test_the_workspace_that_only_a_device_can_state():
    """The queries' gradient in float32, and two float32 sums of each row."""
    assert unstated_workspace(parse_module(TEXT)) == 4 * 2 * 256 * 4 * 64 + 8 * 2 * 256 * 4
    stated = TEXT.replace("(bf16[2,4,256,64]{3,1,2,0}, u8[0]{0})", "(bf16[2,4,256,64]{3,1,2,0}, u8[77]{0})")
    assert unstated_workspace(parse_module(stated)) == 0


class Estimates:
    """A hundred cycles for what makes products of matrices, and one for the rest."""

    def cycles(self, module, computation, instruction) -> tuple[int, int]:
        kernel = kernel_work(module, computation, instruction)
        return 100 if kernel.kind == "matmul" else min(1, kernel.nbytes), kernel.nbytes

    def workspace(self, module) -> int:
        return unstated_workspace(module)


def test_estimates_of_the_caller_count_like_cycles():
    """Each kernel counts what the caller says, by module, and hides the collective that runs beside it."""
    figures = read_figures(TEXT, MeshSpec.of(data=4), estimate=Estimates())
    assert figures.workspace_bytes == unstated_workspace(parse_module(TEXT))
    assert figures.has_cycles and figures.total_cycles == 3 * 100 + 3 * 1 and not figures.unestimated
    assert figures.cycles_by_module(1)["mlp"] == 100
    (gather,) = figures.collectives
    assert (gather.kind, gather.over, gather.hidden_cycles) == ("all-gather", "data", 100)
    assert not read_figures(TEXT, MeshSpec.of(data=4)).has_cycles


def test_an_asynchronous_fusion_counts_where_it_ends():
    """jax 0.12's XLA starts slices of stacked weights beside other work: one layer of 32 is read and written."""
    module = parse_module(
        """HloModule jit_step, is_scheduled=true

%slice (p: s8[32,128,256], n: s32[]) -> s8[1,128,256] {
  %p = s8[32,128,256]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = s8[1,128,256]{2,1,0} dynamic-slice(%p, %n, %zero, %zero), dynamic_slice_sizes={1,128,256}
}

ENTRY %main (w: s8[32,128,256], layer: s32[]) -> s8[1,128,256] {
  %w = s8[32,128,256]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %start = ((s8[32,128,256]{2,1,0}, s32[]), s8[1,128,256]{2,1,0}, u32[]) fusion-start(%w, %layer), kind=kLoop, \
calls=%slice
  ROOT %done = s8[1,128,256]{2,1,0} fusion-done(%start)
}
"""
    )
    start, done = (kernel_work(module, module.entry, module.entry.by_name[name]) for name in ("start", "done"))
    assert start == KernelWork(kind="memory", nbytes=0)
    # The index is read as well.
    assert done == KernelWork(kind="memory", nbytes=2 * 128 * 256 + 4)
