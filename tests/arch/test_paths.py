"""The paths of `paths.py` stay as short as they are: `ceilings.json` holds their numbers, which only fall."""

import threading

import pytest
from arch import measure, paths

SECONDS = "eval_lm import CPU seconds"


@pytest.fixture(scope="module")
def numbers():
    return paths.numbers()


@pytest.mark.parametrize("name", sorted(measure.ceilings()["paths"]))
def test_a_path_does_not_get_longer(name, numbers):
    value, items = numbers[name]
    assert value <= measure.ceilings()["paths"][name], items


def test_every_number_but_seconds_has_a_ceiling(numbers):
    assert numbers.keys() - {SECONDS} == measure.ceilings()["paths"].keys()


def test_a_recorder_sees_files_classes_and_new_threads():
    from haliax_ext.meshspec import MeshSpec
    from levanter.mesh.config import MeshConfig

    recorder = paths.Recorder()
    with recorder.installed():
        MeshConfig(axes={"data": 8})
        with recorder.recording():
            spec = MeshSpec.of(data=8)
            thread = threading.Thread(target=lambda: spec.ways(("data",)))
            thread.start()
            thread.join()
    assert recorder.files == ["haliax_ext.meshspec"]
    assert {"haliax_ext.meshspec.MeshSpec.of", "haliax_ext.meshspec.MeshSpec.ways"} <= recorder.functions
    assert recorder.constructed == {"haliax_ext.meshspec.MeshSpec": 1}
