"""What the TPU compiler makes of generating text: the cache is written in place, and nothing of it is copied.

Llama 3.1 70B, a few layers of it, on v5e-8: each chip has one head of keys and values, 32 rows of 8,192 positions.
"""

from pathlib import Path

import pytest

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, compile_programs

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not __import__("importlib.util").util.find_spec("libtpu"), reason="libtpu is not installed (the `plan` extra)"
    ),
]
LAYERS, ROWS, CONTEXT, CHIPS = 4, 32, 8192, 8
HEAD, EMBED, MLP, HEADS, KV, VOCAB = 128, 8192, 28672, 64, 8, 128256
CACHE = LAYERS * ROWS * KV * 2 * CONTEXT * HEAD * 2 // CHIPS
LAYER = 2 * (2 * EMBED * HEADS * HEAD + 2 * EMBED * KV * HEAD + 3 * EMBED * MLP) // CHIPS
HEAD_WEIGHTS = 2 * EMBED * VOCAB // CHIPS


def compiled(program: str, *, target: str = "v5e-8", **payload) -> Compiled:
    where = f"{Path(__file__).parent / 'generation_programs.py'}:generation"
    (found,) = compile_programs(where, payload, target=target, programs=[program])
    assert isinstance(found, Compiled), found
    return found


@pytest.mark.ci
def test_a_decode_step_has_no_second_cache_and_reads_the_first_once():
    step = compiled(f"decode_{ROWS}")
    assert step.memory.temp <= 256 << 20
    # The cache and the state of the rows are written over their inputs.
    assert step.memory.alias >= CACHE
    assert step.memory.output - step.memory.alias <= 1 << 20
    assert step.figures is not None
    needed = CACHE + LAYERS * LAYER + HEAD_WEIGHTS
    assert needed <= step.figures.hbm_bytes <= 1.2 * needed
    # What is communicated: sums of the residual stream and of the head, no keys, values or weights.
    assert sum(each.bytes * each.times for each in step.figures.collectives) <= 64 << 20


def milliseconds(step: Compiled, target: str) -> tuple[float, float]:
    """By the compiler's cycles, with all branches of the sampler, of which a step runs few; and what its HBM traffic
    takes at the full rate."""
    chip = parse_accelerator(target)
    assert step.figures is not None and step.figures.has_cycles and chip.generation.clock_hz is not None
    cycles = step.figures.total_cycles / chip.generation.clock_hz
    return 1e3 * cycles, 1e3 * step.figures.hbm_bytes / chip.hbm_bandwidth


@pytest.mark.parametrize(
    ("target", "rows"),
    # As many rows as fit do not fill tiles of 8: the scales of the cache stay where they lie nonetheless.
    [pytest.param("v5e-8", ROWS, marks=pytest.mark.ci), ("v6e-8", ROWS), ("v5e-8", 44)],
)
def test_a_decode_step_in_integers_takes_half_of_all_that(target, rows):
    """All 80 layers: nothing is widened in memory, and the compiler's cycles are less than twice what reading takes."""
    layers = 80
    payload = {"int8": True, "cache": {"dtype": "int8", "rows": rows}, "model": {"num_layers": layers}}
    step = compiled(f"decode_{rows}", target=target, **payload)
    cache = layers * CACHE // LAYERS // 2 * (HEAD + 2) // HEAD * rows // ROWS
    weights = layers * LAYER // 2 + HEAD_WEIGHTS // 2
    assert step.memory.temp <= 256 << 20
    assert step.memory.alias >= cache
    # Beside what is read in each step lies the embedding table, in bf16.
    assert cache + weights + HEAD_WEIGHTS <= step.memory.argument <= 1.02 * (cache + weights + HEAD_WEIGHTS)
    assert step.figures is not None
    needed = cache + weights
    assert needed <= step.figures.hbm_bytes <= 1.1 * needed and not step.figures.copied_bytes
    taken, _ = milliseconds(step, target)
    assert taken <= 2 * 1e3 * needed / parse_accelerator(target).hbm_bandwidth


EIGHT = dict(hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8)
SEVEN = dict(hidden_dim=4096, intermediate_dim=11008, num_layers=32, num_heads=32, num_kv_heads=32, vocab_size=32000)


@pytest.mark.parametrize(
    ("rows", "context", "target", "payload"),
    [
        # A shape that nothing was chosen by.
        pytest.param(44, 8192, "v6e-4", {"model": EIGHT}, id="8B bf16"),
        # A TPU multiplies a vector by a matrix in three times the time: of one row, and of a head's single query.
        pytest.param(1, 8192, "v5e-8", {"int8": True, "model": {"num_layers": 80}}, id="70B int8, one row"),
        pytest.param(8, 2048, "v5e-4", {"model": SEVEN}, id="7B bf16, keys for each query"),
    ],
)
def test_a_decode_step_takes_less_than_twice_what_reading_takes(rows, context, target, payload):
    step = compiled(f"decode_{rows}", target=target, cache={"rows": rows, "max_seq_len": context}, **payload)
    taken, reading = milliseconds(step, target)
    assert step.memory.temp <= 256 << 20
    assert taken <= 2 * reading, (taken, reading)


def test_with_more_tokens_a_call_it_is_the_same():
    step = compiled(f"decode_{ROWS}", steps=4)
    assert step.memory.temp <= 256 << 20
    assert step.memory.alias >= CACHE


def test_pages_cost_a_copy_of_one_layer_of_what_is_read():
    step = compiled(f"decode_{ROWS}", cache={"allocation": "paged"})
    assert step.memory.temp <= (256 << 20) + 2 * CACHE // LAYERS
    assert step.memory.alias >= CACHE


def test_a_part_of_a_prompt_is_written_in_place():
    part = compiled("prefill_1x512")
    assert part.memory.temp <= 512 << 20
    assert part.memory.alias >= CACHE


def test_a_part_of_a_prompt_copies_no_scales_of_an_int8_cache():
    """512 consecutive positions of one row: weights are read, keys of the row, and little else."""
    part = compiled("prefill_1x512", int8=True, cache={"dtype": "int8", "rows": 44})
    assert part.figures is not None and not part.figures.copied_bytes
    assert part.figures.hbm_bytes <= 1.25 * (LAYERS * LAYER + HEAD_WEIGHTS) // 2
