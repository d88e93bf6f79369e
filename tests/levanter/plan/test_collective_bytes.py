"""What LoRA saves over links, from a run's own plan: against sums written out by hand from the models' shapes."""

import json
from functools import cache

import pytest
from helpers.golden import GOLDEN
from helpers.plan_cases import CASES

from haliax_ext.hlo import AxisSpan
from haliax_ext.meshspec import MeshSpec
from levanter.commands.train.config import TrainLmConfig
from levanter.commands.train.lm.train_lm import ENTRY_POINT, describe
from levanter.config import load_written
from levanter.hardware import parse_accelerator
from levanter.plan.collective_bytes import (
    ADAPTERS_GATHERED,
    FROZEN_GATHERED,
    GATHERED,
    GRADIENTS,
    CollectiveBytes,
    span_collective_bytes,
    step_collective_bytes,
)
from levanter.plan.dcn_gathers import dcn_gather_note
from levanter.plan.search.candidates import Candidate
from levanter.plan.search.estimate import estimate, estimate_layout, search_subject
from levanter.plan.target_from_name import pod_target

GB = 1e9
EIGHT = {"hidden_dim": 4096, "intermediate_dim": 14336, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8}
SEVENTY = {"hidden_dim": 8192, "intermediate_dim": 28672, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8}
# As Meta published them.
PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496}
TABLE = {"8B": 128_256 * 4096, "70B": 128_256 * 8192}
ADAPTERS = {"8B": 167_772_160, "70B": 207_093_760}
CUT, CUT_ALL = {"embed": "data"}, {"embed": ["replica_dcn", "data"]}
EVERY_FACTOR = {"pairs": {"mlp": "data", "head_size": "data"}}


@cache
def plan_of(model: str, pod: str, *, everywhere: bool = False, full: bool = False, rows: int = 128):
    shape, rank = (EIGHT, 64) if model == "8B" else (SEVENTY, 16)
    document = {
        "model": {"type": "llama", "vocab_size": 128_256, "max_seq_len": 2048, **shape},
        "train_seq_len": 2048,
        "data": {"tokenizer": "passthrough"},
        "adapter": {"type": "lora", "r": rank, "zero_init_b": True, "a_init_mode": "peft"},
        "trainer": {
            "mp": "p=f32,c=bfloat16",
            "train_batch_size": rows,
            "mesh": {"param_mapping": CUT_ALL if everywhere else CUT, "overrides": EVERY_FACTOR},
        },
    }
    words = [word for key, value in document.items() for word in (f"--{key}", json.dumps(value))]
    loaded = load_written(TrainLmConfig, words)
    described = ENTRY_POINT.describe_full_finetune if full else describe
    return described(loaded.config, pod_target(pod), written=loaded.written)


def received(model: str, pod: str, **how) -> dict[str, CollectiveBytes]:
    return dict(step_collective_bytes(plan_of(model, pod, **how)))


def by_hand(model: str, devices: int, *, full: bool) -> float:
    """Bytes over ICI with one slice: bfloat16 in two passes (the table in one), float32 gradients."""
    n, table = PARAMETERS[model], TABLE[model]
    gathered = 2 * (2 * n - table) + (0 if full else 2 * 2 * ADAPTERS[model])
    return (gathered + 4 * (n if full else ADAPTERS[model])) * (devices - 1) / devices


# Rounded as the specification has them; it counts the table of embeddings in both passes, which no step reads twice.
@pytest.mark.parametrize(
    ("model", "pod", "devices", "full", "lora"),
    [("8B", "v6e-128", 128, 63.7, 31.9 + 1.33), ("70B", "v5e-16", 16, 529, 264.6 + 1.55)],
)
def test_one_slice(model, pod, devices, full, lora):
    rows = 128 if model == "8B" else 16
    for is_full, stated in ((True, full), (False, lora)):
        found = received(model, pod, full=is_full, rows=rows)
        total = sum(found.values(), CollectiveBytes())
        assert total.dcn == 0
        assert total.ici == pytest.approx(by_hand(model, devices, full=is_full), rel=1e-3)
        assert total.ici / GB == pytest.approx(stated, rel=0.05)
    assert set(received(model, pod, rows=rows)) == {FROZEN_GATHERED, ADAPTERS_GATHERED, GRADIENTS}
    assert set(received(model, pod, full=True, rows=rows)) == {GATHERED, GRADIENTS}


