"""Measures upstream Levanter (`pip install marin-levanter gitpython`) on the checkpoint of `loading.py`.

Run by `loading.py --upstream PYTHON` with the interpreter of an environment that holds it; the two cannot share one.
"""

import json
import resource
import sys
import time
from pathlib import Path

from loading import resident, touch_memory, warm


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from levanter.compat.hf_checkpoints import HFCheckpointConverter
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import PreTrainedTokenizerFast

    from levanter.models.llama import LlamaConfig

    folder, dtype, touch_gib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
    converter = HFCheckpointConverter(
        LlamaConfig, reference_checkpoint=folder, HfConfigClass=HfLlamaConfig, tokenizer=tokenizer
    )
    config = converter.config_from_hf_checkpoint(folder)
    automatic = (jax.sharding.AxisType.Auto,) * 3
    grid = np.asarray(jax.devices()).reshape(1, 4, 2)
    mesh = jax.sharding.Mesh(grid, ("replica", "data", "model"), axis_types=automatic)
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    warm(Path(folder))
    touch_memory(touch_gib)
    before = resident()
    began, cpu = time.perf_counter(), time.process_time()
    with jax.set_mesh(mesh):
        model = converter.load_pretrained(
            config.model_type,
            ref=folder,
            config=config,
            axis_mapping={"embed": "data", "mlp": "model", "kv_head": "model", "vocab": "model"},
            dtype=getattr(jnp, dtype),
        )
        arrays = jax.block_until_ready(jax.tree.leaves(model))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    size = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    checkpoint = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    found = {
        "seconds": seconds,
        "cpu": cpu,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "device": size,
        "checkpoint": checkpoint,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
