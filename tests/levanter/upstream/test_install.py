"""Upstream's distributions in the same folder as this package: said at import, and only then."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "levanter"

pytestmark = pytest.mark.quick


def imported(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`import levanter` from a folder of packages, by Python alone, without this environment's packages."""
    (site / "levanter" / "upstream").mkdir(parents=True)
    for name in ("__init__.py", "upstream/__init__.py", "upstream/install.py", "upstream/draccus_help.py"):
        (site / "levanter" / name).write_bytes((SOURCE / name).read_bytes())
    command = [
        sys.executable,
        "-I",
        "-S",
        *options,
        "-c",
        f"import sys; sys.path.insert(0, {str(site)!r}); import levanter",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("upstream", ["levanter-1.2.dist-info", "marin_levanter-0.2.227.dist-info"])
def test_upstream_in_the_same_folder_is_named_with_the_fix(upstream, tmp_path):
    (tmp_path / upstream).mkdir()
    name = upstream.partition("-")[0].replace("_", "-")
    result = imported(tmp_path)
    assert result.returncode == 0
    assert f"RuntimeWarning: {name} and levanter-fork are installed in the same environment" in result.stderr
    assert f"pip uninstall {name} levanter-fork" in result.stderr


def test_other_packages_are_no_clash(tmp_path):
    for name in (
        "levanter_fork-2.0.dist-info",
        "levanter_books-1.0.dist-info",
        "marin_haliax-0.2.dist-info",
        "levanter.txt",
    ):
        (tmp_path / name).mkdir()
    result = imported(tmp_path, "-W", "error")
    assert (result.returncode, result.stderr) == (0, "")
