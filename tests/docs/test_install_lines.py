"""Every `pip install` of this project, in documents and in messages, is one that works.

Documents speak to a reader with a clone (`pip install -e '.[serve]'`); messages of a program to somebody who has
installed this project already, in whatever way (`pip install 'levanter-fork[serve]'`): pip then adds what the extra
needs and asks no index for this project itself.
"""

import json
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from helpers.documents import ROOT

from levanter.io.package_version import DISTRIBUTION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IN_A_CLONE, INSTALLED = (
    re.compile(r"""-e ['"]?\.(?:\[([\w,-]+)\])?['"]?"""),
    re.compile(r"""['"]levanter-fork\[([\w,-]+)\]['"]"""),
)
LINE = re.compile(r"""pip install (?:-q )?(-e (?:'[^'\s]*'|\.)|["']levanter[^'"]*["']|levanter\S*)""")
FROM_A_REPOSITORY = re.compile(r"""'levanter-fork(?:\[[\w,-]+\])? @ git\+\S+'""")


def lines(*patterns: str) -> dict[str, set[str]]:
    """What follows `pip install` in files of the repository, where it installs this project → the files."""
    places: dict[str, set[str]] = {}
    files = [path for pattern in patterns for path in ROOT.glob(pattern) if "docs/log/" not in str(path)]
    assert files
    for path in files:
        for requirement in LINE.findall(path.read_text(encoding="utf-8")):
            places.setdefault(requirement, set()).add(str(path.relative_to(ROOT)))
    return places


IN_DOCUMENTS = lines("*.md", "docs/**/*.md", "examples/*", "config/**/*.yaml", "Makefile", "src/levanter/infra/*.yaml")
IN_MESSAGES = lines("src/**/*.py")


def extras(requirement: str, form: re.Pattern[str]) -> set[str]:
    match = form.fullmatch(requirement)
    assert match, requirement
    return set((match[1] or "").split(",")) - {""}


@pytest.mark.quick
def test_the_distribution_is_called_what_the_code_says():
    assert PROJECT["name"] == DISTRIBUTION == "levanter-fork"


@pytest.mark.quick
def test_lines_name_extras_that_exist():
    assert len(IN_DOCUMENTS) > 8 and len(IN_MESSAGES) > 5
    for requirement, files in {**IN_DOCUMENTS, **IN_MESSAGES}.items():
        if FROM_A_REPOSITORY.fullmatch(requirement):
            continue
        form = IN_A_CLONE if requirement.startswith("-e") else INSTALLED
        unknown = extras(requirement, form) - PROJECT["optional-dependencies"].keys()
        assert not unknown, (requirement, files)
    assert not [requirement for requirement in IN_MESSAGES if requirement.startswith("-e")]


@pytest.mark.quick
def test_the_quickstart_lists_every_extra():
    text = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]
    rows = " ".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| "))
    assert set(re.findall(r"`([\w-]+)`", rows)) == PROJECT["optional-dependencies"].keys() - {"test-core"}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pip in a fresh environment in which this project is installed, without what it depends on."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    pip = folder / "bin" / "pip"
    done = pip_run(pip, "install", "-q", "--no-deps", str(ROOT))
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr[-300:]}")
    return pip


def pip_run(pip: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([pip, *words], capture_output=True, text=True, cwd=ROOT, check=False)


def installs(pip: Path, tmp_path: Path, *requirement: str) -> set[str]:
    """The distributions that pip would install."""
    report = tmp_path / "report.json"
    done = pip_run(pip, "install", "--dry-run", "-q", "--report", str(report), *requirement)
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_clone_installs_with_every_extra_that_documents_name(fresh, tmp_path):
    """As one requirement: resolving it once says that all of them agree, which one by one would not say."""
    wanted = set().union(*(extras(line, IN_A_CLONE) for line in IN_DOCUMENTS if line.startswith("-e")))
    # torch's exact version is a matter of the tests, and of 2 GB.
    names = installs(fresh, tmp_path, "-e", f".[{','.join(sorted(wanted - {'gpu'}))}]")
    assert {"levanter-fork", "jax", "libtpu", "starlette", "lm_eval"} <= names, names


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_messages_advise_adds_packages_to_an_installation(fresh, tmp_path):
    """The project itself is there already, and no index is asked for it."""
    wanted = set().union(*(extras(line, INSTALLED) for line in IN_MESSAGES))
    names = installs(fresh, tmp_path, f"levanter-fork[{','.join(sorted(wanted))}]")
    assert "levanter-fork" not in names and {"starlette", "libtpu", "llguidance"} <= names, names
    assert sys.version_info >= (3, 12) or "jax-cuda13-plugin" in names


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_name_is_free_on_the_index(fresh):
    """Until this project publishes there, nobody else's package answers to its name."""
    done = pip_run(fresh, "index", "versions", "--pre", DISTRIBUTION)
    assert done.returncode != 0 and "No matching distribution" in done.stderr
