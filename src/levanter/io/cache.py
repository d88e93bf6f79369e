"""Where things are kept between runs that can be had again: downloads, answers of a compiler."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The cache of this user: `$LEVANTER_CACHE`, else `levanter` in the system's cache folder."""
    if override := os.environ.get("LEVANTER_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "levanter"
