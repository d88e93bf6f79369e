"""`max_rows: auto`: as many rows as memory has room for, by arithmetic, for pods that are named and for CPUs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from levanter.commands.generate import generate
from levanter.commands.generate.config import GenerateConfig
from levanter.config import ConfigError, load_written
from levanter.plan.preflight.pipeline import preflight
from levanter.plan.preflight.state import Question
from levanter.plan.target_from_name import pod_target
from levanter.runplan import RunPlan, Target

GIB = 1 << 30
MODEL = {
    "type": "llama",
    "hidden_dim": 8192,
    "intermediate_dim": 28672,
    "num_layers": 80,
    "num_heads": 64,
    "num_kv_heads": 8,
    "vocab_size": 128256,
    "max_seq_len": 8192,
}
WEIGHTS = 2 * (80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 128256 * 8192)
"""Of 70B in bfloat16, but for norms."""
ROW = 80 * 8 * 128 * 2 * 2 * 8192
CPU = Target(name="local", platform="cpu", kind="cpu", devices=8, host_bytes=512 * GIB)


def plan(tmp_path, target: Target, *, mesh: dict[str, Any] | None = None, **inference) -> RunPlan:
    path = tmp_path / "plan.yaml"
    own = {"axes": {"data": 1, "model": -1}, "shared_mapping": {"vocab": "model"}, **(mesh or {})}
    document = {
        "model": MODEL,
        "tokenizer": "passthrough",
        "inference": {"max_rows": "auto", "penalties": False, **inference},
        "trainer": {"mp": "bfloat16", "mesh": own},
    }
    path.write_text(json.dumps(document))
    loaded = load_written(GenerateConfig, ["--config_path", str(path)])
    return generate.describe(loaded.config, target, written=loaded.written)


def rows_of(found: RunPlan) -> int:
    (said,) = [check.message for check in found.checks if check.name == "rows" and "auto is" in check.message]
    rows = found.work.serving.rows
    assert said.startswith(f"inference.max_rows: auto is {rows}: ")
    assert f"decode_{rows}" in [program.name for program in found.computing]
    return rows


def test_as_many_as_a_chip_has_room_for(tmp_path):
    """31.25 GiB less 16.43 of weights hold 47.4 rows of 320 MiB; a quarter of a GiB and more is left for Programs."""
    assert pytest.approx(47.4, abs=0.1) == (31.25 * GIB - WEIGHTS / 8) / (ROW / 8)
    assert rows_of(plan(tmp_path, pod_target("v6e-8"))) == 46
    assert rows_of(plan(tmp_path, pod_target("v6e-8"), max_seq_len=4096)) == 92
    assert rows_of(plan(tmp_path, pod_target("v6e-8"), allocation="paged", page_size=1000)) == 42  # nine pages a row


def test_gpus_have_room_for_a_copy_of_a_layer(tmp_path):
    """Compiled for H100s, a decode step copies the keys and values of one layer of all rows: an 80th of the cache."""
    target = pod_target("h100x8")
    rows = rows_of(plan(tmp_path, target))
    assert target.hbm_bytes is not None
    free = target.hbm_bytes - WEIGHTS / 8 - rows * ROW / 8 * 81 / 80
    assert 0.75 * GIB < free < 0.75 * GIB + ROW / 8 + 0.1 * GIB


def test_pages_that_do_not_fill_tiles_are_noted(tmp_path):
    def notes(target: Target, **inference) -> list[str]:
        checks = plan(tmp_path, target, max_rows=8, **inference).checks
        return [check.message for check in checks if check.name == "cache" and check.status == "note"]

    (said,) = notes(pod_target("v6e-8"), max_seq_len=1500)
    assert said.startswith("inference.max_seq_len: 1,500 positions") and said.endswith("1,536 is the next multiple")
    (paged,) = notes(pod_target("v6e-8"), max_seq_len=1024, allocation="paged", page_size=100)
    assert paged.startswith("inference.page_size: 100 positions")
    assert notes(pod_target("v6e-8"), max_seq_len=1536) == notes(CPU, max_seq_len=1500) == []


def test_every_shard_of_the_rows_has_as_many(tmp_path):
    sharded = {"axes": {"data": 2, "model": -1}}
    rows = rows_of(plan(tmp_path, pod_target("v6e-16"), mesh=sharded))
    assert rows == 2 * 46


def test_pages_that_are_counted_by_themselves_give_the_rows(tmp_path):
    """40 pages of 128 positions hold five rows of 1,024."""
    paged = {"allocation": "paged", "page_size": 128, "max_seq_len": 1024}
    assert rows_of(plan(tmp_path, pod_target("v6e-8"), pages=40, **paged)) == 5


def test_devices_of_a_cpu_take_half_of_their_machine(tmp_path):
    """200 GiB for eight devices: 25 GiB each less 16.43 of weights, where a chip of 25 GiB would have twice that."""
    with_norms = (25 * GIB - WEIGHTS / 8) / (ROW / 8)
    assert with_norms == pytest.approx(27.4, abs=0.1)
    half = replace(CPU, host_bytes=400 * GIB)
    assert rows_of(plan(tmp_path, half, cache_dtype="bfloat16")) == 26
    # A cache that nothing is said of is in float32 there.
    assert rows_of(plan(tmp_path, half)) == 13


def test_more_rows_than_help_are_not_taken(tmp_path):
    assert rows_of(plan(tmp_path, pod_target("v6e-8"), max_seq_len=128)) == 256
    on_cpus = plan(tmp_path, CPU, max_seq_len=4096)
    assert rows_of(on_cpus) == 32
    (said,) = [check.message for check in on_cpus.checks if check.name == "rows" and "auto is" in check.message]
    assert said.endswith("; 32 are taken at most, since on CPUs more of them make hardly more tokens a second")


def test_calls_for_prompts_are_as_short_as_rows_want_them_on_cpus(tmp_path):
    def said(target: Target, **inference) -> list[str]:
        found = plan(tmp_path, target, **inference)
        names = [program.name for program in found.computing if program.name.startswith("prefill_")]
        return [*names, *(check.message for check in found.checks if check.name == "prompts")]

    *names, why = said(CPU, max_rows=8)
    assert names == ["prefill_2x8", "prefill_1x16"]
    assert why.startswith("inference.prefill_chunk: auto is 16: ") and "8 rows" in why
    assert said(CPU, max_rows=8, prefill_chunk=128) == ["prefill_4x32", "prefill_1x128"]
    assert said(pod_target("v6e-8"), max_rows=8) == ["prefill_1x32", "prefill_1x128", "prefill_1x512"]


def test_memory_that_is_not_known_asks_for_a_number(tmp_path):
    unknown = replace(CPU, host_bytes=None)
    with pytest.raises(ValueError, match=r"auto: the memory of a device of local is not known[^→]*→ .*max_rows: 8"):
        plan(tmp_path, unknown)
    limited = plan(tmp_path, unknown, mesh={"hbm_gib": 25})
    assert rows_of(limited) == 13


def test_where_nothing_fits_one_row_is_planned_and_refused(tmp_path):
    found = plan(tmp_path, pod_target("v5e-8"))
    assert rows_of(found) == 1
    question = Question(
        target="v5e-8",
        describe=lambda target: plan(tmp_path, target),
        provider="not asked",
        payload={},
        compile=False,
    )
    verdict = preflight(question)
    assert verdict.exit_code == 3
    said = "\n".join(finding for stage in verdict.stages for finding in stage.findings)
    assert "0 rows of 8,192 positions fit, 1 asked" in said
    assert "v5litepod-16 with model 8 × group 2" in said


def test_another_word_than_auto_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"inference\.max_rows"):
        plan(tmp_path, CPU, max_rows="many")
    with pytest.raises(ConfigError, match=r"inference\.max_rows"):
        plan(tmp_path, CPU, max_rows=0)