def test_between_slices_only_gradients_travel_where_weights_are_cut_inside():
    full, lora = (received("8B", "32xv6e-4", full=is_full) for is_full in (True, False))
    assert lora[FROZEN_GATHERED].dcn == 0
    assert full[GRADIENTS].dcn == pytest.approx(2 * 4 * PARAMETERS["8B"] / 4 * 31 / 32, rel=1e-3)
    assert full[GRADIENTS].dcn / GB == pytest.approx(15.56, rel=1e-3)
    assert lora[GRADIENTS].dcn / GB == pytest.approx(0.325, rel=1e-3)
    # Seed 000 said 50, of 620 MB of adapters: that would be rank 59.
    assert full[GRADIENTS].dcn / lora[GRADIENTS].dcn == pytest.approx(47.9, rel=1e-3)


def test_a_frozen_base_gathered_between_slices_costs_what_it_saves():
    full, lora = (
        sum(received("8B", "32xv6e-4", everywhere=True, full=is_full).values(), CollectiveBytes())
        for is_full in (True, False)
    )
    # By slice of four chips; the table in one pass, as above.
    assert 4 * full.dcn / GB == pytest.approx(62.2, rel=0.05)
    assert 4 * lora.dcn / GB == pytest.approx(32.4, rel=0.05)
    assert full.dcn / lora.dcn == pytest.approx(1.92, rel=0.02)
    inside = sum(received("8B", "32xv6e-4").values(), CollectiveBytes())
    assert lora.dcn / inside.dcn == pytest.approx(32.4 / 1.3, rel=0.05), "25 times the bytes that it had"


def test_seed_000_s_table_corrected():
    plan = plan_of("8B", "32xv6e-4", full=True)
    layers = [each.leaf for each in plan.sharding.leaves if each.leaf.path.startswith("model.transformer.layers")]
    in_layers = sum(leaf.nbytes for leaf in layers)
    assert {dict(leaf.axes)["layers"] for leaf in layers} == {32}, "not 64"
    assert in_layers / 32 == pytest.approx(872.4e6, rel=1e-3), "float32 of one layer, not 864 MB"
    assert 2 * in_layers == pytest.approx(55.8e9, rel=1e-3), "gathered forward and backward"
    assert 4 * PARAMETERS["8B"] == pytest.approx(32e9, rel=0.01)
    adapters = plan_of("8B", "32xv6e-4").resident_bytes
    assert ADAPTERS["8B"] * 4 == pytest.approx(671e6, rel=1e-3), "rank 64 is not 620 MB"
    assert adapters["adapters"] == ADAPTERS["8B"] * 4 / 4
    frozen = sum(size for name, size in adapters.items() if name.startswith("frozen"))
    assert frozen / 2**30 == pytest.approx(3.74, rel=1e-3), "a quarter of an 8B in bfloat16 is not too much for a chip"
    assert plan_of("8B", "32xv6e-4").target.hbm_bytes == 31.25 * 2**30


def test_70b_on_v5e_16_holds_what_was_foretold():
    adapted, full = (plan_of("70B", "v5e-16", full=is_full, rows=16).resident_bytes for is_full in (False, True))
    frozen = sum(size for name, size in adapted.items() if name.startswith("frozen"))
    gib = {name: size / 2**30 for name, size in adapted.items()}
    assert frozen / 2**30 == pytest.approx(8.21, rel=2e-3)
    assert gib["adapters"] + gib["optimizer"] == pytest.approx(0.145, rel=0.01)
    assert gib["gradients"] == pytest.approx(0.048, rel=0.01)
    assert full["gradients"] / 2**30 == pytest.approx(16.4, rel=2e-3)
    assert (sum(full.values()) - full["gradients"]) / 2**30 == pytest.approx(49.3, rel=2e-3)


