"""The compile worker on this machine's CPU devices: what it reports, and every way in which it can end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from haliax_ext.hlo import MemoryFigures
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import parse_accelerator
from levanter.plan import aot, compile_pool, compilers
from levanter.plan.aot import CompileCrash, Compiled, CompilerMissing, Refused, WorkerBadInput, compile_programs
from levanter.plan.compile_worker import reported_heap
from levanter.plan.target_from_name import pod_target

PROGRAMS = Path(__file__).parents[2] / "aot" / "described_programs.py"
MESH = {"data": 4, "model": 2}


def compile_here(function: str, payload: dict | None = None, **options):
    return compile_programs(f"{PROGRAMS}:{function}", payload or {"mesh": MESH}, target="local", **options)


def test_a_program_compiled_for_the_devices_here(tmp_path):
    seen = []
    (compiled,) = compile_here("small", on_event=lambda event: seen.append(event["event"]), keep_text=tmp_path)
    assert isinstance(compiled, Compiled)
    assert seen == ["devices", "described", "compiling", "outcome", "done"]
    assert (compiled.name, compiled.mesh) == ("small", MeshSpec.of(data=4, model=2))
    # By hand: two bf16 weights over all 8 devices, 64 rows over 4.
    assert compiled.memory.argument == 2 * 3 * 1024 * 2048 * 2 // 8 + 64 // 4 * 1024 * 2
    assert compiled.memory.alias == 2 * 3 * 1024 * 2048 * 2 // 8
    assert compiled.figures is not None
    assert {over for _, over, _ in compiled.figures.collective_bytes()} == {"data", "model"}
    assert compiled.coordinates is None
    assert (tmp_path / "small.hlo.txt").read_text().startswith("HloModule")


def test_bad_input_is_handed_on():
    with pytest.raises(WorkerBadInput, match="heads 12 do not divide by model 8 on local") as caught:
        compile_here("bad_input")
    assert caught.value.kind == "ValueError"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (f"{PROGRAMS}:missing", "has no function 'missing'"),
        ("no.such.module:f", "No module named 'no'"),
        ("nowhere/file.py:f", "there is no file nowhere/file.py"),
    ],
)
def test_a_function_that_is_not_there(function, message):
    with pytest.raises(WorkerBadInput, match=message):
        compile_programs(function, {}, target="local")


def test_a_crash_shows_the_last_lines_and_the_program():
    with pytest.raises(CompileCrash) as caught:
        compile_here("aborts")
    assert caught.value.exit_code == 4
    assert caught.value.program == "doomed"
    assert "was killed by SIGABRT (program doomed)" in str(caught.value)
    assert "F0000 check failed: something inside the compiler" in caught.value.last_lines


def test_without_the_tpu_compiler_the_install_line_is_shown(monkeypatch):
    monkeypatch.setattr(compilers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompilerMissing, match=r"compiling for v4-256 .*pip install 'levanter-fork\[plan\]'"):
        compile_programs("x:y", {}, target="v4-256")


@pytest.mark.parametrize(
    ("plugin", "line"),
    [
        (None, r"needs XLA's GPU compiler, which is not installed here: pip install 'levanter-fork\[plan-gpu\]'"),
        (("jax-cuda13-plugin", "0.1"), r".*jax-cuda13-plugin is 0\.1: pip install jax-cuda13-plugin=="),
    ],
)
def test_without_the_gpu_compiler_one_line_says_how_to_get_it(plugin, line, monkeypatch):
    monkeypatch.setattr(compilers, "cuda_plugin", lambda: plugin)
    with pytest.raises(CompilerMissing, match=rf"compiling for h100x8 {line}") as caught:
        compile_programs("x:y", {}, target="h100x8")
    assert "\n" not in str(caught.value) and "--no-compile" in str(caught.value)


REPORT = """Memory Space: vmem (color=1)
Total bytes: 512 (512B)

