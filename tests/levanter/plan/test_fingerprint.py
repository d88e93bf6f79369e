"""What a Program is traced from, as a digest: the same for the same run, another for whatever changes the trace."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers.plan_cases import CASES

from levanter.plan import fingerprint as module
from levanter.plan.fingerprint import _Unknown, _Walk, fingerprint
from levanter.plan.target_from_name import pod_target

# One of each kind of run: scoring, windows, training, training of another family.
SAMPLE = ("405b_v4-256", "405b_windows_v4-256", "llama2_7b_v4-32", "llama_0.78b_64k_tp4")


def described(name: str, *overrides: str):
    case = dataclasses.replace(CASES[name], overrides=(*CASES[name].overrides, *overrides))
    return case.describe(pod_target(case.target))


def prints(plan) -> dict[str, str | None]:
    return {program.name: fingerprint(program, plan) for program in plan.programs}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_run_described_twice_has_the_same_and_every_program_has_one(name):
    plan = described(name)
    found = prints(plan)
    assert not [name for name, digest in found.items() if digest is None]
    assert len(set(found.values())) == len(found)
    assert prints(described(name)) == found


@pytest.mark.parametrize(
    "override",
    [
        "--model.num_layers=31",
        "--model.gradient_checkpointing=false",
        "--trainer.train_batch_size=512",
        "--trainer.mp=f32",
        "--trainer.mesh.residual_mapping.embed=model",
        "--optimizer.beta2=0.9",
        "--optimizer.weight_decay=0.3",
        "--trainer.jax_config.jax_default_matmul_precision=highest",
        "--z_loss_weight=0.001",
        "--trainer.compiler_options.xla_tpu_scoped_vmem_limit_kib=65536",
    ],
)
def test_what_changes_the_step_changes_its_fingerprint(override):
    before, after = described("llama2_7b_v4-32"), described("llama2_7b_v4-32", override)
    assert fingerprint(before.program("train_step"), before) != fingerprint(after.program("train_step"), after)


OTHER_PROCESS = """
import json, sys
from helpers.plan_cases import CASES
from levanter.plan.fingerprint import fingerprint
from levanter.plan.target_from_name import pod_target
case = CASES[sys.argv[1]]
plan = case.describe(pod_target(case.target))
print(json.dumps({p.name: fingerprint(p, plan) for p in plan.programs}))
"""


def test_another_process_comes_to_the_same():
    """With other hashes of strings, so that no order of a set is in it."""
    name = "llama2_7b_v4-32"
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, name], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1]) == prints(described(name))


def make(value):
    def function(x):
        return x * value

    return function


def digest(value) -> bytes:
    return _Walk().digest(value)


def test_functions_by_code_and_by_what_they_close_over():
    assert digest(make(2)) == digest(make(2)) != digest(make(3))
    assert digest(lambda x: x + 1) == digest(lambda x: x + 1) != digest(lambda x: x + 2)
    assert digest(make(np.float32(2))) != digest(make(2.0))
    assert digest(make((1, 2))) != digest(make([1, 2]))
    assert digest(make({"a": 1})) != digest(make({"a": 2}))
    assert digest(make(True)) != digest(make(1))


def test_a_function_that_calls_itself():
    def build(step):
        def down(n):
            return n and down(n - step)

        return down

    assert digest(build(1)) == digest(build(1)) != digest(build(2))


def test_what_is_not_known_has_none():
    class Foreign:
        pass

    for value in (object(), iter([1]), jax.devices()[0]):
        with pytest.raises(_Unknown):
            digest(make(value))
    with pytest.raises(_Unknown):
        digest(make(Foreign()))


def test_sources_count_by_content(monkeypatch, tmp_path):
    package = tmp_path / "plugged"
    package.mkdir()
    (package / "__init__.py").write_text("class Family: pass\n")
    os.utime(package / "__init__.py", (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "plugged"
    importlib.import_module(name)
    module._source_digest.cache_clear()
    before = module._source_digest(name)
    (package / "__init__.py").write_text("class Family: x = 1\n")
    os.utime(package / "__init__.py", (1e9, 1e9))
    module._source_digest.cache_clear()
    assert module._source_digest(name) != before
    # What changed since this process began may not be what it runs.
    os.utime(package / "__init__.py")
    module._source_digest.cache_clear()
    with pytest.raises(_Unknown, match="newer than this process"):
        module._source_digest(name)
    module._source_digest.cache_clear()
    del sys.modules[name]


def test_options_of_the_environment_count(monkeypatch):
    before = module.compiler_environment()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_something=1")
    assert set(module.compiler_environment()) - set(before) == {"LIBTPU_INIT_ARGS=--xla_tpu_something=1"}
    monkeypatch.undo()
    # Flags of this machine's processors say nothing to a pod's compiler, others in the same variable do.
    monkeypatch.delenv("XLA_FLAGS")
    without = module.compiler_environment()
    for flags in ("", " --xla_force_host_platform_device_count=8", "--xla_cpu_use_fusion_emitters=false"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert module.compiler_environment() == without
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true  --xla_tpu_a=1 --xla_b=2")
    assert set(module.compiler_environment()) - set(without) == {"XLA_FLAGS=--xla_tpu_a=1 --xla_b=2"}


def test_sources_that_changed_since_the_process_began_leave_no_fingerprint(monkeypatch):
    """Whoever edits the package while a plan runs gets its Programs lowered, and no traceback."""
    plan = described("llama2_7b_v4-32")
    for function in (module.environment_digest, module._source_digest):
        function.cache_clear()
    monkeypatch.setattr(module, "_process_began", lambda: 0.0)
    assert fingerprint(plan.program("train_step"), plan) is None
    for function in (module.environment_digest, module._source_digest):
        function.cache_clear()
