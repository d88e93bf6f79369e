"""What the TPU compiler makes of generating text with a mixture of experts: tokens go to experts, no expert to tokens.

Mixtral 8x7B, a few layers of it, on v5e-8, with each expert over all chips and with an expert on each.
"""

from pathlib import Path

import pytest

from levanter.plan.aot import Compiled, compile_programs

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


@pytest.mark.parametrize("mapping", [{"mlp": "model"}, {"mlp": None, "expert": "model"}], ids=str)
def test_a_decode_step_gathers_no_expert(mapping):
    where = f"{Path(__file__).parent / 'generation_programs.py'}:generation"
    payload = {
        "model": MODEL,
        "mesh": {"shared_mapping": {**mapping, "heads": "model", "vocab": "model"}},
        "cache": {"max_seq_len": 4096, "rows": ROWS},
    }
    (step,) = compile_programs(where, payload, target="v5e-8", programs=[f"decode_{ROWS}"])
    assert isinstance(step, Compiled), step
    assert step.figures is not None
    moved = [each for each in step.figures.collectives if each.kind != "all-reduce"]
    assert max((each.bytes for each in moved), default=0) < MATRIX // 8
    # Of the experts a chip reads its own part, and nothing is a copy of it.
    assert step.memory.temp <= 256 << 20
