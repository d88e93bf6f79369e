"""Real processes load one checkpoint file: together they read it once, and every shard is right."""

import json
from pathlib import Path

import pytest
from helpers import load_in_processes
from helpers.processes import run_together
from helpers.tiny_llama import tiny_tensors
from safetensors.numpy import save_file

# Real processes on a machine that has other things to do.
pytestmark = pytest.mark.timeout(1800)


IN_ORDER = list(range(8))
# Each process has a part of every row of the mesh: `model` crosses the hosts, `data` does not.
ACROSS = [0, 4, 1, 5, 2, 6, 3, 7]


def together(folder: Path, count: int = 2, **given) -> list[dict]:
    """Runs processes of 8 virtual devices in all; what they report."""
    given = {
        "mesh": {"data": 4, "model": 2},
        "order": IN_ORDER,
        "dtype": "float32",
        "limit": 1 << 30,
        "integers": False,
        "twin": False,
    } | given
    tensors = tiny_tensors()
    if given["twin"]:
        tensors |= {name.replace("gate", "up"): 2 * each for name, each in tensors.items() if "gate_proj" in name}
    save_file(tensors, folder / "model.safetensors")
    run_together(folder, count, [load_in_processes.__file__, str(folder), json.dumps(given)], devices=8 // count)
    return [json.loads((folder / f"found.{number}.json").read_text()) for number in range(count)]


def check_bytes(found: list[dict]) -> None:
    total = found[0]["total"]
    assert sum(each["bytes_read"] for each in found) <= 1.02 * total
    for each in found:
        assert each["bytes_read"] == each["planned"]
        assert each["progress"] == [each["planned"], each["planned"], sum(e["planned"] for e in found)]
        assert len(each["seconds_by_host"]) == len(found)
    assert all(each["seconds_by_host"] == found[0]["seconds_by_host"] for each in found)


def test_replicated_row_and_column_sharded_leaves(tmp_path):
    """`embed` over the hosts: inner in gate_proj (columns), outer in down_proj (rows); `norm` stays whole."""
    found = together(tmp_path, order=ACROSS, mapping={"embed": "model", "mlp": "data", "vocab": None})
    check_bytes(found)
    strategies = {path.split(".")[-2]: strategy for path, strategy in found[0]["strategies"].items()}
    assert strategies["gate_proj"] == "exchange" and strategies["down_proj"] == "direct"


def test_exchanges_of_one_shape_compile_once(tmp_path):
    """Of gate_proj and up_proj, which differ in nothing but their names, each piece by piece."""
    mapping = {"embed": "model", "mlp": "data", "vocab": None}
    found = together(tmp_path, order=ACROSS, mapping=mapping, limit=1500, twin=True)
    check_bytes(found)
    pieces = {path.split(".")[-2]: count for path, count in found[0]["pieces"].items()}
    assert pieces["gate_proj"] == pieces["up_proj"] > 1
    for each in found:
        assert each["compiled"] == each["programs"]
        assert sum("gate_proj" in name for name in each["compiled"]) == 2, "room is made, a piece is put into it"
        assert not any("up_proj" in name for name in each["compiled"])


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 30, 6000])
def test_integers_scales_and_what_no_file_has(tmp_path, limit):
    """Contracted axes lie over the hosts: each scale is of numbers that no host has all of."""
    mapping = {"embed": "model", "mlp": "data", "vocab": None}
    found = together(tmp_path, order=ACROSS, mapping=mapping, integers=True, limit=limit)
    check_bytes(found)
    assert set(found[0]["strategies"].values()) == {"direct", "exchange"}
    assert (max(found[0]["pieces"].values()) > 1) == (limit == 6000)


@pytest.mark.slow
@pytest.mark.parametrize("order", [IN_ORDER, ACROSS], ids=["in order", "across"])
@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
        {"embed": ["model", "data"]},
        {"head_size": "data", "q_heads_per_group": "model"},
    ],
    ids=["replicated", "default", "embed over all", "heads inside"],
)
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1 << 30), ("float32", 6000), ("bfloat16", 1 << 30)])
def test_every_way_to_cut(tmp_path, order, mapping, dtype, limit):
    found = together(tmp_path, order=order, mapping=mapping, dtype=dtype, limit=limit)
    check_bytes(found)
    if not mapping:
        assert set(found[0]["strategies"].values()) == {"exchange"}
        assert (max(found[0]["pieces"].values()) > 1) == (limit == 6000)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mapping",
    [{}, {"embed": "data"}, {"mlp": "data"}, {"embed": "model", "mlp": "data", "vocab": None}],
    ids=["replicated", "columns", "rows", "both"],
)
def test_four_processes(tmp_path, mapping):
    check_bytes(together(tmp_path, 4, order=[0, 2, 4, 6, 1, 3, 5, 7], mapping=mapping))
