"""The version a build stamps, and the one that is told."""

import importlib.metadata
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

import levanter
from levanter.io.package_version import UNKNOWN, version

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[3]


@pytest.fixture
def build_version(tmp_path):
    spec = importlib.util.spec_from_file_location("build_version", ROOT / "build_version.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", folder, *who, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_checkout_is_stamped_with_its_commit(build_version, tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "v9.9")
    commit = git(tmp_path, "rev-parse", "HEAD")[:9]
    assert build_version.stamp(tmp_path) == f"{build_version.RELEASE}+g{commit}"
    (tmp_path / "a").write_text("2")
    assert build_version.stamp(tmp_path) == f"{build_version.RELEASE}+g{commit}.dirty"


def test_a_source_distribution_keeps_its_stamp_even_inside_another_checkout(build_version, tmp_path):
    git(tmp_path, "init", "-q")
    inner = tmp_path / "levanter-2.0.0"
    inner.mkdir()
    assert build_version.stamp(inner) == build_version.RELEASE
    (inner / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: levanter\nVersion: 2.0.0+gabc\n\nVersion: no\n")
    assert build_version.stamp(inner) == "2.0.0+gabc"


class Installed:
    """A distribution as `importlib.metadata` has it."""

    version = "2.0.0.dev0+g123456789"

    def __init__(self, origin: dict | None):
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.mark.parametrize(
    ("origin", "told"),
    [
        (None, "2.0.0.dev0+g123456789"),
        ({"url": "file:///a.whl", "archive_info": {}}, "2.0.0.dev0+g123456789"),
        ({"url": "file:///a", "dir_info": {"editable": True}}, "2.0.0.dev0"),
    ],
)
def test_sources_in_place_name_no_commit(origin, told, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(origin))
    assert version() == levanter.__version__ == told


def test_sources_that_are_not_installed(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert version() == UNKNOWN
