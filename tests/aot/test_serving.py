"""A plan of serving with the TPU's own compiler: 70B in int8 on eight chips of v5e fits, with the rows that it says."""

import json
from pathlib import Path

import pytest

from levanter.main import plan

pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not __import__("importlib.util").util.find_spec("libtpu"), reason="libtpu is not installed (the `plan` extra)"
    ),
]
CONFIG = Path(__file__).parents[2] / "config/serve/llama3.1_70b_int8.yaml"


def planned(tmp_path, *words: str) -> tuple[int, dict]:
    out = tmp_path / "plan.json"
    asked = ["serve", "--config_path", str(CONFIG), "--target", "v5e-8", "--json", str(out), *words]
    code = plan.main(asked)
    (verdict,) = json.loads(out.read_text())["verdicts"]
    return code, verdict


def test_the_rows_that_are_planned_fit(tmp_path):
    code, verdict = planned(tmp_path, "--chip_hour_price", "1.2")
    assert code == 0 and verdict["state"] == "fits"
    found = verdict["serving"]
    assert found["rows"] >= 44 and found["rows_by_context"]["bfloat16"]["8K"] >= 21
    assert found["bytes"]["made_by_programs_compiled"] and found["bytes"]["free_bytes"] >= 0
    # What was left for Programs where nothing was compiled is enough, and not much more than enough.
    assert found["rows_by_context"]["int8"]["8K"] >= found["rows"]
    for load in found["decode"]:
        assert load["floor"]["seconds"] < load["token_seconds"]["expected"]
        assert load["floor"]["binds"] in ("weights", "cache", "FLOPs", "links")
        assert load["tokens_per_second_per_chip"] > 0
    assert all(price["any"]["low"] > 0 for price in verdict["cost"]["dollars_per_million_tokens"])
    # A prompt of 8,192 tokens takes 0.77 s at peak.
    assert found["time_to_first_token"][-1]["seconds"]["expected"] > 0.77
    # Cycles as the compiler states them, links that nothing hides: less than three times what no program exceeds.
    full = found["decode"][-1]
    assert full["token_seconds"]["expected"] <= 3 * full["floor"]["seconds"]
    # Every Program of the work but the one that makes the empty cache.
    assert len(found["start"]["compile_seconds"]) == found["start"]["programs"] - 1