Memory Space: default (color=0)
Total bytes: 12582912 (12.00MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
"""


def test_the_heap_is_that_of_hbm_in_the_compilers_memory_report(tmp_path):
    assert reported_heap(tmp_path) is None
    (tmp_path / "module_0001.jit_f.after_optimizations-memory-usage-report.txt").write_text(REPORT)
    assert reported_heap(tmp_path) == 12 << 20


@pytest.mark.parametrize(("heap", "on_tpu", "peak"), [(110, True, 110), (None, True, 100), (None, False, 141)])
def test_inputs_results_and_temporaries_add_up_to_the_peak(heap, on_tpu, peak):
    """The compiler's `temp` (70) is more than there ever is on a TPU, and what there is on a GPU."""
    memory = MemoryFigures(argument=60, output=20, alias=10, temp=70, generated_code=1, peak=100, heap=heap)
    compiled = Compiled(
        name="step", mesh=MeshSpec.of(data=1), memory=memory, figures=None, text_error=None,
        coordinates=((0, 0, 0, 0, 0),) if on_tpu else None, lower_seconds=0.0, compile_seconds=0.0,
    )  # fmt: skip
    assert compiled.peak_bytes == peak == 60 + compiled.result_bytes + compiled.temporary_bytes
    assert compiled.result_bytes == 10


def test_the_environment_of_a_pod(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    environment = aot.worker_environment(parse_accelerator("2xv5p-128"))
    assert environment["TPU_ACCELERATOR_TYPE"] == "v5p-128"
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
    # For the devices here nothing is changed but the import path.
    assert aot.worker_environment(None)["JAX_PLATFORMS"] == "tpu"


def test_targets_of_named_pods():
    target = pod_target("2xv5p-128")
    assert (target.name, target.platform, target.kind) == ("2xv5p-128", "tpu", "TPU v5")
    assert (target.devices, target.granules, target.hosts) == (128, 2, 32)
    assert target.hbm_bytes == int(95.74 * (1 << 30))
    assert pod_target("tpu7x-16").devices == 16


def test_two_workers_share_the_programs_of_one_request(tmp_path):
    """Each is compiled by one of them, and what both say at their beginning is heard once."""
    request = {
        **aot._EMPTY,
        **{"function": f"{PROGRAMS}:small_and_huge", "payload": {"mesh": MESH}, "target": "local"},
        "folder": str(tmp_path),
    }
    heard = []
    found = compile_pool.run_workers(
        request, environment=aot.worker_environment(None), scratch=tmp_path, workers=2, on_event=heard.append
    )
    assert found == heard
    kinds = [event["event"] for event in found]
    assert [kinds.count(once) for once in ("devices", "described", "done")] == [1, 1, 1]
    named = {kind: sorted(e.get("program", e.get("name")) for e in found if e["event"] == kind)
             for kind in ("compiling", "outcome")}  # fmt: skip
    (described,) = [sorted(event["programs"]) for event in found if event["event"] == "described"]
    assert named == {"compiling": described, "outcome": described} and len(described) == 2


def test_requests_of_their_own_run_beside_each_other_and_fail_by_themselves(tmp_path):
    requests = [
        {
            **aot._EMPTY,
            "function": f"{PROGRAMS}:{function}",
            "payload": {"mesh": MESH},
            "target": "local",
            "folder": str(tmp_path),
        }
        for function in ("aborts", "small", "bad_input")
    ]
    heard = []
    crashed, fine, bad = compile_pool.run_requests(
        requests, environment=aot.worker_environment(None), scratch=tmp_path, workers=2, on_event=heard.append
    )
    assert fine is None and isinstance(bad, WorkerBadInput) and isinstance(crashed, CompileCrash)
    assert crashed.program == "doomed" and "heads 12 do not divide" in str(bad)
    assert [event["name"] for event in heard if event["event"] == "outcome"] == ["small"]


INTERRUPTED = """
import sys
from pathlib import Path
from levanter.plan import aot
from levanter.plan import compile_pool
compile_pool.LOCK_FILE = Path(sys.argv[2])
def event(e):
    if e["event"] == "compiling":
        compile_pool.LOCK_FILE.touch()
        print("compiling", flush=True)
try:
    aot.compile_programs(sys.argv[1] + ":sleeps", {}, target="local", on_event=event)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    raise SystemExit(130)
"""


def test_nothing_more_is_compiled_once_the_decisive_program_is_refused():
    """The second program would take ten minutes."""
    (outcome,) = compile_here("refused_and_slow", programs=("refused", "slow"), decisive="refused")
    assert isinstance(outcome, Refused) and outcome.refusal.needed == 20 << 30


def test_ctrl_c_ends_the_worker_and_leaves_no_lock_file(tmp_path):
    lock = tmp_path / "lock"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", INTERRUPTED, str(PROGRAMS), str(lock)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "compiling\n"
        assert lock.exists()
        assert len(_workers_with(str(scratch))) == 1
        caller.send_signal(signal.SIGINT)
        assert caller.stdout.readline() == "interrupted\n"
        assert caller.wait(timeout=200) == 130
    assert not lock.exists()
    assert list(scratch.iterdir()) == []
    deadline = time.monotonic() + 100
    while _workers_with(str(scratch)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _workers_with(str(scratch)) == []


def test_a_caller_that_is_killed_leaves_no_worker(tmp_path):
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", INTERRUPTED, str(PROGRAMS), str(tmp_path / "lock")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == "compiling\n"
        assert len(_workers_with(str(tmp_path))) == 1
        caller.kill()
    deadline = time.monotonic() + 100
    while _workers_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _workers_with(str(tmp_path)) == []


def _workers_with(argument: str) -> list[str]:
    """Process ids of workers whose request lies in this folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes().decode()
        except (OSError, UnicodeDecodeError):
            continue
        if "levanter.plan.compile_worker" in line and argument in line:
            found.append(process.name)
    return found
