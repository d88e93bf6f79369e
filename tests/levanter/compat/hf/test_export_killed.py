"""Exports that are killed before each of their operations on files: whole or not there, and the next one is whole."""

import json
import os
import subprocess
import sys

import pytest
from helpers import killed_exports


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["fresh", "replace"])
def test_whatever_has_the_name_of_an_export_is_one(kind, tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, killed_exports.__file__, str(tmp_path), kind], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    old, new, attempts = told["whole"]["old"], told["whole"]["new"], told["attempts"]
    assert old.keys() == new.keys() and old != new and len(new) > 5
    assert len(attempts) > 3 * len(new), "each file is opened, and renamed, and there is more"
    killed = attempts[:-1]
    assert {each["code"] for each in killed} == {-9} and attempts[-1]["code"] == 0
    # Before its rename, nothing; or, where one is replaced, the old one, and for a moment nothing.
    possible = [None, new] if kind == "fresh" else [old, None, new]
    order = [possible.index(each["found"]) for each in attempts]
    assert order == sorted(order) and order[0] == 0 and order[-1] == len(possible) - 1
    for each in attempts:
        # A lease that was being taken may leave its empty folder; no part of an export is left.
        assert each["then"] == new and set(each["beside"]) - {".out.lease"} == {"out"}, each["beside"]
        # What is whole is not replaced without being asked.
        assert each["again"] == (2 if kind == "fresh" and each["found"] == new else 0)
