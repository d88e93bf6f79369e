"""From the compiler's `op_name` back to the module and the pass that an instruction belongs to.

`jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/rematted_computation/mlp/bse,em->bsm/dot_general`
is module `layers.mlp`, pass `remat`: what JAX wraps around the user's names (transformations, control flow, calls) is
taken off, and so are the last part, which is the primitive, and einsum subscripts. Haliax names its scans
(`scan(layers)`) and its matmuls by their axes (`contract embed -> batch, position, mlp`): the one is a module like
any other, the other is kept as the scope's `contraction`. Where the compiler made one instruction of several it prints
what they share and the rest of each, `layers/(mlp/up/dot:mlp/gate/dot)`: the module is the one that holds them all.
Kernels wrap themselves in scopes of their own, which are taken off too.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "remat", "backward"]

_WRAPPED = re.compile(r"(\w+)\((.*)\)")
_TRANSFORMS = (
    "scan",
    "jvp",
    "transpose",
    "vmap",
    "pmap",
    "checkpoint",
    "remat",
    "rematted_computation",
    "custom_jvp",
    "custom_vjp",
)
# The body of a loop is a `closed_call` to jax 0.10 and an `eval_jaxpr` to jax 0.12.
UNLIKELY = "unlikely_branch"
"""The name of a scope that marks a branch that few executions take; its time is not counted."""
_CONTROL = frozenset(
    ("while", "body", "cond", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation", "remat", "remat2",
     "scan", "core_call", "shard_map", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "pjit", "jit",
     "branch_0_fun", "branch_1_fun", "pallas_call", "body_pred", "cond_pred", UNLIKELY)
)  # fmt: skip


@dataclass(frozen=True, order=True)
class Scope:
    """A module's path in the source program, the pass of training that executes it, and the named matmul.

    Attributes:
        module: names joined by dots.
        during: the forward pass, its recomputation, or the backward pass.
        contraction: `embed -> batch, position, mlp` for a matmul of named arrays and what is fused with it.
    """

    module: str
    during: Pass = "forward"
    contraction: str = ""

    def at_depth(self, depth: int) -> "Scope":
        """The enclosing module of at most `depth` names."""
        return Scope(".".join(self.module.split(".")[:depth]), self.during, self.contraction)


_CONTRACT = "contract "
UNNAMED = "(unnamed)"


_KERNEL_SCOPE = re.compile(r"(static|dynamic)_sparsity_splash|splash_m[hq]a_\w+")


def parse_scope(op_name: str) -> Scope:
    """Module and pass of an instruction; module `(unnamed)` where the compiler recorded none.

    >>> scope = parse_scope("jit(step)/transpose(jvp(layers))/while/body/mlp/dot_general")
    >>> scope.module, scope.during
    ('layers.mlp', 'backward')
    """
    start = op_name.find("/(")
    # The compiler merged several instructions: what their names share, then the rest of each between parentheses.
    if start >= 0 and op_name.endswith(")"):
        shared, several = op_name[:start], _alternatives(op_name[start + 2 : -1])
        return _common([_parse_single(f"{shared}/{rest}") for rest in several])
    return _parse_single(op_name)


def _alternatives(text: str) -> list[str]:
    """`text` cut at its colons that stand in no parentheses."""
    pieces, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ":" and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _common(scopes: list[Scope]) -> Scope:
    """The module that holds all of them; the pass and the matmul, where they agree in it."""
    paths = [[] if scope.module == UNNAMED else scope.module.split(".") for scope in scopes]
    shared = [names[0] for names in itertools.takewhile(lambda n: len(set(n)) == 1, zip(*paths, strict=False))]
    passes = {scope.during for scope in scopes}
    contractions = {scope.contraction for scope in scopes}
    # Where the merged instructions are of several passes, recomputation counts before the backward pass, and both
    # before the forward pass.
    return Scope(
        ".".join(shared) or UNNAMED,
        "remat" if "remat" in passes else "backward" if "backward" in passes else "forward",
        contractions.pop() if len(contractions) == 1 else "",
    )


def _parse_single(op_name: str) -> Scope:
    segments = op_name.split("/")
    if len(segments) < 2:
        return Scope(UNNAMED)
    backward = remat = False
    names: list[str] = []
    contraction = ""
    # The last segment is the primitive (`dot_general`), which is not a module.
    for segment in segments[:-1]:
        inner = segment
        while match := _WRAPPED.fullmatch(inner):
            wrapper, inside = match.groups()
            # Backward passes are transposed forward passes in JAX, hence the name of the wrapper.
            backward |= wrapper == "transpose"
            if wrapper not in _TRANSFORMS:
                # jit(name) and the like: a function, not a module.
                inner = ""
                break
            inner = inside
        remat |= inner == "rematted_computation"
        if inner.startswith(_CONTRACT):
            contraction = inner.removeprefix(_CONTRACT)
        # Segments with an arrow are einsum subscripts.
        elif inner and inner not in _CONTROL and "->" not in inner and not _KERNEL_SCOPE.fullmatch(inner):
            names.append(inner)
    module = ".".join(names) or UNNAMED
    return Scope(module, "remat" if remat else "backward" if backward else "forward", contraction)
