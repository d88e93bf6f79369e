"""What the TPU compiler makes of generating text with a mixture of experts: tokens go to experts, no expert to tokens.

Mixtral 8x7B, a few layers of it: on v5e-8 with each expert over all chips and with one on each, on v5e-4 with two.
"""

from pathlib import Path

import pytest

from levanter.hardware import parse_accelerator
from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.kernel_cost import GROUPED_NAME

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not __import__("importlib.util").util.find_spec("libtpu"), reason="libtpu is not installed (the `plan` extra)"
    ),
]
LAYERS, ROWS, EXPERTS, EMBED, MLP = 2, 32, 8, 4096, 14336
MODEL = {
    "n_routed_experts": EXPERTS,
    **{"hidden_dim": EMBED, "intermediate_dim": MLP, "num_layers": LAYERS, "num_heads": 32, "num_kv_heads": 8},
    **{"vocab_size": 32000, "max_seq_len": 4096},
}
MATRIX = 2 * EMBED * MLP
"""Bytes of one of an expert's three matrices."""


@pytest.mark.parametrize(
    ("target", "mapping"),
    [
        ("v5e-8", {"mlp": "model"}),
        ("v5e-8", {"mlp": None, "expert": "model"}),
        ("v5e-4", {"mlp": None, "expert": "model"}),
    ],
    ids=["a part of each", "one a chip", "two a chip"],
)
def test_a_decode_step_gathers_and_copies_no_expert(target, mapping):
    where = f"{Path(__file__).parent / 'generation_programs.py'}:generation"
    payload = {
        "model": MODEL,
        "mesh": {"shared_mapping": {**mapping, "heads": "model", "vocab": "model"}},
        "cache": {"max_seq_len": 4096, "rows": ROWS},
    }
    (step,) = compile_programs(where, payload, target=target, programs=[f"decode_{ROWS}"])
    assert isinstance(step, Compiled), step
    chip, figures = parse_accelerator(target), step.figures
    assert figures is not None and chip.generation.clock_hz is not None
    moved = [each for each in figures.collectives if each.kind != "all-reduce"]
    assert max((each.bytes for each in moved), default=0) < MATRIX // 8
    # Of the experts a chip reads its own part, once, and nothing is a copy of it.
    assert step.memory.temp <= MATRIX // 8
    assert figures.hbm_bytes <= 1.2 * step.memory.argument
    assert not [kernel for kernel in figures.kernels if kernel.name.startswith(GROUPED_NAME)]
    taken = figures.total_cycles / chip.generation.clock_hz
    assert taken <= 2 * step.memory.argument / chip.hbm_bandwidth
