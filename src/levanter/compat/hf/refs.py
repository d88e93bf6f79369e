"""`RepoRef`: a reference to a checkpoint as one string, for every kind of source.

| spelling | what it names |
|---|---|
| `org/name`, `org/name@revision` | a repository on the Hugging Face Hub, through its local cache |
| `org/name@revision/file.gguf` | one file of such a repository |
| `./folder`, `/data/model`, `model.gguf`, `file:///data/model` | a local folder or file |
| `gs://…`, `s3://…`, `https://…`, `hf://org/name` | a remote folder, read by ranges and never stored |
| `pypi:package==version/file.gguf` | a file inside a Python package |
| `a \\| b` | the first of several that can be reached |

A string that exists on disk as written is local, whatever it looks like.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from levanter.compat.hf.errors import CheckpointError

Kind = Literal["hub", "local", "remote", "pypi"]

# Starts and ends with a letter or digit: excludes `.`, `..`
# and option-like names, which pip or the Hub would misread.
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB = re.compile(rf"^(?P<id>(?:{_NAME}/)?{_NAME})(?:@(?P<revision>[^/@\s]+))?(?:/(?P<file>[^@\s]+\.gguf))?$")
_PYPI = re.compile(rf"^pypi:(?P<id>{_NAME})==(?P<revision>[A-Za-z0-9.!+_-]+)/(?P<file>[^\s]+)$")


@dataclass(frozen=True, kw_only=True)
class RepoRef:
    """The location of a checkpoint.

    Attributes:
        kind: the kind of source.
        location: Hub id, path, URL or package name.
        revision: branch, tag or commit on the Hub; version of a package.
        file: a file of a Hub repository or package.
    """

    kind: Kind
    location: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: "str | RepoRef") -> "RepoRef":
        """Reads one reference.

        Raises:
            CheckpointError: the string has none of the forms above.
        """
        if isinstance(text, RepoRef):
            return text
        text = text.strip()
        if not text:
            raise CheckpointError("checkpoint reference", "it is empty")
        if text.startswith("file://"):
            if not (location := text.removeprefix("file://")):
                raise CheckpointError(text, "it names no file or folder; a local one is file:///data/model")
            return cls(kind="local", location=location)
        if "://" in text:
            return cls(kind="remote", location=text.rstrip("/"))
        if text.startswith("pypi:"):
            if not (match := _PYPI.match(text)):
                raise CheckpointError(text, "a package reference is pypi:package==version/file")
            return cls(kind="pypi", location=match["id"], revision=match["revision"], file=match["file"])
        # Disk before Hub: `org/name` may be a local folder, and then it is not looked up on the Hub.
        expanded = os.path.expanduser(text)
        if os.path.exists(expanded) or _looks_local(text):
            return cls(kind="local", location=expanded)
        if not (match := _HUB.match(text)):
            raise CheckpointError(
                text,
                "there is no such file or folder, and it is not a Hugging Face id (org/name, org/name@revision) or URL",
            )
        return cls(kind="hub", location=match["id"], revision=match["revision"], file=match["file"])

    @classmethod
    def parse_alternatives(cls, text: "str | RepoRef") -> "tuple[RepoRef, ...]":
        """Reads `a | b | c`."""
        if isinstance(text, RepoRef):
            return (text,)
        # The separator has spaces: a bare `|` may occur in a path.
        return tuple(cls.parse(part) for part in text.split(" | "))

    @property
    def is_gguf(self) -> bool:
        """Whether it names a GGUF file."""
        return (self.file or self.location).lower().endswith(".gguf")

    def __str__(self) -> str:
        match self.kind:
            case "hub":
                revision = f"@{self.revision}" if self.revision else ""
            case "pypi":
                revision = f"=={self.revision}" if self.revision else ""
            case _:
                return self.location
        prefix = "pypi:" if self.kind == "pypi" else ""
        return f"{prefix}{self.location}{revision}" + (f"/{self.file}" if self.file else "")


def _looks_local(text: str) -> bool:
    """Whether a string that does not exist on disk can only have been meant as a path."""
    if text.startswith(("/", "./", "../", "~")) or text in (".", ".."):
        return True
    if "@" not in text and text.lower().endswith((".gguf", ".safetensors", ".bin", ".json")):
        # org/name/file.gguf is a file on the Hub unless its folder is here.
        # Such a name is a path even if nothing exists there, so that the error speaks of files and not of the Hub.
        return text.count("/") < 2 or Path(text).parent.is_dir()
    return False
