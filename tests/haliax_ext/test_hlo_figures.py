"""Figures of real compilers' texts, against what the program must do by hand count.

The program (`tests/aot/described_programs.py`, `small`): 3 layers of `x + tanh(x @ up) @ down`, weights bf16
[3, 1024, 2048] and [3, 2048, 1024] cut over data × model, 64 rows cut over data (and slices); loss, gradients, update.
"""

from pathlib import Path

import pytest

from haliax_ext.hlo import AxisSpan, Scope, Shape, parse_scope, read_figures
from haliax_ext.hlo.op_metadata import UNLIKELY
from haliax_ext.meshspec import MeshSpec

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parents[1] / "golden" / "hlo"
LAYERS, EMBED, MLP, ROWS = 3, 1024, 2048, 64
MESH = MeshSpec.of(data=4, model=2)
SLICES = MeshSpec(axes=(("slices", 2), ("data", 2), ("model", 2)), dcn=("slices",))


@pytest.fixture(scope="module")
def v4():
    return read_figures((GOLDEN / "small_v4.txt").read_text(), MESH)


@pytest.fixture(scope="module")
def two_slices():
    return read_figures((GOLDEN / "small_v6e_two_slices.txt").read_text(), SLICES)


def test_bytes_by_kind_and_mesh_axis(v4):
    weight = EMBED * MLP // 2 * 2  # one layer's, over `model`, bf16
    activation = ROWS // 4 * EMBED * 2
    assert v4.collective_bytes() == {
        # Each of two weights, forward and again backward.
        ("all-gather", "data", "ici"): LAYERS * 2 * 2 * weight,
        # Its gradient.
        ("reduce-scatter", "data", "ici"): LAYERS * 2 * weight,
        # The second matmul's result forward, the first one's input gradient backward.
        ("all-reduce", "model", "ici"): LAYERS * 2 * activation,
        # The loss.
        ("all-reduce", "data", "ici"): 4,
    }
    assert v4.unknown == ()


def test_a_scan_read_at_another_depth(v4):
    deep = read_figures((GOLDEN / "small_v4.txt").read_text(), MESH, trips={LAYERS: 10 * LAYERS})
    shallow, deeper = v4.collective_bytes(), deep.collective_bytes()
    outside = ("all-reduce", "data", "ici")
    assert {key: nbytes // 10 for key, nbytes in deeper.items() if key != outside} == {
        key: nbytes for key, nbytes in shallow.items() if key != outside
    }
    assert deeper[outside] == shallow[outside]
    assert v4.total_cycles < deep.total_cycles <= 10 * v4.total_cycles


