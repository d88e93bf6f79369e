"""Files and classes of ours that a real run enters, on the paths that readers follow through the code.

`python tests/arch/paths.py request resolve` runs these `SCENARIOS` and prints what they entered as JSON; `entered(...)`
does so in a new process.

A function is *entered* when Python calls it. The bodies of modules and classes, which run at an import, are not
functions in this sense, and neither are lambdas and comprehensions. Code that was compiled before does not run in
Python.

- `request`: the files entered by one streamed chat completion over HTTP, from when the client sends it until the client
  has the last byte and the engine is idle; all threads count. The server has answered the same request before, so that
  imports on demand and caches are filled. Nothing periodic runs in this server: what the engine's thread does while it
  waits is one call that began before.
- `weight`: a safetensors file becomes arrays on 8 devices. `files` are those entered by opening the file, planning the
  load and loading; `nouns` are the public classes of which `load` calls `__init__` at least once for each array.
- `resolve`: `resolve(config)` of the mesh package, by the files of that package, in the order in which they are
  entered. Calls within a file do not count again; a file is *re-entered* if another one was entered in between.
- `eval_lm`: modules of ours in `sys.modules` once the entry point `eval_lm` is loaded (`imported`), after a whole
  evaluation of a tiny model (`run`), and the CPU seconds of loading it (`import_seconds`), JAX and others included.
"""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = ("levanter", "haliax_ext")
CO_NEWLOCALS = 0x2
"""Set in the code of functions, not in that of modules and classes."""


def is_ours(module: str) -> bool:
    """Whether a module belongs to `levanter` or `haliax_ext`."""
    return module.partition(".")[0] in OURS


