"""What one scheduled instruction of a GPU program computes and moves, from the compiler's text.

XLA's GPU compiler prints no cycles. It prints which kernel an instruction is (a fusion, a matmul by Triton or by
cuBLAS, an attention call of cuDNN) and its shapes, and from these follow its FLOPs and its bytes. Seconds are lhs to
the caller, who knows the card.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from haliax_ext.hlo.memory import executed_fusion, hbm_traffic
from haliax_ext.hlo.parser import Computation, Instruction, Module, Shape

WorkKind = Literal["matmul", "attention", "memory"]
_CUBLAS = ("__cublas$gemm", "__cublas$lt$matmul")
_CUDNN_ATTENTION = "__cudnn$fmha"
_ATTENTION_PRODUCTS = {False: 2, True: 5}
"""Products of [queries × keys × head size] by whether the call is the backward one: scores and values; there scores
again, and the gradients of probabilities, queries, keys and values."""


@dataclass(frozen=True, kw_only=True)
class KernelWork:
    """The work of one execution of an instruction on one device.

    Attributes:
        kind: what bounds it: products of matrices, an attention kernel, or memory alone.
        flops: of its products; elementwise operations are not counted.
        nbytes: read from and written to the memory of the device.
        rows: of the largest product's result, its batch included.
        columns: of the largest product's result.
        depth: elements that the largest product sums over.
        batch: products of the same shape in the largest one.
        itemsize: bytes of an element of its operands.
    """

    kind: WorkKind
    flops: float = 0.0
    nbytes: int
    rows: int = 0
    columns: int = 0
    depth: int = 0
    batch: int = 1
    itemsize: int = 0


def kernel_work(module: Module, computation: Computation, instruction: Instruction) -> KernelWork:
    """The work of a scheduled instruction."""
    nbytes = hbm_traffic(module, computation, instruction)
    if instruction.opcode == "custom-call":
        target = _target(instruction)
        if target.startswith(_CUDNN_ATTENTION):
            return KernelWork(kind="attention", flops=_attention_flops(computation, instruction, target), nbytes=nbytes)
        if target.startswith(_CUBLAS):
            return _product(_library_dot(computation, instruction), nbytes)
    dots = list(_dots(module, computation, instruction))
    if not dots:
        return KernelWork(kind="memory", nbytes=nbytes)
    largest = max(dots, key=lambda dot: dot.flops)
    return _product(largest, nbytes, flops=sum(dot.flops for dot in dots))


def unstated_workspace(module: Module) -> int:
    """Bytes of workspace that cuDNN will ask for on the device and that the text does not have, of the largest call.

    Without a device the compiler cannot ask cuDNN, and writes an empty workspace. The backward pass of attention adds
    the queries' gradient up in float32, beside two sums for each row; the forward pass needs none.
    """
    most = 0
    for computation in module.computations.values():
        for instruction in computation.instructions:
            target = _target(instruction) if instruction.opcode == "custom-call" else ""
            if not (target.startswith(_CUDNN_ATTENTION) and target.endswith("Backward")):
                continue
            # The last result is the workspace; where the compiler knows it, it is among the temporaries.
            if instruction.shapes[-1].nbytes:
                continue
            queries = _operand_shapes(computation, instruction)[0].sizes
            most = max(most, 4 * math.prod(queries) + 2 * 4 * math.prod(queries) // queries[-1])
    return most


@dataclass(frozen=True, kw_only=True)
class _Dot:
    batch: int
    rows: int
    columns: int
    depth: int
    itemsize: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth


def _product(dot: _Dot, nbytes: int, *, flops: float | None = None) -> KernelWork:
    return KernelWork(
        kind="matmul",
        flops=dot.flops if flops is None else flops,
        nbytes=nbytes,
        rows=dot.rows,
        columns=dot.columns,
        depth=dot.depth,
        batch=dot.batch,
        itemsize=dot.itemsize,
    )


def _dots(module: Module, computation: Computation, instruction: Instruction) -> Iterator[_Dot]:
    """The products that an instruction makes, those inside of fusions included."""
    if instruction.opcode in ("dot", "convolution"):
        yield _dot(computation, instruction)
    elif (fusion := executed_fusion(computation, instruction)) is not None:
        inner = module.computations.get(fusion.attribute("calls") or "")
        # Fusions of matmuls nest: the tiles of an operand are a fusion inside of the fusion.
        if inner is not None:
            for fused in inner.instructions:
                yield from _dots(module, inner, fused)


def _dot(computation: Computation, dot: Instruction) -> _Dot:
    lhs = _operand_shapes(computation, dot)[0]
    contracted = _axes(dot.attributes, "lhs_contracting_dims")
    batched = _axes(dot.attributes, "lhs_batch_dims")
    result = math.prod(dot.shapes[0].sizes)
    batch = math.prod(lhs.sizes[axis] for axis in batched)
    depth = math.prod(lhs.sizes[axis] for axis in contracted) if contracted else 1
    rows = max(1, math.prod(lhs.sizes) // max(1, batch * depth))
    itemsize = max(1, max(lhs.nbytes, 1) // max(1, math.prod(lhs.sizes)))
    return _Dot(batch=batch, rows=rows, columns=max(1, result // (batch * rows)), depth=depth, itemsize=itemsize)


def _library_dot(computation: Computation, call: Instruction) -> _Dot:
    """The product of a call of cuBLAS, whose dimension numbers are in its configuration."""
    lhs, rhs = _operand_shapes(computation, call)[:2]
    numbers = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', call.attributes)
    axes = [int(number) for number in re.findall(r"\d+", numbers.group(1))] if numbers else [len(lhs.sizes) - 1]
    batches = re.search(r'"lhs_batch_dimensions":\s*\[([^\]]*)\]', call.attributes)
    batch_axes = [int(number) for number in re.findall(r"\d+", batches.group(1))] if batches else []
    batch = math.prod(lhs.sizes[axis] for axis in batch_axes)
    depth = math.prod(lhs.sizes[axis] for axis in axes)
    return _Dot(
        batch=batch,
        rows=math.prod(lhs.sizes) // (batch * depth),
        columns=math.prod(rhs.sizes) // (batch * depth),
        depth=depth,
        itemsize=lhs.nbytes // math.prod(lhs.sizes),
    )


def _attention_flops(computation: Computation, call: Instruction, target: str) -> float:
    """FLOPs of a call of cuDNN's attention: queries [batch, positions, heads, head size], keys the same."""
    queries, keys = (shape.sizes for shape in _operand_shapes(computation, call)[:2])
    pairs = math.prod(queries[:-1]) * keys[1]
    # The kernel skips what a causal mask hides only if it makes that mask itself.
    mask = re.search(r'"mask_type":\s*"(\w*)"', call.attributes)
    if mask is not None and "CAUSAL" in mask.group(1):
        pairs /= 2
    return 2.0 * _ATTENTION_PRODUCTS[target.endswith("Backward")] * pairs * queries[-1]


def _operand_shapes(computation: Computation, instruction: Instruction) -> list[Shape]:
    operands = (computation.by_name.get(name) for name in instruction.operands)
    return [operand.shapes[0] for operand in operands if operand is not None and operand.shapes]


def _target(instruction: Instruction) -> str:
    return instruction.attribute("custom_call_target") or ""


def _axes(attributes: str, name: str) -> tuple[int, ...]:
    match = re.search(rf"{name}=\{{([\d,]*)\}}", attributes)
    return tuple(int(part) for part in match.group(1).split(",") if part) if match else ()