def test_what_crosses_slices_is_dcn(two_slices):
    totals = two_slices.collective_bytes()
    gradients = LAYERS * 2 * (EMBED * MLP // 4) * 2  # already scattered over data × model
    loss = 512  # padded to a tile
    assert totals["all-reduce", "slices", "dcn"] == gradients + loss
    assert {over for (_, over, net) in totals if net == "ici"} == {"data", "model"}
    assert all(c.members == 2 for c in two_slices.collectives if c.network == "dcn")


def test_cpu_compiles_the_same_collectives_in_f32_and_states_no_cycles():
    figures = read_figures((GOLDEN / "small_cpu.txt").read_text(), MESH)
    totals = figures.collective_bytes()
    assert totals["all-gather", "data", "ici"] == LAYERS * 4 * EMBED * MLP // 2 * 4
    assert totals["all-reduce", "model", "ici"] == LAYERS * 2 * ROWS // 4 * EMBED * 4
    assert not figures.has_cycles
    assert figures.cycles == {}
    assert figures.unestimated["dot"] == 6 * LAYERS // 3


def test_cycles_are_multiplied_and_named(v4):
    text = (GOLDEN / "small_v4.txt").read_text()
    flat = sum(int(line.split('"')[1]) for line in text.split('"estimated_cycles":')[1:])
    # Both loops run three times; only what is outside of them counts once.
    assert flat < v4.total_cycles < 3 * flat
    assert set(v4.cycles_by_module(1)) <= {"layers", "(unnamed)"}
    assert sum(v4.cycles_by_module(2).values()) == v4.total_cycles
    assert Scope("layers.mlp", "backward") in v4.cycles


def test_a_mesh_of_another_size_is_said_to_be_unknown():
    figures = read_figures((GOLDEN / "small_v4.txt").read_text(), MeshSpec.of(data=4, model=4))
    assert any("has 8 partitions" in sentence for sentence in figures.unknown)
    assert {c.network for c in figures.collectives} == {"unknown"}


OVERLAPPED = (GOLDEN / "overlapped.txt").read_text()


def test_an_overlapped_collective_is_one_and_hides_what_runs_beside_it():
    figures = read_figures(OVERLAPPED, MeshSpec.of(data=4))
    gather, reduce = figures.collectives
    assert (gather.kind, gather.bytes, gather.times, gather.spans) == (
        "all-gather",
        32 * 32 * 2,
        1,
        (AxisSpan("data", 4, 4),),
    )
    assert gather.hidden_cycles == 300 + 20
    assert (reduce.kind, reduce.bytes, reduce.hidden_cycles) == ("all-reduce", 64 * 64 * 4, 0)
    assert figures.total_cycles == 1000 + 300 + 20 + 4000


def test_kernels_are_listed_not_guessed():
    (kernel,) = read_figures(OVERLAPPED, MeshSpec.of(data=4)).kernels
    assert (kernel.name, kernel.times) == ("kernel", 1)
    assert kernel.operands == (Shape("f32", (64, 64)),)
    assert kernel.scope == Scope("attn.kernel")


SPARSE_CORE = """\
HloModule jit_f, is_scheduled=true, num_partitions=1

%adding (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}, execution_thread="sparsecore"

%first (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %n = f32[64]{0} negate(%p), backend_config={"estimated_cycles":"30"}
}

%second (p.1: f32[64]) -> f32[64] {
  %p.1 = f32[64]{0} parameter(0)
  ROOT %e = f32[64]{0} exponential(%p.1), backend_config={"estimated_cycles":"400"}
}

ENTRY %main (x: f32[64], which: s32[]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %which = s32[] parameter(1)
  ROOT %chosen = f32[64]{0} conditional(%which, %x, %x), branch_computations={%first, %second}
}
"""


def test_a_branch_that_is_marked_as_unlikely_takes_no_time():
    """Without the mark both branches count, and the reader says so."""
    either = read_figures(TWO_BRANCHES.format(scope="layers"), MeshSpec.of(data=1))
    assert either.total_cycles == 110 and "it is not known which branch runs" in either.unknown[0]
    marked = read_figures(TWO_BRANCHES.format(scope=f"layers/{UNLIKELY}"), MeshSpec.of(data=1))
    assert marked.total_cycles == 10 and not marked.unknown
    assert {scope.module for scope in either.cycles} == {"layers"}


TWO_BRANCHES = """\
HloModule jit_f, is_scheduled=true, num_partitions=1

%first (p: f32[64]) -> f32[64] {{
  %p = f32[64]{{0}} parameter(0)
  ROOT %fast = f32[64]{{0}} add(%p, %p), metadata={{op_name="jit(f)/layers/add"}}, backend_config={{"estimated_cycles":"10"}}
}}

%second (q: f32[64]) -> f32[64] {{
  %q = f32[64]{{0}} parameter(0)
  ROOT %slow = f32[64]{{0}} add(%q, %q), metadata={{op_name="jit(f)/{scope}/add"}}, backend_config={{"estimated_cycles":"100"}}
}}

ENTRY %main (x: f32[64], which: s32[]) -> f32[64] {{
  %x = f32[64]{{0}} parameter(0)
  %which = s32[] parameter(1)
  ROOT %chosen = f32[64]{{0}} conditional(%which, %x, %x), branch_computations={{%first, %second}}
}}
"""  # noqa: E501


def test_what_stands_behind_a_computation_of_another_core_is_read():
    """v6e has cores of their own for scatters; what they run ends with their name."""
    figures = read_figures(SPARSE_CORE, MeshSpec.of(data=1))
    assert figures.total_cycles == 430


LAID_OUT_ANEW = """\
HloModule jit_f, is_scheduled=true, num_partitions=1

ENTRY %main (x: bf16[160,40,8192], y: bf16[8,8192]) -> (bf16[80,2,40,8192], bf16[2,4,8192]) {
  %x = bf16[160,40,8192]{2,0,1:T(8,128)(2,1)} parameter(0)
  %y = bf16[8,8192]{1,0:T(8,128)(2,1)} parameter(1)
  %large = bf16[80,2,40,8192]{3,1,0,2:T(2,128)(2,1)} reshape(%x)
  %small = bf16[2,4,8192]{2,0,1:T(2,128)(2,1)} reshape(%y)
  %copy = bf16[160,40,8192]{2,1,0:T(8,128)(2,1)} copy(%x), backend_config={"estimated_cycles":"9"}
  ROOT %both = (bf16[80,2,40,8192]{3,1,0,2:T(2,128)(2,1)}, bf16[2,4,8192]{2,0,1:T(2,128)(2,1)}) tuple(%large, %small)
}
"""


def test_a_large_copy_without_an_estimate_is_found_by_its_bytes():
    """What has an estimate is in the cycles, and a small one costs next to nothing."""
    figures = read_figures(LAID_OUT_ANEW, MeshSpec.of(data=1))
    assert figures.copied_bytes == 2 * 160 * 40 * 8192 * 2
    assert figures.unestimated == {"reshape": 2} and figures.total_cycles == 9


def test_unknown_loops_are_said():
    figures = read_figures((GOLDEN / "unknown_loop.txt").read_text(), MeshSpec.of(data=1))
    assert figures.total_cycles == 7
    assert figures.unknown == ("w (jit(f)/until_converged/while): its trip count is not known; it is counted once",)


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        (
            "jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/rematted_computation/mlp/bse,em->bsm/dot_general",
            Scope("layers.mlp", "remat"),
        ),
        ("jit(step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/mlp/mul", Scope("layers.mlp", "backward")),
        ("jit(step)/jvp(layers)/while/body/closed_call/self_attn/shard_map/mul", Scope("layers.self_attn")),
        ("jit(step)/jvp(embeddings)/gather", Scope("embeddings")),
        ("jit(step)/optimizer/add", Scope("optimizer")),
        (
            "jit(score)/scan(layers)/while/body/closed_call/checkpoint/contract embed -> batch, position, mlp"
            "/0 1 2 , 3 2 -> 0 1 3/dot_general",
            Scope("layers", contraction="embed -> batch, position, mlp"),
        ),
        (
            "jit(score)/scan(layers)/while/body/closed_call/checkpoint/scan(key_blocks)/while/body/closed_call/mul",
            Scope("layers.key_blocks"),
        ),
        ("jit(score)/scan(layers)/while/body/jit(dynamic_index_in_dim)/dynamic_slice", Scope("layers")),
        ("convert.6", Scope("(unnamed)")),
        ("", Scope("(unnamed)")),
        ("jit(f)/add", Scope("(unnamed)")),
        ("jit(f)/lm_head/jit(take_along_axis)/gather", Scope("lm_head")),
    ],
)
def test_scopes(op_name, scope):
    assert parse_scope(op_name) == scope
