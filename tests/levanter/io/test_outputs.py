"""Outputs are tried before a run begins: folders made, special files told from folders, everything wrong at once."""

import os
import socket
from pathlib import Path

import fsspec
import pytest

from levanter.io import Output, OutputError, probe

pytestmark = pytest.mark.quick


def refused(*outputs: Output) -> str:
    with pytest.raises(OutputError) as caught:
        probe(outputs)
    return str(caught.value)


def test_folders_are_made_and_nothing_is_left_in_them(tmp_path: Path):
    probe(
        [
            Output(key="output_path", path=str(tmp_path / "a/b/result.json"), kind="file"),
            Output(key="log_dir", path=str(tmp_path / "logs/run"), kind="folder"),
            Output(key="output_dir", path=str(tmp_path / "exports/new"), kind="new folder"),
        ]
    )
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "a", "a/b", "exports", "logs", "logs/run",
    ]  # fmt: skip


def test_everything_that_is_wrong_is_said_with_its_key(tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    said = refused(
        Output(key="output_path", path=str(tmp_path / "file/below/result.json"), kind="file"),
        Output(key="trainer.log_dir", path=str(tmp_path / "file"), kind="folder"),
        Output(key="hf_save_path", path=str(tmp_path / "pipe"), kind="folder"),
        Output(key="path", path=str(tmp_path), kind="file"),
        Output(key="output_dir", path=str(tmp_path / "circle"), kind="new folder"),
        Output(key="plot_path", path=str(tmp_path / ("x" * 300) / "a.png"), kind="file"),
    )
    lines = {line.split(":")[0]: line for line in said.splitlines() if not line.startswith("  →")}
    assert "Not a directory" in lines["output_path"] and f"{tmp_path}/file is a file, not a folder" in said
    assert "is a file, but a folder will be written" in lines["trainer.log_dir"]
    assert "is a pipe, but a folder will be written" in lines["hf_save_path"]
    assert "Is a directory" in lines["path"]
    assert "symbolic links" in lines["output_dir"]
    assert "name too long" in lines["plot_path"] and "has 300 bytes" in said
    assert "[Errno" not in said
    assert (tmp_path / "file").read_text() == "precious"


def test_pipes_are_not_opened(tmp_path: Path):
    """Whoever reads one would see it end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    probe([Output(key="output_path", path=str(path), kind="file")])
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, b"still there")
    assert os.read(reader, 100) == b"still there"
    os.close(writer)
    os.close(reader)


def test_sockets_are_refused(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("here")
        assert "is a socket, which cannot be written to" in refused(Output(key="a", path="here", kind="file"))


def test_more_than_there_is_room_for(tmp_path: Path):
    said = refused(Output(key="output_dir", path=str(tmp_path / "new"), kind="new folder", nbytes=1 << 60))
    assert "1048576.00 TiB will be written" in said and "are free on the disk of" in said and "free space" in said


def test_stores_that_refuse():
    class Refusing(fsspec.get_filesystem_class("memory")):
        protocol = "refusing"

        def pipe_file(self, path, value, **_):
            raise RuntimeError("403: this account may not")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    said = refused(Output(key="hf_save_path", path="refusing://bucket/x", kind="folder"))
    assert said == "hf_save_path: refusing://bucket/x: cannot be written (RuntimeError: 403: this account may not)"
