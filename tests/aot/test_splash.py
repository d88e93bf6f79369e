"""Our train step with splash attention, by the real TPU compiler: the kernels, their cost, who talks to whom."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aot.llama_programs import SMALL

from levanter.plan.aot import Compiled, compile_programs
from levanter.plan.step_time_model import kernel_flops

PROGRAMS = Path(__file__).parent / "llama_programs.py"
ATTENTION = Path(__file__).parent / "attention_programs.py"
pytestmark = [
    pytest.mark.aot,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (the `plan` extra)"),
]


def compiled(target: str, tmp_path: Path, **payload: Any) -> tuple[Compiled, str]:
    """The train step and the compiler's text of it."""
    (outcome,) = compile_programs(f"{PROGRAMS}:train_step", payload, target=target, keep_text=tmp_path)
    assert isinstance(outcome, Compiled) and outcome.figures is not None
    return outcome, (tmp_path / "train_step.hlo.txt").read_text()


def pairs_visited(length: int, block: int) -> int:
    """Pairs of query and key in the blocks that hold a visible one."""
    seen = np.tril(np.ones((length, length), bool))
    blocks = seen.reshape(length // block, block, length // block, block).any(axis=(1, 3))
    return int(blocks.sum()) * block**2


@pytest.mark.parametrize("target", [pytest.param("v6e-8", marks=pytest.mark.ci), "v4-8", "v5p-8"])
def test_kernels_run_on_each_devices_heads_and_rows(target, tmp_path):
    outcome, text = compiled(target, tmp_path, mesh={"axes": {"model": 2}})
    figures, layers, length = outcome.figures, SMALL["num_layers"], SMALL["max_seq_len"]
    assert figures is not None and figures.unknown == ()
    assert 'custom_call_target="tpu_custom_call"' in text
    # Forward, once more for the backward pass, and the gradients of queries and of keys and values.
    kinds = [(k.name.split("_")[2], k.scope.during, k.times) for k in figures.kernels]
    expected = [("dkv", "backward"), ("dq", "backward"), ("fwd", "forward"), ("fwd", "remat")]
    assert sorted(kinds) == [(kind, during, layers) for kind, during in expected]
    assert {k.scope.module for k in figures.kernels} == {"layers.self_attn.attention"}
    # 8 sequences and 8 query heads; a device has its part of each.
    rows, heads = 8 // outcome.mesh.shape["data"], SMALL["num_heads"] // outcome.mesh.shape["model"]
    pairs = rows * heads * pairs_visited(length, 1024)
    matmuls = {"fwd": 2, "dq": 3, "dkv": 4}
    for kernel in figures.kernels:
        by_hand = 2 * matmuls[kernel.name.split("_")[2]] * pairs * SMALL["head_dim"]
        assert kernel_flops(kernel, causal=True) == by_hand
    modules = set(figures.cycles_by_module(3))
    parts = {"self_attn": ("q_proj", "k_proj", "v_proj", "rope", "attention", "o_proj"),
             "mlp": ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    assert modules >= {f"layers.{part}.{name}" for part, names in parts.items() for name in names}
    assert modules >= {
        "layers.input_layernorm",
        "layers.post_attention_layernorm",
        "norm",
        "lm_head.chunks",
        "optimizer",
    }
    named = sum(cycles for module, cycles in figures.cycles_by_module(1).items() if module != "(unnamed)")
    assert named > 0.95 * figures.total_cycles


@pytest.mark.parametrize("window", [None, 300])
def test_positions_that_are_arrays(window, tmp_path):
    """Unequal lengths, the keys in any order, each device with its own rows and queries: marks and tables are data."""
    payload = {"queries": 2048, "keys": 3000, "window": window}
    (outcome,) = compile_programs(f"{ATTENTION}:at_positions", payload, target="v6e-8", keep_text=tmp_path)
    assert isinstance(outcome, Compiled) and outcome.figures is not None
    # Keys in any order are sorted for the tables, and the compiler's sorts are counted among kernels.
    names = [kernel.name for kernel in outcome.figures.kernels if kernel.name != "sort"]
    assert sorted(name.split("_")[2] for name in names) == ["dkv", "dq", "fwd"]
    text = (tmp_path / "attention.hlo.txt").read_text()
    assert "3000,2048" not in text and "2048,3000" not in text and "1024,3072" not in text


def test_gradients_are_scattered_and_not_reduced_whole(tmp_path):
    """Nothing of a weight's size is all-reduced over `data`; the head's gradient, in float32, crosses once.

    On some meshes (7B on v4-32, data 16) this libtpu makes all-reduces of all of them, of plain JAX programs too.
    """
    outcome, _ = compiled("v4-8", tmp_path, mesh={"axes": {"model": 2}})
    figures = outcome.figures
    assert figures is not None
    smallest_matrix = SMALL["hidden_dim"] * SMALL["num_kv_heads"] * SMALL["head_dim"] * 2 // 2
    reduced = [c for c in figures.collectives if c.kind == "all-reduce" and "data" in c.over]
    assert all(c.bytes < smallest_matrix for c in reduced), reduced
    head = SMALL["vocab_size"] * SMALL["hidden_dim"] * 4 // 2
    scattered = [c for c in figures.collectives if c.kind == "reduce-scatter"]
    assert {c.times for c in scattered if c.bytes >= head} == {1}
    assert all(c.over == "model" for c in figures.collectives if c.scope.module == "lm_head.chunks")


@pytest.mark.parametrize("context", [1, 2])
def test_a_residual_stream_cut_by_position_is_scattered_and_gathered(context, tmp_path):
    """Over `model`, what was summed of each block is cut at once and gathered before the next; nothing is all-reduced.

    Where positions lie over `context` as well, `model` cuts what is left of them.
    """
    cut = "model" if context == 1 else ["context", "model"]
    mesh = {"axes": {"model": 2, "context": context}, "residual_mapping": {"position": cut}}
    if context > 1:
        mesh |= {"compute_mapping": {"position": "context"}, "attention_mapping": "gather"}
    few = {"num_layers": 2, "vocab_size": 1024}
    outcome, _ = compiled("v6e-8", tmp_path, mesh=mesh, model=few, segments=False)
    figures = outcome.figures
    assert figures is not None
    over_model = [c for c in figures.collectives if c.over == "model" and c.bytes >= 1 << 20]
    assert {c.kind for c in over_model} == {"all-gather", "reduce-scatter"}, over_model
    rows = 8 // outcome.mesh.shape["data"]
    stream = rows * SMALL["max_seq_len"] // context * SMALL["hidden_dim"] * 2
    # Two blocks a layer: each gathers its input, and scatters the sum of its result, and so backward.
    of_kind = {
        kind: sum(c.times for c in over_model if c.kind == kind and c.bytes == stream)
        for kind in ("all-gather", "reduce-scatter")
    }
    assert of_kind["all-gather"] >= of_kind["reduce-scatter"] >= 4 * few["num_layers"], over_model


@pytest.mark.parametrize("mp", ["f32", "p=f32,c=bfloat16"])
@pytest.mark.parametrize(("head_size", "length"), [(64, 1000), (128, 8192), (256, 4096)])
@pytest.mark.parametrize("target", ["v4-8", "v5e-8"])
def test_blocks_fit_in_every_core(target, mp, head_size, length, tmp_path):
    """The largest blocks in both dtypes, and a length that is no multiple of any."""
    outcome, _ = compiled(target, tmp_path, mp=mp, batch=8, model={"head_dim": head_size, "max_seq_len": length})
    assert outcome.figures is not None and len(outcome.figures.kernels) == 4


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 5000])
def test_in_a_ring_kernels_run_while_keys_travel(window, tmp_path):
    """64K positions over eight chips: keys are never whole, and each permutation of them is around a kernel."""
    payload = {"positions": 65_536, "window": window, "heads": 12, "exchange": "ring"}
    (outcome,) = compile_programs(f"{ATTENTION}:over_eight", payload, target="v6e-8", keep_text=tmp_path)
    assert isinstance(outcome, Compiled) and outcome.figures is not None
    figures = outcome.figures
    kernels = sorted((kernel.name.split("_")[2], kernel.times) for kernel in figures.kernels)
    assert kernels == [("dkv", 8), ("dq", 8), ("fwd", 8)]
    assert {c.kind for c in figures.collectives} <= {"collective-permute", "all-reduce"}
    part = 12 * 65_536 // 8 * 128
    travelling = [c for c in figures.collectives if c.kind == "collective-permute" and c.bytes >= part]
    in_loops = [c for c in travelling if c.times == 8]
    # Keys and values; backward queries and the gradients of the result, and in float32 those of the queries.
    assert sorted(c.bytes for c in in_loops) == [part * 2] * 4 + [part * 4]
    assert all(c.hidden_by for c in in_loops)
    assert all(c.bytes < part for c in figures.collectives if c.kind == "all-reduce")
    assert outcome.peak_bytes < 640 << 20
    assert not looks_up(tmp_path / "cut.hlo.txt") and not has_scores(tmp_path / "cut.hlo.txt", 8_192)


