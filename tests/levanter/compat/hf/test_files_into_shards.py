"""Loading from real safetensors files: values as the safetensors library reads them, every byte once."""

import numpy as np
import pytest
from helpers.tiny_llama import assembled, tiny_leaves, tiny_rules, tiny_tensors
from safetensors.numpy import load_file, save_file

from haliax_ext.loading import load, plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from levanter.compat.hf.safetensors import SafetensorsSource

pytestmark = pytest.mark.quick

MESH = MeshSpec.of(data=4, model=2)


@pytest.mark.parametrize(
    "mapping",
    [
        {},
        {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
        {"head_size": "data", "q_heads_per_group": "model", "embed": "data"},
    ],
    ids=["replicated", "default", "heads inside"],
)
def test_files_into_shards(mapping, tmp_path, devices):
    tensors = tiny_tensors(np.float16)
    names = list(tensors)
    paths = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"]
    save_file({name: tensors[name] for name in names[:7]}, paths[0])
    save_file({name: tensors[name] for name in names[7:]}, paths[1])
    if "head_size" in mapping:
        # Both cut q_proj: its own rule for one of them.
        overrides = (("**.self_attn.*", AxisMapping({"embed": None})),)
    else:
        overrides = ()
    mappings = Mappings(params=AxisMapping(mapping), overrides=overrides)
    sharding = plan_sharding(tiny_leaves(), mappings, MESH).check()
    source = SafetensorsSource.from_files(*paths)
    plan = plan_loading(sharding, tiny_rules(), source)
    found = load(plan, sharding, source, MESH.build(devices))
    wanted = assembled({**load_file(paths[0]), **load_file(paths[1])})
    for path, values in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[path]), values.astype(np.float32))
    assert source.bytes_read == sum(array.nbytes for array in tensors.values()) == found.report.bytes_read
