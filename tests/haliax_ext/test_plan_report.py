"""Plans as text: content, width, folding of numbered layers, and diffs.

Plans of real shapes are golden texts in `tests/levanter/mesh/test_presets.py`.
"""

import numpy as np
import pytest

from haliax_ext.abstract import Leaf
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.plan_report import plan_diff, plan_report, summarize
from haliax_ext.planner import plan_sharding

pytestmark = pytest.mark.quick

MESH = MeshSpec.of(data=4, model=2)
GIB = 1 << 30


def leaf(path, **axes):
    return Leaf(path, tuple(axes.items()), np.dtype(np.float32))


LEAVES = (
    leaf("embeddings.tokens.weight", vocab=32768, embed=512),
    leaf("blocks.0.mlp.up.weight", mlp=2048, embed=512),
    leaf("blocks.1.mlp.up.weight", mlp=2048, embed=512),
    leaf("blocks.0.norm.weight", embed=512),
    leaf("blocks.1.norm.weight", embed=512),
    leaf("head", vocab=32768, embed=512),
)
FSDP = Mappings(params=AxisMapping({"mlp": "model", "embed": "data"}), compute=AxisMapping({"batch": "data"}))


def made(mappings=FSDP, leaves=LEAVES, mesh=MESH, hbm_bytes=GIB // 64):
    return plan_sharding(leaves, mappings, mesh, hbm_bytes=hbm_bytes)


def test_the_whole_report():
    assert plan_report(made(), largest=2) == (
        """\
mesh data 4 × model 2: 8 devices
parameters {mlp: model, embed: data}
compute {batch: data}

                                                                                      shards    on each device
embeddings                                                                                           16.00 MiB
  tokens.weight float32                                                                    4         16.00 MiB
    [vocab 32768, embed 512 → data]
blocks.*.mlp                                                                                          1.00 MiB
  up.weight (2 of them) float32                                                            8          1.00 MiB
    [mlp 2048 → model, embed 512 → data]
blocks.*                                                                                              1.00 KiB
  norm.weight (2 of them) float32                                                          4          1.00 KiB
    [embed 512 → data]
head                                                                                                 16.00 MiB
  head float32                                                                             4         16.00 MiB
    [vocab 32768, embed 512 → data]

total 136.00 MiB in 6 arrays; 33.00 MiB on each device, 16.00 MiB of it replicated
  that is 206.3% of a device's 16.00 MiB

largest arrays on a device
     16.00 MiB  embeddings.tokens.weight
     16.00 MiB  head

errors (2)
  embeddings.tokens.weight [vocab 32768, embed 512] float32 is replicated over model 2: 16.00 MiB on each device, 8.00
      MiB of it redundant; that is 100.0% of a device's 16.00 MiB, and mesh axis model shards other parameters of this
      model
    → shard it, e.g. {vocab: model}, or accept it: allow_replicated: ["embeddings.tokens.weight"]
  head [vocab 32768, embed 512] float32 is replicated over model 2: 16.00 MiB on each device, 8.00 MiB of it redundant;
      that is 100.0% of a device's 16.00 MiB, and mesh axis model shards other parameters of this model
    → shard it, e.g. {vocab: model}, or accept it: allow_replicated: ["head"]"""
    )


def test_a_summary_in_groups_of_the_callers_choice():
    groups = {"tables": ["embeddings", "head"], "MLP": ["**.mlp"]}
    assert summarize(made(hbm_bytes=None, mesh=MeshSpec.of(data=4, model=1)), groups=groups) == (
        """\
mesh data 4 × model 1: 4 devices
parameters {mlp: model, embed: data}
compute {batch: data}
on each device
  tables  32.00 MiB
  MLP      2.00 MiB
  other    1.00 KiB
total 136.00 MiB in 6 arrays; 34.00 MiB on each device, 0 B of it replicated"""
    )


def test_numbered_layers_that_differ_are_shown_one_by_one():
    leaves = (leaf("blocks.0.up.weight", mlp=2048), leaf("blocks.1.up.weight", mlp=1024))
    text = plan_report(made(leaves=leaves))
    assert "blocks.*" not in text
    assert "[mlp 2048 → model]" in text
    assert "[mlp 1024 → model]" in text


def test_what_stays_whole_is_listed_worst_first():
    text = plan_report(made(hbm_bytes=None))
    listed = text[text.index("replicated (") :].splitlines()
    assert listed[0] == "replicated (16.00 MiB redundant on each device)"
    assert [line.split()[0] for line in listed[1:] if line[2] != " "] == ["embeddings.tokens.weight", "head"]


def test_a_diff_of_two_mappings():
    vocab = Mappings(params=FSDP.params.merged({"vocab": "model"}), compute=FSDP.compute)
    text = plan_diff(made(), made(vocab), names=("default", "with vocab"))
    assert text == (
        """\
                                 default    with vocab
on each device                 33.00 MiB     17.00 MiB
of it replicated               16.00 MiB         512 B
errors                                 2             0
largest array on a device      16.00 MiB      8.00 MiB
default: mesh data 4 × model 2; parameters {mlp: model, embed: data}; compute {batch: data}
with vocab: mesh data 4 × model 2; parameters {mlp: model, embed: data, vocab: model}; compute {batch: data}

2 of 6 arrays are placed differently:
  embeddings.tokens.weight
    default     16.00 MiB  [vocab 32768, embed 512 → data]
    with vocab   8.00 MiB  [vocab 32768 → model, embed 512 → data]
  head
    default     16.00 MiB  [vocab 32768, embed 512 → data]
    with vocab   8.00 MiB  [vocab 32768 → model, embed 512 → data]"""
    )


def test_a_diff_of_different_models():
    text = plan_diff(made(), made(leaves=LEAVES[:-1]))
    assert "1 of 6 arrays are placed differently:\n  head\n" in text
    assert "    second absent" in text


def test_equal_plans():
    assert plan_diff(made(), made()).endswith("\n0 of 6 arrays are placed differently")


@pytest.mark.parametrize("show", [plan_report, summarize, lambda plan: plan_diff(plan, made())])
def test_never_wider_than_120_columns(show):
    long = ".".join(f"a_rather_long_module_name_{n}" for n in range(8))
    axes = {f"axis_with_a_long_name_{n}": 64 for n in range(8)}
    rules = Mappings(
        params=AxisMapping({name: "model" if n == 3 else None for n, name in enumerate(axes)}),
        overrides=((f"{long}.nothing", AxisMapping(dict.fromkeys(axes))),),
    )
    text = show(made(rules, (leaf(f"{long}.weight", **axes), *LEAVES)))
    assert max(map(len, text.splitlines())) <= 120


def test_an_empty_plan():
    assert "total 0 B in 0 arrays" in plan_report(made(leaves=()))
    assert "total 0 B in 0 arrays" in summarize(made(leaves=()))
