"""Times loading a Llama checkpoint of 1.24 billion parameters (2.36 GiB of bf16) onto 8 virtual CPU devices.

    python benchmarks/loading.py [--dtype bfloat16 float32] [--repeat 3] [--transformers] [--upstream PYTHON]

The checkpoint has the architecture of Llama 3.2 1B, random weights and two files; it is made in the temporary folder
unless it exists. Each measurement runs in its own process with a warm page cache; peak memory excludes what was
resident just before loading. `--transformers` and `--upstream` measure others on the same checkpoint,
`--unchecked` ours without the check for non-finite weights. `--cold` drops the files from the page cache first,
so that the disk is read.

In a virtual machine that gets its memory from the host on first use, that first use can take longer than anything
measured here. `--touch-gib N` makes another process use N GiB just before, so that the machine has them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARDS = 2


def make_checkpoint(folder: Path) -> None:
    """Writes the checkpoint, one tensor after another."""
    import ml_dtypes
    import numpy as np

    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 22, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    shapes = {"model.embed_tokens.weight": (128256, 2048)}
    for i in range(16):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (2048, 2048),
            f"{layer}.self_attn.k_proj.weight": (512, 2048),
            f"{layer}.self_attn.v_proj.weight": (512, 2048),
            f"{layer}.self_attn.o_proj.weight": (2048, 2048),
            f"{layer}.mlp.gate_proj.weight": (8192, 2048),
            f"{layer}.mlp.up_proj.weight": (8192, 2048),
            f"{layer}.mlp.down_proj.weight": (2048, 8192),
            f"{layer}.input_layernorm.weight": (2048,),
            f"{layer}.post_attention_layernorm.weight": (2048,),
        }
    shapes["model.norm.weight"] = (2048,)
    names = list(shapes)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for shard in range(SHARDS):
        mine = names[shard * len(names) // SHARDS : (shard + 1) * len(names) // SHARDS]
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, at = {}, 0
        for name in mine:
            nbytes = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + nbytes]}
            at += nbytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in mine:
                left = 2 * int(np.prod(shapes[name]))
                while left:
                    left -= out.write(noise[: min(left, len(noise))])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def warm(folder: Path) -> None:
    """Reads the files once, so that they are in the page cache; under `COLD`, drops them from it."""
    if os.environ.get("COLD"):
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as handle:
            buffer = bytearray(16 << 20)
            while handle.readinto(buffer):
                pass


def touch_memory(gib: int) -> None:
    """Lets another process use that much memory and free it: a virtual machine gives memory on first use, slowly."""
    if gib:
        code = f"import numpy as np\nnp.ones({gib} << 30, np.uint8)"
        subprocess.run([sys.executable, "-c", code], check=True)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure_ours(folder: Path, dtype: str, touch_gib: int) -> dict:
    """One load; times begin before the plan is made."""
    import haliax as hax
    import jax
    import numpy as np

    from haliax_ext import host_reader
    from haliax_ext.abstract import abstract, leaves
    from haliax_ext.loading import load, plan_loading
    from haliax_ext.mapping import AxisMapping, Mappings
    from haliax_ext.meshspec import MeshSpec
    from haliax_ext.planner import plan_sharding
    from levanter.compat.hf.safetensors import SafetensorsSource
    from levanter.models.llama import weights
    from levanter.models.llama.config import LlamaConfig

    if os.environ.get("UNCHECKED"):
        host_reader.all_finite = lambda *_: True
    spec = MeshSpec.of(data=4, model=2)
    mesh = spec.build(jax.devices())
    config = LlamaConfig(
        hidden_dim=2048,
        intermediate_dim=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        tie_word_embeddings=True,
        vocab_size=128256,
    )
    model = abstract(config.build, hax.Axis("vocab", 128256), key=jax.random.PRNGKey(0))
    mapping = AxisMapping({"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"})
    sharding = plan_sharding(leaves(model), Mappings(params=mapping), spec).check()
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    warm(folder)
    touch_memory(touch_gib)
    before = resident()
    began, cpu = time.perf_counter(), time.process_time()
    source = SafetensorsSource.from_files(*sorted(folder.glob("*.safetensors")))
    plan = plan_loading(sharding, weights.rules(config), source, dtype=jax.numpy.dtype(dtype))
    loaded = load(plan, sharding, source, mesh)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    device_bytes = sum(shard.data.nbytes for array in loaded.values() for shard in array.addressable_shards)
    return {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "peak": peak,
        "device": device_bytes,
        "bytes_read": source.bytes_read,
        "checkpoint": plan.source_bytes,
    }


def measure_transformers(folder: Path, dtype: str, touch_gib: int) -> dict:
    """The same checkpoint through transformers and torch."""
    import torch
    import transformers

    warm(folder)
    touch_memory(touch_gib)
    before = resident()
    began, cpu = time.perf_counter(), time.process_time()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    total = sum(float(p.flatten()[::1024].float().sum()) for p in model.parameters())
    seconds = time.perf_counter() - began
    assert total == total
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "seconds": seconds,
        "cpu": time.process_time() - cpu,
        "peak": peak,
        "device": size,
        "checkpoint": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "levanter-bench-1b")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--touch-gib", type=int, default=0, help="memory another process uses just before")
    parser.add_argument("--transformers", action="store_true", help="also measure transformers with torch")
    parser.add_argument("--upstream", metavar="PYTHON", help="also measure upstream, in the environment of PYTHON")
    parser.add_argument("--cold", action="store_true", help="read the disk and not the page cache")
    parser.add_argument("--unchecked", action="store_true", help="also measure ours without the check for NaN")
    parser.add_argument("--one", nargs=2, metavar=("WHO", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        measure = {"ours": measure_ours, "transformers": measure_transformers}[args.one[0]]
        print(json.dumps(measure(args.checkpoint, args.one[1], args.touch_gib)))
        return
    if not (args.checkpoint / "config.json").exists():
        make_checkpoint(args.checkpoint)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    env |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
    if args.cold:
        env["COLD"] = "1"
    print(f"{'':24} {'time':>8} {'CPU time':>8} {'rate':>12} {'peak RSS':>10} {'allowed':>10} {'bytes read':>10}")
    for dtype in args.dtype:
        # In turns, so that whatever else the machine does falls on all.
        for n in range(args.repeat):
            for who, command, extra in commands(args, dtype)[:: -1 if n % 2 else 1]:
                done = subprocess.run(command, env=env | extra, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{who} failed:\n{done.stderr[-4000:]}")
                found = json.loads(done.stdout.splitlines()[-1])
                rate = found["checkpoint"] / 1e9 / found["seconds"]
                allowed = found["device"] * 1.15 + (1 << 29)
                read = f"{found['bytes_read'] / found['checkpoint']:9.3f}×" if "bytes_read" in found else ""
                print(
                    f"{who + ' ' + dtype:24} {found['seconds']:6.2f} s {found['cpu']:6.2f} s {rate:7.2f} GB/s "
                    f"{found['peak'] / 2**30:6.2f} GiB {allowed / 2**30:6.2f} GiB {read}",
                    flush=True,
                )


def commands(args: argparse.Namespace, dtype: str) -> list[tuple[str, list[str], dict[str, str]]]:
    """Who is measured, by which command, in which environment beyond the common one."""
    touch = str(args.touch_gib)
    here = Path(__file__).resolve()
    found = []
    for who in ("ours", "transformers") if args.transformers else ("ours",):
        command = [sys.executable, str(here), "--checkpoint", str(args.checkpoint), "--one", who, dtype]
        found.append((who, [*command, "--touch-gib", touch], {"PYTHONPATH": str(here.parent.parent)}))
    if args.unchecked:
        found.append(("unchecked", found[0][1], {**found[0][2], "UNCHECKED": "1"}))
    if args.upstream:
        command = [args.upstream, str(here.parent / "loading_upstream.py"), str(args.checkpoint), dtype, touch]
        found.append(("upstream", command, {"PYTHONPATH": ""}))
    return found


if __name__ == "__main__":
    main()