@pytest.mark.slow
def test_gradients_of_gathered_keys_are_scattered(tmp_path):
    """Keys and values are gathered, their gradients summed and cut at once; the order takes no look-up."""
    payload = {"positions": 65_536, "window": None, "heads": 12, "exchange": "gather"}
    (outcome,) = compile_programs(f"{ATTENTION}:over_eight", payload, target="v6e-8", keep_text=tmp_path)
    assert isinstance(outcome, Compiled) and outcome.figures is not None
    whole = 12 * 65_536 * 128 * 2
    large = [c for c in outcome.figures.collectives if c.bytes >= whole // 8]
    assert {c.kind for c in large} == {"all-gather", "reduce-scatter"}, large
    # Keys and values together or one by one: as many bytes are gathered as are scattered.
    of_kind = {kind: sum(c.total_bytes for c in large if c.kind == kind) for kind in ("all-gather", "reduce-scatter")}
    assert of_kind["all-gather"] == of_kind["reduce-scatter"] == 2 * whole, large
    assert not looks_up(tmp_path / "cut.hlo.txt") and not has_scores(tmp_path / "cut.hlo.txt", 8_192)


@pytest.mark.slow
def test_heads_cross_once_and_keys_are_never_whole(tmp_path):
    """Queries, keys, values and results, and their gradients: eight all-to-alls of a device's part, and no gather."""
    payload = {"positions": 65_536, "window": None, "heads": 16, "exchange": "heads"}
    (outcome,) = compile_programs(f"{ATTENTION}:over_eight", payload, target="v6e-8", keep_text=tmp_path)
    assert isinstance(outcome, Compiled) and outcome.figures is not None
    part = 16 * 65_536 // 8 * 128 * 2
    large = [c for c in outcome.figures.collectives if c.bytes >= part // 8]
    assert {c.kind for c in large} == {"all-to-all"}, large
    assert sum(c.total_bytes for c in large) <= 8 * part
    assert not has_scores(tmp_path / "cut.hlo.txt", 8_192)


def has_scores(text: Path, least: int) -> list[str]:
    """Instructions of a compiled text whose result has two axes of so many positions."""
    found = []
    for line in text.read_text().splitlines():
        shape = re.search(r" = \w+\[([\d,]+)\]", line)
        if shape and sum(int(size) >= least for size in shape[1].split(",")) > 1:
            found.append(line)
    return found


def looks_up(text: Path) -> list[str]:
    """Instructions of a compiled text that gather entries by index."""
    return [line for line in text.read_text().splitlines() if re.search(r" = \S+ (gather|dynamic-gather)\(", line)]
