"""Exports behind a URL: whole or not there, whenever they are ended."""

import numpy as np
import pytest
from helpers.llama_on_mesh import abstract_model, random_arrays, tiny_config
from safetensors.numpy import load

from haliax_ext.abstract import with_arrays
from levanter.compat.hf.export import ExportPathError, export
from levanter.compat.hf.export_dir import MARK, RemoteExportDir, exports_in, is_complete
from levanter.compat.open import open_checkpoint
from levanter.io.paths import filesystem


@pytest.fixture
def url(tmp_path):
    return f"memory://{tmp_path.name}/exports/step-8"


def names(url: str) -> set[str]:
    fs, root = filesystem(url)
    return {path.rpartition("/")[2] for path in fs.find(root)}


def the_model(seed: int):
    config = tiny_config()
    return with_arrays(abstract_model(config), random_arrays(config, seed=seed)), config


def test_it_reads_like_one_on_a_disk(url, tmp_path):
    model, config = the_model(0)
    assert export(model, config, url, max_shard_bytes=60_000) == url
    export(model, config, tmp_path / "out", max_shard_bytes=60_000)
    read = open_checkpoint(url)
    local = open_checkpoint(str(tmp_path / "out"))
    assert read.config == local.config and read.source.tensors.keys() == local.source.tensors.keys()
    for name, info in read.source.tensors.items():
        whole = tuple(slice(0, size) for size in info.shape)
        np.testing.assert_array_equal(read.source.read(name, whole), local.source.read(name, whole))
    assert is_complete(url) and exports_in(url.rpartition("/")[0]) == ["step-8"]
    with pytest.raises(ExportPathError, match="it exists already"):
        export(model, config, url)


@pytest.mark.parametrize("file", ["model-00002-of-", "model.safetensors.index.json", "config.json"])
def test_an_end_at_any_file_leaves_nothing_that_counts(url, monkeypatch, file):
    model, config = the_model(0)
    export(model, config, url, max_shard_bytes=60_000)
    opened = RemoteExportDir.open

    def ends(self, name):
        if name.startswith(file):
            raise OSError("the connection is gone")
        return opened(self, name)

    monkeypatch.setattr(RemoteExportDir, "open", ends)
    other, _ = the_model(1)
    with pytest.raises(OSError, match="the connection is gone"):
        export(other, config, url, max_shard_bytes=60_000, overwrite=True)
    assert MARK in names(url) and "config.json" not in names(url)
    assert not is_complete(url) and exports_in(url.rpartition("/")[0]) == []
    monkeypatch.undo()
    # The remains are replaced, without being asked.
    export(other, config, url)
    assert names(url) == {"config.json", "model.safetensors"} and is_complete(url)
    fs, root = filesystem(url)
    found = load(fs.cat_file(f"{root}/model.safetensors"))
    np.testing.assert_array_equal(
        found["lm_head.weight"], random_arrays(config, seed=1)["lm_head.weight"].astype(np.float32)
    )


def test_a_folder_of_something_else_is_not_replaced(url):
    fs, root = filesystem(url)
    fs.pipe_file(f"{root}/notes.txt", b"mine")
    model, config = the_model(0)
    with pytest.raises(ExportPathError, match="it exists already"):
        export(model, config, url)
    assert names(url) == {"notes.txt"} and not is_complete(url)
    assert exports_in(url.rpartition("/")[0]) == ["step-8"]
