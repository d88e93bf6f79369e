import subprocess
import tarfile

import pytest

from levanter.infra.errors import UsageError
from levanter.infra.launch import pack

pytestmark = pytest.mark.quick


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "src").mkdir(parents=True)
    (root / "pyproject.toml").write_text("x")
    (root / "src" / "tool.sh").write_text("#!/bin/sh\n")
    (root / "src" / "tool.sh").chmod(0o755)
    subprocess.run(["git", "-C", str(root), "init", "-q"], check=True)
    subprocess.run(["git", "-C", str(root), "add", "pyproject.toml"], check=True)
    return root


def test_new_files_go_along_and_secrets_do_not(tree, tmp_path):
    for name in (".env", ".levanter.yaml", "my-credentials.json", "src/deploy.pem", "prod.env"):
        (tree / name).write_text("secret")
    assert pack(tree, tmp_path / "a.tar.gz") == 2
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert {entry.name: entry.mode for entry in archive} == {"pyproject.toml": 0o644, "src/tool.sh": 0o755}


def test_the_same_files_give_the_same_bytes(tree, tmp_path):
    pack(tree, tmp_path / "a")
    pack(tree, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_cannot_be_packed(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("levanter.infra.launch.LARGEST", 5)
    with pytest.raises(UsageError, match=r"Largest: src/tool\.sh"):
        pack(tree, tmp_path / "a")
    (tree / "pyproject.toml").unlink()
    with pytest.raises(UsageError, match=r"no pyproject\.toml"):
        pack(tree, tmp_path / "a")
    plain = tmp_path / "plain"
    plain.mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.raises(UsageError, match="not a git repository"):
        pack(plain, tmp_path / "a")