@dataclass
class Recorder:
    """Records calls of our functions: in the thread that enters `installed`, and in threads that start inside.

    Attributes:
        active: whether calls are recorded now.
        calls: the modules of the calls, in order, without repetitions.
        functions: `module.qualified_name` of every function that was called.
        constructed: how often `__init__` ran for each public class of ours, by `module.name`.
    """

    active: bool = False
    calls: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)
    constructed: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def installed(self) -> Iterator["Recorder"]:
        """Listens to calls within the block."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            self.active = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records within the block."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.active or event != "call":
            return
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if not code.co_flags & CO_NEWLOCALS or code.co_name.startswith("<") or not is_ours(module):
            return
        self.functions.add(f"{module}.{code.co_qualname}")
        if not self.calls or self.calls[-1] != module:
            self.calls.append(module)
        if code.co_name == "__init__":
            owner = type(frame.f_locals[code.co_varnames[0]])
            if is_ours(owner.__module__) and not owner.__name__.startswith("_"):
                self.constructed[f"{owner.__module__}.{owner.__qualname__}"] += 1

    @property
    def files(self) -> list[str]:
        """The modules that were entered, by name."""
        return sorted(set(self.calls))

    def settle(self, seconds: float = 0.5) -> None:
        """Waits until no thread has called a function of ours for that long."""
        count = -1
        while count != (count := len(self.calls)):
            time.sleep(seconds)


def request() -> dict[str, Any]:
    """One chat completion over HTTP."""
    import urllib.request

    from helpers.compile_once import compile_once
    from helpers.served import listening, loaded, model_folder

    document = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4, "stream": True}
    recorder = Recorder()

    def send(url: str) -> bytes:
        body = json.dumps(document).encode()
        post = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(post) as response:
            return response.read()

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.enter_context(compile_once())
        scratch = Path(folder)
        with (
            loaded(model_folder(scratch / "model"), scratch) as model,
            recorder.installed(),
            listening(model) as server,
        ):
            assert b"[DONE]" in send(server.url)
            with recorder.recording():
                assert b"[DONE]" in send(server.url)
                recorder.settle()
    return {"files": recorder.files, "functions": sorted(recorder.functions)}


def weight() -> dict[str, Any]:
    """Weights from a safetensors file to devices."""
    import jax
    from helpers.tiny_llama import tiny_leaves, tiny_rules, tiny_tensors
    from safetensors.numpy import save_file

    from haliax_ext.loading import device_hosts, load, plan_loading
    from haliax_ext.mapping import AxisMapping, Mappings
    from haliax_ext.meshspec import MeshSpec
    from haliax_ext.planner import plan_sharding
    from levanter.compat.hf.safetensors import SafetensorsSource

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(tiny_tensors(), path)
        spec = MeshSpec.of(data=4, model=2)
        mesh = spec.build(jax.devices())
        mapping = AxisMapping({"embed": "data", "mlp": "model"})
        leaves, rules = tiny_leaves(), tiny_rules()
        sharding = plan_sharding(leaves, Mappings(params=mapping), spec)
        with recorder.installed(), recorder.recording():
            source = SafetensorsSource.from_files(path)
            plan = plan_loading(sharding, rules, source, hosts=device_hosts(mesh))
            recorder.constructed.clear()
            load(plan, sharding, source, mesh)
    nouns = sorted(name for name, count in recorder.constructed.items() if count >= len(leaves))
    return {"files": recorder.files, "nouns": nouns}


def resolve() -> dict[str, Any]:
    """A mesh config becomes mesh sizes and mappings."""
    from levanter.mesh.config import MeshConfig, ModelAxes
    from levanter.mesh.resolve import resolve

    config = MeshConfig(
        axes={"data": 2, "context": 2, "model": 2},
        shared_mapping={"vocab": "model", "mlp": "model", "heads": "model"},
        param_mapping={"embed": "data"},
        compute_mapping={"position": "context"},
        attention_mapping="auto",
    )
    sizes = {"layers": 2, "embed": 32, "mlp": 64, "vocab": 256, "position": 64}
    model = ModelAxes(sizes={**sizes, "kv_head": 2, "q_heads_per_group": 2, "head_size": 8})
    recorder = Recorder()
    with recorder.installed(), recorder.recording():
        resolve(config, model, devices=8)
    package = resolve.__module__.rpartition(".")[0]
    inside = [name for name in recorder.calls if name.startswith(f"{package}.")]
    order = [name for n, name in enumerate(inside) if n == 0 or inside[n - 1] != name]
    return {"order": order, "reentered": len(order) - len(set(order)), "files": recorder.files}


def exit_code(module: str) -> object:
    """Runs a module as `python -m` does."""
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as stop:
        return stop.code or 0
    return 0


def eval_lm() -> dict[str, Any]:
    """The modules of an evaluation."""
    began = time.process_time()
    from levanter.commands.catalog import ENTRY_POINTS

    ENTRY_POINTS["eval_lm"].load()
    seconds = time.process_time() - began
    imported = sorted(filter(is_ours, sys.modules))
    from helpers.hf_folder import TEXTS, write_folder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_folder(folder / "model")
        (folder / "docs.jsonl").write_text("".join(json.dumps({"text": 6 * text}) + "\n" for text in TEXTS))
        document = {
            "hf_checkpoint": str(folder / "model"),
            "max_eval_length": 48,
            "data": {
                "cache_dir": str(folder / "cache"),
                "components": {"docs": {"source": {"validation_urls": [str(folder / "docs.jsonl")]}}},
            },
            "trainer": {"mp": "f32", "tracker": {"type": "noop"}, "mesh": {"axes": {"data": -1}}},
        }
        (folder / "eval.yaml").write_text(json.dumps(document))
        sys.argv = ["eval_lm", "--config_path", str(folder / "eval.yaml")]
        with contextlib.redirect_stdout(io.StringIO()):
            code = exit_code("levanter.main.eval_lm")
    assert code == 0, f"eval_lm ended with exit code {code}"
    return {"imported": imported, "run": sorted(filter(is_ours, sys.modules)), "import_seconds": round(seconds, 2)}


SCENARIOS: Mapping[str, Callable[[], dict[str, Any]]] = {
    function.__name__: function for function in (request, weight, resolve, eval_lm)
}


def entered(*names: str) -> dict[str, dict[str, Any]]:
    """What each of these scenarios entered, all in one new process."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, __file__, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def numbers() -> dict[str, tuple[float, list[str]]]:
    """The numbers of all paths, by name, each with what it counts. Ceilings of them are in `ceilings.json`."""
    together, alone = entered("request", "weight", "resolve"), entered("eval_lm")["eval_lm"]
    listed = {
        "request files": together["request"]["files"],
        "weight nouns": together["weight"]["nouns"],
        "weight files": together["weight"]["files"],
        "eval_lm modules imported": alone["imported"],
        "eval_lm modules after a run": alone["run"],
    }
    return {
        **{name: (len(items), items) for name, items in listed.items()},
        "resolve files re-entered": (together["resolve"]["reentered"], together["resolve"]["order"]),
        "eval_lm import CPU seconds": (alone["import_seconds"], []),
    }


if __name__ == "__main__":
    print(json.dumps({name: SCENARIOS[name]() for name in sys.argv[1:]}))
