"""The version of this installation of levanter, as recorded in its metadata when it was built."""

import importlib.metadata
import json

DISTRIBUTION = "levanter-fork"
"""The name that pip knows; the package is called `levanter`, as upstream's distributions of other names are."""

UNKNOWN = "unknown"
"""The version of sources that are on the path but not installed."""


def version() -> str:
    """`2.0.0.dev0+g9230e7812` as built; the release alone where sources are used in place.

    The metadata of an editable installation names the commit at which it was installed, which may be older than its
    sources; so the commit is omitted.
    """
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
    # `direct_url.json` (PEP 610) is there for installations from a folder or a repository, not from an index.
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    in_place = origin.get("dir_info", {}).get("editable", False)
    return distribution.version.partition("+")[0] if in_place else distribution.version
