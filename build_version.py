"""The version that a build stamps into what it builds: the release, and the commit that it was built from.

hatchling calls `stamp()` (`[tool.hatch.version]` in pyproject.toml). A checkout gives `2.0.0.dev0+g9230e78`, with
`.dirty` where files differ from that commit; a source distribution keeps the version that it was made with; sources
without either are the release.
"""

import re
import subprocess
from pathlib import Path

RELEASE = "2.0.0.dev0"


def stamp(root: Path = Path(__file__).parent) -> str:
    """The version of the sources in `root`, as PEP 440 has it."""
    made = root / "PKG-INFO"
    if made.exists():
        found = re.search(r"^Version: (\S+)$", made.read_text(encoding="utf-8"), re.MULTILINE)
        return found[1] if found else RELEASE
    if not (root / ".git").exists():
        return RELEASE
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty=.dirty", "--exclude=*", "--abbrev=9"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return RELEASE
    return f"{RELEASE}+g{commit}"
