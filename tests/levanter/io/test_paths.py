"""Paths: braces, wildcards, remote file systems, and what is said when a file is not there."""

import socket
import sys
import types
from pathlib import Path

import fsspec
import pytest

from levanter.io import MissingFileError, UnreadableFileError, exists, expand, file_size, join, open_read
from levanter.io.paths import (
    base_name,
    cache_folder,
    expand_braces,
    filesystem,
    is_remote,
    missing_file,
    store_error,
)

pytestmark = pytest.mark.quick


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("plain.txt", ["plain.txt"]),
        ("a{1..3}b", ["a1b", "a2b", "a3b"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{3..1}", ["3", "2", "1"]),
        ("{0..10..5}", ["0", "5", "10"]),
        ("{x,y}{1..2}", ["x1", "x2", "y1", "y2"]),
        ("{a,b{1..2}c,}", ["a", "b1c", "b2c", ""]),
        ("{-1..1}", ["-1", "0", "1"]),
        ("{name}.txt", ["{name}.txt"]),
        ("part-{000..002}-of-003.gz", ["part-000-of-003.gz", "part-001-of-003.gz", "part-002-of-003.gz"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern, expected):
    assert list(expand_braces(pattern)) == expected


@pytest.mark.parametrize("pattern", ["a{1..2", "a}b{", "{1..3..0}"])
def test_broken_braces_are_refused(pattern):
    with pytest.raises(ValueError, match=r"braces do not match|step of zero"):
        list(expand_braces(pattern))


def test_wildcards_match_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "folder.jsonl").mkdir()
    assert expand(f"{tmp_path}/*.jsonl") == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert expand([f"{tmp_path}/{{c.txt,a.*}}"]) == [f"{tmp_path}/c.txt", f"{tmp_path}/a.jsonl"]


def test_a_file_that_exists_is_taken_literally(tmp_path):
    odd = tmp_path / "odd[1].txt"
    odd.write_text("x")
    assert expand(str(odd)) == [str(odd)]


def test_relative_patterns_stay_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x.txt").write_text("x")
    assert expand("sub/*.txt") == ["sub/x.txt"]
    assert expand("**/*.txt") == ["sub/x.txt"]


def test_a_misspelt_file_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "validation.jsonl").write_text("x")
    with pytest.raises(MissingFileError) as info:
        open_read(f"{tmp_path}/validatoin.jsonl")
    assert str(info.value) == f"{tmp_path}/validatoin.jsonl: no such file; did you mean validation.jsonl?"
    assert isinstance(info.value, ValueError) and isinstance(info.value, FileNotFoundError)


def test_a_file_that_may_not_be_read(monkeypatch, tmp_path):
    (tmp_path / "secret").write_text("x")

    def refuse(self, path, mode, **_):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem._open", refuse)
    with pytest.raises(UnreadableFileError, match=r"secret: cannot be opened \(Permission denied\)"):
        open_read(str(tmp_path / "secret"))


def test_all_missing_files_are_listed_together(tmp_path):
    (tmp_path / "here.txt").write_text("x")
    with pytest.raises(MissingFileError) as info:
        expand([f"{tmp_path}/here.txt", f"{tmp_path}/*.parquet", f"{tmp_path}/no/where.txt", str(tmp_path)])
    first, second, third = str(info.value).splitlines()
    assert first == f"{tmp_path}/*.parquet: matches no file; {tmp_path} holds here.txt"
    assert second == f"{tmp_path}/no/where.txt: no such file, and no folder {tmp_path}/no"
    assert third == f"{tmp_path}: is a folder; expected a file (for all files in it: {tmp_path}/*)"


def test_remote_files(memory):
    memory.pipe({"/bucket/a-1.txt": b"one", "/bucket/a-2.txt": b"three"})
    assert expand("memory://bucket/a-{1..2}.txt") == ["memory://bucket/a-1.txt", "memory://bucket/a-2.txt"]
    found = expand("memory://bucket/*.txt")
    assert [base_name(path) for path in found] == ["a-1.txt", "a-2.txt"] and all(map(is_remote, found))
    assert [file_size(path) for path in found] == [3, 5]
    assert open_read(found[1]).read() == b"three"
    assert exists("memory://bucket/a-1.txt") and not exists("memory://bucket/a-3.txt")
    with pytest.raises(MissingFileError, match=r"a-3\.txt: no such file; did you mean a-2\.txt or a-1\.txt"):
        expand("memory://bucket/a-3.txt")


def test_unknown_schemes_say_so():
    with pytest.raises(ValueError, match="nosuch://x/y"):
        filesystem("nosuch://x/y")


def test_a_missing_package_is_named(monkeypatch):
    def refuse(path):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(ValueError, match=r"s3://b/x: s3:// needs one more package: pip install s3fs"):
        open_read("s3://b/x")


class ClientError(Exception):
    """Stands for the errors of the stores' client libraries, which are neither `OSError` nor `ValueError`."""


class Unauthorized(fsspec.AbstractFileSystem):
    """A store that refuses everything."""

    protocol = "refusing"

    def info(self, path, **kwargs):
        raise ClientError("Unable to locate credentials")

    ls = exists = isdir = _open = info


def test_errors_of_a_client_library_name_the_path(monkeypatch):
    """A run ended with a traceback where s3fs had no credentials."""
    library = types.ModuleType("botocore.exceptions")
    library.BotoCoreError = library.ClientError = ClientError
    monkeypatch.setitem(sys.modules, "botocore.exceptions", library)
    fsspec.register_implementation("refusing", Unauthorized, clobber=True)
    path = "refusing://bucket/a.txt"
    for call in (exists, file_size, open_read, expand, missing_file):
        with pytest.raises(
            UnreadableFileError, match=r"bucket/a\.txt: the store cannot be read \(Unable.*\n  → log in"
        ):
            call(path)
    assert store_error(path, RuntimeError("credentials")) is None


def test_a_store_without_a_connection_is_refused_at_once(monkeypatch):
    """Google's library tries again for a minute, at each call."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    fs = types.SimpleNamespace(base=f"http://127.0.0.1:{port}/storage/v1/")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda path: (fs, "b/x"))
    with pytest.raises(UnreadableFileError, match=rf"gs://b/x: there is no connection to 127.0.0.1:{port}"):
        exists("gs://b/x")
    # A proxy may know a name that this machine does not.
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert filesystem("gs://b/x") == (fs, "b/x")


def test_join():
    assert join("gs://bucket/a/", "b", "c.txt") == "gs://bucket/a/b/c.txt"
    assert join("folder", "b", "c.txt") == "folder/b/c.txt"
    assert join("folder", "/absolute") == "/absolute"
    assert join("folder", "gs://bucket/x") == "gs://bucket/x"


def test_file_urls_are_local(tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    assert not is_remote(f"file://{tmp_path}/x.txt")
    assert open_read(f"file://{tmp_path}/x.txt").read() == b"hello"


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("LEVANTER_CACHE", "/here")
    assert cache_folder() == Path("/here")
    monkeypatch.delenv("LEVANTER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/levanter")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/levanter")
