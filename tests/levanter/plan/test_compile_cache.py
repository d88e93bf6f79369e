"""Answers of a compiler, kept: found again as they were, never those of another compiler, never a damaged one."""

import dataclasses
import os
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haliax_ext.compiler_options import CompilerOptionError
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.program import Input, Program
from levanter.hardware import parse_accelerator
from levanter.plan import compile_worker
from levanter.plan.compile_cache import CachedOutcome, CompileCache
from levanter.plan.compilers import compiler_identity
from levanter.plan.fingerprint import lowered_digest

KEY = {"lowered": "abc", "compiler": {"libtpu": "1.2"}, "options": [{}]}
COMPILER = {"libtpu": "1.2"}
ANSWER = CachedOutcome(
    report={"memory": {"temp": 12}, "compile_seconds": 3.5}, text="HloModule x\n" * 1000, compiled_at=1e9
)


@pytest.fixture
def kept(tmp_path):
    return CompileCache(folder=tmp_path / "plans")


def files(kept: CompileCache, kind: str):
    return sorted(kept.folder.glob(f"*.{kind}"))


def test_what_is_kept_is_found(kept):
    assert kept.find(KEY) is None and kept.follow("way", COMPILER) is None
    kept.keep(KEY, ANSWER, way="way")
    assert kept.find(KEY) == ANSWER and kept.follow("way", COMPILER) == ANSWER
    assert kept.find({**KEY, "lowered": "abd"}) is None
    # Texts are kept small.
    assert files(kept, "answer")[0].stat().st_size < len(ANSWER.text or "") / 10


def test_the_answer_of_another_compiler_is_not_taken(kept):
    kept.keep(KEY, ANSWER, way="way")
    assert kept.find({**KEY, "compiler": {"libtpu": "1.3"}}) is None
    assert kept.follow("way", {"libtpu": "1.3"}) is None
    # Nor where an entry lies under the name of another's.
    other = {**KEY, "compiler": {"libtpu": "1.3"}}
    os.rename(files(kept, "answer")[0], kept._path("answer", other))
    assert kept.find(other) is None


@pytest.mark.parametrize(("report", "counts"), [({}, False), ({"heap_bytes": None}, True), ({"heap_bytes": 20}, True)])
def test_the_answer_for_a_tpu_says_its_heap(kept, report, counts):
    """Answers of earlier versions do not; GPUs, which have no coordinates, need none."""
    answer = dataclasses.replace(ANSWER, report={**ANSWER.report, "coordinates": [[0, 0, 0]], **report})
    kept.keep(KEY, answer)
    assert kept.find(KEY) == (answer if counts else None)
    gpu = dataclasses.replace(answer, report={**answer.report, "coordinates": None})
    kept.keep(KEY, gpu)
    assert kept.find(KEY) == gpu


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "folder"])
def test_a_damaged_entry_is_told_and_written_anew(kept, caplog, damage):
    kept.keep(KEY, ANSWER, way="way")
    (path,) = files(kept, "answer")
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"cut": data[:-9], "flipped": flipped, "empty": b"", "other": b"something else"}[damage])
    assert kept.find(KEY) is None and kept.follow("way", COMPILER) is None
    assert "compiled again" in caplog.text and path.name in caplog.text
    if damage != "folder":
        kept.keep(KEY, ANSWER)
        assert kept.find(KEY) == ANSWER


def test_a_folder_that_cannot_be_written_keeps_nothing_and_says_so(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    kept = CompileCache(folder=tmp_path / "file" / "plans")
    kept.keep(KEY, ANSWER)
    assert kept.find(KEY) is None
    assert "is not cached" in caplog.text


def test_what_was_not_asked_for_the_longest_goes_first(kept):
    noise = np.random.default_rng(0)
    keys = [{**KEY, "lowered": str(n)} for n in range(6)]
    for n, key in enumerate(keys):
        kept.keep(key, dataclasses.replace(ANSWER, text=noise.bytes(6000).hex()))
        os.utime(kept._path("answer", key), (1000 + n, 1000 + n))
    size = files(kept, "answer")[0].stat().st_size
    # The oldest but for one was asked for since.
    assert kept.find(keys[0]) is not None
    (kept.folder / "note.txt").write_text("not ours")
    left = kept.folder / ".x.answer.1-2.tmp"
    left.write_text("half")
    os.utime(left, (1000, 1000))
    small = dataclasses.replace(kept, max_bytes=3 * size + size // 2)
    small.keep(keys[5], ANSWER)
    assert [small.find(key) is not None for key in keys] == [True, False, False, True, True, True]
    assert (kept.folder / "note.txt").exists() and not left.exists()


WRITES_MANY = """
import sys
from pathlib import Path
from levanter.plan.compile_cache import CachedOutcome, CompileCache
kept = CompileCache(folder=Path(sys.argv[1]), max_bytes=20_000)
for n in range(200):
    key = {"lowered": str(n % 5), "compiler": {}}
    found = kept.find(key)
    assert found is None or found.report == {"n": n % 5}
    kept.keep(key, CachedOutcome(report={"n": n % 5}, text="HloModule " * 999, compiled_at=1e9), way=f"way {n % 5}")
"""


def test_two_plans_at_once(tmp_path):
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", WRITES_MANY, str(tmp_path / "plans")]
    started = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=200)[1] for process in started]
    assert [(process.returncode, text) for process, text in zip(started, said, strict=True)] == [(0, "")] * 2
    assert not list((tmp_path / "plans").glob("*.tmp"))


