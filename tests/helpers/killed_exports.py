"""Exports that are killed before each of their operations on files; run by `test_export_killed.py`.

    python killed_exports.py FOLDER fresh|replace

Every attempt is a forked process that kills itself (SIGKILL) before its n-th operation below the folder: opening a file
for writing, making, renaming or deleting one, folders too. Prints, as JSON, what was there after each, and after the
attempt that followed it: files by name with their digests, where something has the name of the export.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

SECONDS = 120


def watch(folder: Path, kill_at: int) -> None:
    """Has this process killed before its n-th operation below a folder (0: never)."""
    main, seen = threading.get_ident(), [0]

    def hook(event: str, given: tuple) -> None:
        if event == "open":
            changes = bool(isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            changes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
        if not changes or threading.get_ident() != main or not str(given[0]).startswith(str(folder)):
            return
        seen[0] += 1
        if seen[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def found(folder: Path) -> dict[str, str] | None:
    """The files of what has the export's name, by their digests; None where nothing has."""
    out = folder / "out"
    if not out.exists():
        return None
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def forked(action) -> int:
    """Runs an action in a process of its own: 0, its exit code, or minus the signal that ended it."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            code = action()
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError("an attempt came to no end")


def main() -> None:
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    from helpers.llama_on_mesh import abstract_model, random_arrays, tiny_config

    from haliax_ext.abstract import leaves
    from levanter.compat.hf.export import ExportExtras, ExportPathError, plan_export, write_export

    config = tiny_config()
    model = abstract_model(config)
    plan = plan_export(tuple(leaves(model)), config, model.Vocab, max_bytes=60_000)
    old, new = (random_arrays(config, seed=seed) for seed in (0, 1))

    def export(arrays, where: Path, *, kill_at: int = 0, overwrite: bool) -> int:
        watch(where, kill_at)
        try:
            write_export(plan, arrays, where / "out", extras=ExportExtras(eos_ids=(2,)), overwrite=overwrite)
        except ExportPathError:
            return 2
        return 0

    whole = {}
    for name, arrays in (("old", old), ("new", new)):
        (folder / name).mkdir()
        assert forked(lambda arrays=arrays, name=name: export(arrays, folder / name, overwrite=False)) == 0
        whole[name] = found(folder / name)
    overwrite = kind == "replace"
    attempts, kill_at, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        kill_at += 1
        where = folder / str(kill_at)
        where.mkdir()
        if overwrite:
            shutil.copytree(folder / "old" / "out", where / "out")
        code = forked(lambda where=where, n=kill_at: export(new, where, kill_at=n, overwrite=overwrite))
        before = found(where)
        again = forked(lambda where=where: export(new, where, overwrite=overwrite))
        attempts.append(
            {
                "code": code,
                "found": before,
                "again": again,
                "then": found(where),
                "beside": sorted(path.name for path in where.iterdir()),
            }
        )
    sys.stdout.write(json.dumps({"whole": whole, "attempts": attempts}) + "\n")


if __name__ == "__main__":
    main()
