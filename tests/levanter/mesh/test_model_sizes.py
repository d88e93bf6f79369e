"""Which tensor-parallel sizes a model allows, and why not."""

import pytest

from haliax_ext.divisibility import render_verdicts
from levanter.mesh import model_sizes

pytestmark = pytest.mark.quick


def table(candidates, **sizes):
    return render_verdicts(model_sizes(sizes, candidates))


def test_depth_24_with_12_heads_of_128():
    assert table([1, 2, 4, 8], kv_head=12, q_heads_per_group=1, mlp=4096, vocab=32768) == (
        "model\n    1  OK\n    2  OK\n    4  OK\n    8  NO (heads 12 % 8 = 4)"
    )


def test_405b():
    assert table([8, 16, 128, 256], kv_head=8, q_heads_per_group=16, mlp=53248, vocab=128256) == (
        "model\n"
        "    8  OK\n"
        "   16  OK; K and V are replicated over it\n"
        "  128  NO (kv_head 8 % 128 = 8; q_heads_per_group 16 % 128 = 16); heads divide as model 8 × group 16\n"
        "  256  NO (heads 128 % 256 = 128)"
    )


def test_smollm2():
    assert table([2, 3, 9], kv_head=3, q_heads_per_group=3, mlp=1536, vocab=49152) == (
        "model\n"
        "    2  NO (heads 9 % 2 = 1)\n"
        "    3  OK\n"
        "    9  NO (kv_head 3 % 9 = 3; q_heads_per_group 3 % 9 = 3; mlp 1536 % 9 = 6; vocab 49152 % 9 = 3); "
        "heads divide as model 3 × group 3"
    )


def test_heads_that_divide_in_total_but_not_by_parts():
    """36 heads = 6 × 6; 36 % 4 is 0, and 4 = 2 × 2 divides by parts; 36 % 9 is 0, 9 = 3 × 3; 36 % 8 is not."""
    assert table([4, 8, 9], kv_head=6, q_heads_per_group=6) == (
        "model\n"
        "    4  NO (kv_head 6 % 4 = 2; q_heads_per_group 6 % 4 = 2); heads divide as model 2 × group 2\n"
        "    8  NO (heads 36 % 8 = 4)\n"
        "    9  NO (kv_head 6 % 9 = 6; q_heads_per_group 6 % 9 = 6); heads divide as model 3 × group 3"
    )


def test_without_heads_it_is_plain_division():
    verdicts = model_sizes({"kv_head": 3, "q_heads_per_group": 3, "mlp": 8}, [2], mapped=["mlp"])
    assert [v.ok for v in verdicts] == [True]