class Described:
    """A run of one small Program."""

    mesh = MeshSpec.of(data=8)

    def __init__(self, scale: float = 2.0, rows: int = 64, name: str = "small", options: dict | None = None):
        def scaled(x):
            with jax.named_scope("scaling"):
                return x * jnp.float32(scale)

        value = jax.ShapeDtypeStruct((rows, 16), np.dtype(np.float32))
        lies = AxisMapping({"_0": "data"})
        self.programs = (
            Program(
                name=name,
                function=scaled,
                inputs=(Input(name="x", value=value, placement=lies),),
                mappings=Mappings(),
                out_placement=lies,
                compiler_options=options or {},
            ),
        )


def shop(kept, tmp_path, devices, *, target="v4-16", **options):
    return compile_worker.CompilerSession(
        devices=devices, accelerator=parse_accelerator(target), options=options, folder=tmp_path, kept=kept
    )


@pytest.fixture
def compilations(monkeypatch):
    """How many Programs were compiled."""
    compiled, real = [], jax.stages.Lowered.compile

    def counted(self, *args, **options):
        compiled.append(self)
        return real(self, *args, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    return compiled


def test_the_worker_compiles_once_and_says_the_same_again(kept, tmp_path, devices, compilations):
    described, began = Described(), time.time()
    first = shop(kept, tmp_path, devices).outcome(described.programs[0], described)
    text = (tmp_path / "small.hlo.txt").read_text()
    (tmp_path / "small.hlo.txt").unlink()
    again = shop(kept, tmp_path, devices).outcome(Described().programs[0], described)
    assert len(compilations) == 1
    since = again.pop("kept_since")
    assert again == first and "kept_since" not in first and began <= since <= time.time()
    assert (tmp_path / "small.hlo.txt").read_text() == text and "HloModule" in text
    # Without a folder nothing is found, and nothing kept.
    shop(None, tmp_path, devices).outcome(described.programs[0], described)
    assert len(compilations) == 2


def test_an_option_that_the_compiler_does_not_know_is_bad_input_and_not_kept(kept, tmp_path, devices):
    described = Described(options={"xla_no_such_option": "1"})
    with pytest.raises(CompilerOptionError, match=r"program small: .*No such compile option: 'xla_no_such_option'"):
        shop(kept, tmp_path, devices).outcome(described.programs[0], described)
    with pytest.raises(CompilerOptionError, match="No such compile option: 'xla_other'"):
        shop(kept, tmp_path, devices, xla_other="1").outcome(Described().programs[0], Described())
    assert not files(kept, "answer")


def test_whatever_changes_the_answer_is_compiled(kept, tmp_path, devices, compilations, monkeypatch):
    def ask(described=None, devices=devices, target="v4-16", **options):
        described = described or Described()
        before = len(compilations)
        shop(kept, tmp_path, devices, target=target, **options).outcome(described.programs[0], described)
        return len(compilations) - before

    assert ask() == 1 and ask() == 0
    assert ask(Described(scale=3.0)) == 1
    assert ask(Described(rows=128)) == 1
    assert ask(Described(name="other")) == 1
    assert ask(Described(options={"xla_cpu_enable_fast_math": "True"})) == 1
    assert ask(xla_cpu_enable_fast_min_max="True") == 1
    assert ask(target="v6e-8") == 1
    # What is said to this machine's own processors changes no pod's answer; what any compiler may hear does.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=false")
    assert ask() == 0
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_allow_excess_precision=false")
    assert ask() == 1
    monkeypatch.undo()
    real = compiler_identity(parse_accelerator("v4-16"))
    monkeypatch.setattr(compile_worker, "compiler_identity", lambda pod: {**real, "libtpu": "9.9"})
    monkeypatch.setattr(jax.stages.Lowered, "compile", counting(compilations, jax.stages.Lowered.compile))
    assert ask() == 1 and ask() == 0


def counting(compiled, real):
    def counted(self, *args, **options):
        compiled.append(self)
        return real(self, *args, **options)

    return counted


def test_locations_in_files_do_not_count_and_names_do():
    text = """#loc1 = loc("x")
module @jit_f {
  func.func public @main(%arg0: tensor<4xf32> loc("x")) -> tensor<4xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32> loc(#loc5)
    return %0 : tensor<4xf32> loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc = loc(unknown)
#loc2 = loc("/home/a/f.py":12:3 to :9)
#loc5 = loc("jit(f)/mlp/add"(#loc2))
"""
    same = text.replace('"/home/a/f.py":12:3', '"/home/b/g.py":99:1').replace("#loc5", "#loc7")
    assert lowered_digest(same) == lowered_digest(text)
    assert lowered_digest(text.replace("/mlp/", "/head/")) != lowered_digest(text)
    assert lowered_digest(text.replace("add %arg0", "subtract %arg0")) != lowered_digest(text)


KERNEL = """
import jax
from jax.experimental import pallas as pl

def double(into, out):
    out[...] = into[...] * FACTOR

def call(x):
    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="double")(x)
"""


def test_a_kernel_has_no_places_in_what_is_kept(tmp_path):
    """It lies in the lowered text as bytes: other folders and lines are the same kernel, another product is not."""

    def digest(folder: str, before: str, factor: str) -> str:
        path = tmp_path / folder / "kernel.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(before + KERNEL.replace("FACTOR", factor))
        names: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), names)
        traced = jax.jit(names["call"]).trace(jax.ShapeDtypeStruct((8, 128), "float32"))
        lowered = traced.lower(lowering_platforms=("tpu",))
        assert "tpu_custom_call" in lowered.as_text()
        return lowered_digest(lowered.as_text(debug_info=True))

    assert digest("a", "", "2") != digest("b", "# A line.\n", "2")
    with compile_worker.without_source_locations():
        assert digest("a", "", "2") == digest("b", "# A line.\n", "2") != digest("a", "", "3")
    assert digest("a", "", "2") != digest("b", "# A line.\n", "2")
