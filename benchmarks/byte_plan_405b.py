"""Plans the loading of a 405-billion-parameter checkpoint on 128 devices on 32 hosts, and reads one host's share.

    JAX_PLATFORMS=cpu python benchmarks/byte_plan_405b.py [--host 5] [--mesh fsdp_tp|tp|fsdp] [--no-read] [--show]

The checkpoint is real in everything but its weights: 191 safetensors files, 1138 tensors, 811.7 GB, as sparse files, so
that it takes no disk space. Planning means: open it, match the rules, choose strategies, and list every byte range that
the host reads. Reading means: perform those reads through `SafetensorsSource` and discard the data.
"""

import argparse
import json
import math
import os
import resource
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import haliax as hax
import jax
import numpy as np

from haliax_ext.abstract import abstract, leaves
from haliax_ext.leaf_layout import box_shape, box_size, distinct_boxes, to_slices
from haliax_ext.loading import plan_loading
from haliax_ext.mapping import AxisMapping, Mappings
from haliax_ext.meshspec import MeshSpec
from haliax_ext.planner import plan_sharding
from haliax_ext.read_plan import Block, plan_reads
from haliax_ext.read_scheduler import byte_ranges
from levanter.compat.hf.safetensors import SafetensorsSource
from levanter.models.llama import weights
from levanter.models.llama.config import LlamaConfig

FILES = 191
VOCAB = 128256
CONFIG = LlamaConfig(
    hidden_dim=16384,
    intermediate_dim=53248,
    num_layers=126,
    num_heads=128,
    num_kv_heads=8,
    vocab_size=VOCAB,
)
MESHES = {
    "fsdp_tp": (
        MeshSpec.of(data=16, model=8),
        {"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
    ),
    "tp": (
        MeshSpec.of(model=8, group=16),
        {
            "mlp": ["model", "group"],
            "vocab": ["model", "group"],
            "kv_head": "model",
            "q_heads_per_group": "group",
        },
    ),
    "fsdp": (MeshSpec.of(data=128), {"embed": "data"}),
}


def make_checkpoint(folder: Path) -> None:
    """Writes headers, and holes for the weights."""
    embed, mlp, heads, kv = 16384, 53248, 128 * 128, 8 * 128
    shapes = {"model.embed_tokens.weight": (VOCAB, embed)}
    for i in range(126):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (embed,),
            f"{layer}.mlp.down_proj.weight": (embed, mlp),
            f"{layer}.mlp.gate_proj.weight": (mlp, embed),
            f"{layer}.mlp.up_proj.weight": (mlp, embed),
            f"{layer}.post_attention_layernorm.weight": (embed,),
            f"{layer}.self_attn.k_proj.weight": (kv, embed),
            f"{layer}.self_attn.o_proj.weight": (embed, heads),
            f"{layer}.self_attn.q_proj.weight": (heads, embed),
            f"{layer}.self_attn.v_proj.weight": (kv, embed),
        }
    shapes |= {"model.norm.weight": (embed,), "lm_head.weight": (VOCAB, embed)}
    # The norms' rotary table that older exports carry along; a rule ignores it.
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (64,)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    files: list[dict[str, tuple[int, ...]]] = [{} for _ in range(FILES)]
    done = 0
    for name, shape in shapes.items():
        files[min(done * FILES // total, FILES - 1)][name] = shape
        done += 2 * math.prod(shape)
    folder.mkdir(parents=True, exist_ok=True)
    for number, held in enumerate(files, 1):
        header, at = {}, 0
        for name, shape in held.items():
            nbytes = 2 * math.prod(shape)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"model-{number:05d}-of-{FILES:05d}.safetensors").open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + at)
    (folder / "complete").touch()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_share(plan, source: SafetensorsSource, host: int, folder: Path) -> int:
    """Carries out a host's reads into one buffer a thread; returns the elements asked for, in bytes."""
    local = threading.local()

    def one(job) -> int:
        load, request = job
        if not hasattr(local, "buffer"):
            local.buffer = np.empty(64 << 20, np.uint8)
        nbytes = box_size(request.box) * load.source_dtype.itemsize
        out = local.buffer[:nbytes].view(load.source_dtype).reshape(box_shape(request.box))
        source.read(request.tensor, to_slices(request.box), out)
        return nbytes

    def jobs(step):
        for load in step.loads:
            device_boxes = load.device_boxes(plan.sharding.mesh, step.piece or (0, 0))
            boxes, _ = distinct_boxes(device_boxes[plan.host_devices(host)])
            for read_plan in plan_reads(load, [Block(box=box) for box in boxes]):
                for request in read_plan.requests():
                    yield load, request

    total = 0
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
        for step in plan.steps:
            total += sum(pool.map(one, jobs(step)))
            # Holes fill the page cache with zeros; let them go.
            for file in folder.glob("*.safetensors"):
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=Path(tempfile.gettempdir()) / "levanter-bench-405b-holes")
    parser.add_argument("--host", type=int, default=5)
    parser.add_argument("--mesh", choices=MESHES, default="fsdp_tp")
    parser.add_argument("--no-read", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the plan")
    args = parser.parse_args()
    if not (args.checkpoint / "complete").exists():
        make_checkpoint(args.checkpoint)
    spec, mapping = MESHES[args.mesh]
    model = abstract(CONFIG.build, hax.Axis("vocab", VOCAB), key=jax.random.PRNGKey(0))
    sharding = plan_sharding(leaves(model), Mappings(params=AxisMapping(mapping)), spec).check()
    hosts = np.arange(spec.size) // 4

    before, began = peak(), time.perf_counter()
    source = SafetensorsSource.from_files(*sorted(args.checkpoint.glob("*.safetensors")))
    opened = time.perf_counter() - began
    plan = plan_loading(sharding, weights.rules(CONFIG), source, hosts=hosts, dtype=np.dtype("bfloat16"))
    planned = time.perf_counter() - began
    count = nbytes = 0
    for piece in byte_ranges(plan, source, args.host):
        count += 1
        nbytes += piece.nbytes
    listed = time.perf_counter() - began
    if args.show:
        print(plan)
    share = plan.bytes_by_host[args.host]
    print(f"{len(source.tensors)} tensors in {len(source.readers)} files, {plan.source_bytes / 1e9:.1f} GB, {spec}")
    print(f"opened after {opened:.2f} s, planned after {planned:.2f} s, all ranges listed after {listed:.2f} s")
    print(f"peak memory of planning {(peak() - before) / 2**20:.0f} MiB")
    print(
        f"host {args.host}: {count} ranges, {nbytes / 1e9:.3f} GB; its share {share / 1e9:.3f} GB "
        f"(checkpoint / hosts = {plan.source_bytes / plan.num_hosts / 1e9:.3f} GB); the job reads "
        f"{plan.amplification:.4f}× the checkpoint; at most {plan.transient_device_bytes / 2**20:.0f} MiB on a device "
        "beyond the arrays"
    )
    if not args.no_read:
        began = time.perf_counter()
        asked = read_share(plan, source, args.host, args.checkpoint)
        seconds = time.perf_counter() - began
        print(
            f"read {source.bytes_read / 1e9:.3f} GB for {asked / 1e9:.3f} GB in {seconds:.1f} s: "
            f"{source.bytes_read / share:.4f}× its share; peak memory {(peak() - before) / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
