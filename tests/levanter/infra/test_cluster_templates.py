"""The cluster templates, judged by Ray's own code for such files (nothing is started)."""

from pathlib import Path

import pytest
import yaml

from levanter.hardware import parse_accelerator
from levanter.infra.pods import RUNTIME_VERSIONS

pytestmark = pytest.mark.quick

ray = pytest.importorskip("ray", reason="the `ray` extra is not installed")

TEMPLATES = sorted((Path(__file__).resolve().parents[3] / "config" / "cluster").glob("ray_*.yaml"))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_ray_takes_it(path):
    from ray._private.accelerators import TPUAcceleratorManager
    from ray.autoscaler._private.util import prepare_config, validate_config

    document = yaml.safe_load(path.read_text())
    # What `ray up` does before it contacts anybody: defaults are filled in, and all is held against Ray's schema.
    validate_config(prepare_config(document))
    nodes = document["available_node_types"]
    slice_config = nodes["slice"]["node_config"]
    accelerator = parse_accelerator(slice_config["acceleratorType"])
    assert TPUAcceleratorManager.is_valid_tpu_accelerator_type(slice_config["acceleratorType"])
    assert slice_config["runtimeVersion"] == RUNTIME_VERSIONS[accelerator.generation.name]
    # `ray_run` takes hosts whole.
    assert nodes["slice"]["resources"] == {"TPU": accelerator.chips_per_host}
    assert nodes["head"]["max_workers"] == 0


def test_there_are_some():
    assert len(TEMPLATES) >= 2