def test_a_plan_says_when_what_is_frozen_is_gathered_between_slices():
    said = dcn_gather_note(plan_of("8B", "32xv6e-4", everywhere=True))
    assert said is not None
    gigabytes = received("8B", "32xv6e-4", everywhere=True)[FROZEN_GATHERED].dcn / GB
    assert f"{gigabytes:.3g} GB a step" in said and "trainer.mesh.param_mapping: {embed: data}" in said
    assert dcn_gather_note(plan_of("8B", "32xv6e-4")) is None
    # Full fine-tuning gathers no byte more by it.
    assert dcn_gather_note(plan_of("8B", "32xv6e-4", everywhere=True, full=True)) is None


def test_nothing_is_said_where_it_would_not_fit_otherwise():
    plan = plan_of("70B", "4xv5e-4", everywhere=True, rows=16)
    assert not plan.errors
    assert dcn_gather_note(plan) is None, "a fourth of 70B is 33 GiB"


def test_the_search_prefers_weights_that_are_cut_inside_slices():
    pod = parse_accelerator("32xv6e-4")
    plan = plan_of("8B", "32xv6e-4", everywhere=True)
    subject = search_subject(plan)
    own = estimate_layout(subject, pod, mesh=plan.mesh, mappings=plan.sharding.mappings, rows=1, remat=True)
    inside = estimate(Candidate(data=4, model=1, rows=1, remat=True, slices=32), subject, pod)
    assert not own.problem and not inside.problem and inside.fits(pod.hbm_bytes)
    assert inside.seconds_per_token < 0.8 * own.seconds_per_token
    assert inside.gathers < own.gathers / 3


def test_a_search_knows_that_frozen_weights_have_no_gradients():
    adapted, full = (search_subject(plan_of("8B", "v6e-128", full=is_full)) for is_full in (False, True))
    pod, candidate = parse_accelerator("v6e-128"), Candidate(data=128, model=1, rows=1, remat=True)
    assert adapted.frozen_share == pytest.approx(PARAMETERS["8B"] / (PARAMETERS["8B"] + ADAPTERS["8B"]))
    assert full.frozen_share == 0
    one, other = (estimate(candidate, subject, pod) for subject in (adapted, full))
    assert one.gradients < other.gradients / 10
    # Three passes for four; what attention and the adapters compute is not spared.
    assert 6 / 8 < one.compute / other.compute < 0.8


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all"])
@pytest.mark.parametrize(("slices", "inside"), [(1, 8), (4, 1), (4, 8)])
def test_what_a_device_receives_is_what_it_lacks(kind, slices, inside):
    """Counted for each pair of devices: what is not a device's own comes to it once, or twice."""
    mesh = MeshSpec(axes=(("replica_dcn", slices), ("data", inside)), dcn=("replica_dcn",))
    spans = [AxisSpan("replica_dcn", slices, slices), AxisSpan("data", inside, inside)]
    found = span_collective_bytes(mesh, kind, 960.0, spans)
    n = slices * inside
    lacking = 960.0 * (n - 1) / n * (2 if kind == "all-reduce" else 1)
    assert found.ici + found.dcn == pytest.approx(lacking)
    assert (found.dcn > 0) == (slices > 1) and (found.ici > 0) == (inside > 1)


def test_what_a_compiled_step_of_70b_receives_is_what_arithmetic_says():
    """LoRA on v5e-16, as the specification has it: 264.6 GB of the frozen weights, and 1.55 GB for the adapters."""
    kept = json.loads((GOLDEN / "compiled" / "lora_llama3_70b_v5e-16.json").read_text())
    # Whole arrays; a chip has a sixteenth of each.
    compiled = kept["programs"]["train_step"]["bytes_over"]["data (ici)"] * 15 / 16
    plan = CASES["lora_llama3_70b_v5e-16"].describe(pod_target(parse_accelerator("v5e-16")))
    arithmetic = sum((each.ici for each in step_collective_bytes(plan).values()), 0.0)
    assert arithmetic == pytest.approx(264.6 * GB + 1.55 * GB, rel=0.02)
    assert compiled == pytest.approx(arithmetic, rel=0.05)
