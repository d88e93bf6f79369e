"""Which levanter this is: the version that a build stamped into its metadata."""

import importlib.metadata
import json

UNKNOWN = "unknown"
"""The version of sources that are on the path but not installed."""


def version() -> str:
    """`2.0.0.dev0+g9230e7812` as built; the release alone where sources are used in place.

    An editable installation was stamped when it was made, and its sources have gone on since: its commit would be
    somebody else's.
    """
    try:
        distribution = importlib.metadata.distribution("levanter")
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    in_place = origin.get("dir_info", {}).get("editable", False)
    return distribution.version.partition("+")[0] if in_place else distribution.version
