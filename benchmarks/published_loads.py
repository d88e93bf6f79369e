"""Loads of generating text that somebody published, and those of Llama 2 on v5e that are only planned.

`published_decode.py` compares them with our own Programs. A published time is a server's: what its chips do in a step,
and, where that is less than what its host does meanwhile, its host. Of each load is said here what its source says of
it, and nothing that a comparison has shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PREFILL = 2048
"""Tokens of a prompt that a call takes at most."""
PAGE = 128
"""Rows of a multiple of so many positions are read without being moved."""


def _model(kind: str, embed: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    sizes = {"hidden_dim": embed, "intermediate_dim": mlp, "num_layers": layers}
    of_heads = {"num_heads": heads, "num_kv_heads": kv_heads}
    return {"type": kind, **sizes, **of_heads, "vocab_size": vocab, "tie_word_embeddings": False}


LLAMA_3_70B = _model("llama", 8192, 28672, 80, 64, 8, 128256)
LLAMA_3_8B = _model("llama", 4096, 14336, 32, 32, 8, 128256)
LLAMA_2_7B = _model("llama", 4096, 11008, 32, 32, 32, 32000)
LLAMA_2_13B = _model("llama", 5120, 13824, 40, 40, 40, 32000)
LLAMA_2_70B = _model("llama", 8192, 28672, 80, 64, 8, 32000)
QWEN_3_8B = _model("qwen3", 4096, 12288, 36, 32, 8, 151936) | {"head_dim": 128}
QWEN_3_32B = _model("qwen3", 5120, 25600, 64, 64, 8, 151936) | {"head_dim": 128}
GEMMA_2_27B = _model("gemma2", 4608, 36864, 46, 32, 16, 256128) | {
    "head_dim": 128,
    "query_pre_attn_scalar": 144.0,
    "tie_word_embeddings": True,
}


def in_pages(positions: int) -> int:
    """The next multiple of a page."""
    return -(-positions // PAGE) * PAGE


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published load, or one that is only planned.

    Attributes:
        name: of the case.
        model: the architecture.
        target: the pod.
        rows: in flight; of a published load, as many as were asked for.
        prompt: tokens of a prompt, on average.
        output: tokens of an answer, on average.
        varied: whether lengths of both were drawn evenly between 1 and twice that.
        seconds: published, a token of a row; None where nothing is published.
        tokens_per_second: published, of all rows; None where it follows from `seconds`.
        half: what the case is for.
        int8: whether weights are int8; the cache is bfloat16 always.
        whole: positions of a row that every step reads, where the publisher's cache is static.
        mesh: axes of the mesh.
        host: the least seconds a step of that server takes, whatever its chips have to do, by another published figure.
        repeats: how often the publisher's program writes out each key and value before it multiplies them, and then
            reads them so often; 0 where it reads the cache as it lies.
        source: who published it.
    """

    name: str
    model: Mapping[str, Any] = field(repr=False)
    target: str
    rows: int
    prompt: int
    output: int
    seconds: float | None = None
    tokens_per_second: float | None = None
    half: Literal["c", "t", "planned"] = "planned"
    int8: bool = False
    whole: int | None = None
    varied: bool = False
    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": 1, "model": -1})
    host: float = 0.0
    repeats: int = 0
    source: str = ""

    @property
    def in_flight(self) -> int:
        """Rows that were running on average."""
        if self.seconds is None or self.tokens_per_second is None:
            return self.rows
        return round(self.tokens_per_second * self.seconds)

    @property
    def context(self) -> int:
        """Positions of a row while it is generated, on average over the steps."""
        # A long answer is there for more steps: of lengths drawn evenly between 0 and 2 n, the mean square is 4/3 n².
        written = 2 * self.output // 3 if self.varied else self.output // 2
        return self.whole or in_pages(self.prompt + written)

    @property
    def repeated_bytes(self) -> int:
        """What a chip writes and reads in a step beyond the cache as it lies, of a program that repeats it."""
        if not self.repeats:
            return 0
        model, ways = self.model, self.mesh["model"]
        head = self.model.get("head_dim", model["hidden_dim"] // model["num_heads"])
        cache = 2 * 2 * model["num_layers"] * model["num_kv_heads"] // ways * head * self.context * self.in_flight
        return 2 * self.repeats * cache

    @property
    def taken(self) -> int:
        """Positions of the Program that takes a prompt."""
        return in_pages(self.prompt) if self.varied else self.prompt

    def document(self, *, prompts: bool) -> dict[str, Any]:
        """The configuration of `generate` for one of the two Programs."""
        tensor = ["model", "group"] if "group" in self.mesh else "model"
        return {
            "model": {**self.model, "max_seq_len": max(self.context, self.taken)},
            "tokenizer": "passthrough",
            "inference": {
                "max_rows": 1 if prompts else self.in_flight,
                "max_seq_len": self.taken if prompts else self.context,
                "prefill_chunk": min(PREFILL, self.taken),
                "penalties": False,
            },
            "trainer": {
                "mp": "bfloat16",
                "mesh": {
                    "axes": dict(self.mesh),
                    "shared_mapping": {"vocab": tensor, "mlp": tensor, "heads": tensor},
                },
            },
            **({"quantize": "int8"} if self.int8 else {}),
        }


_VLLM = "vLLM on v6e-8, 1,000 in and 1,000 out"
_SEED = "PyTorch/XLA, Llama 2 inference on TPU v5e"
GROUPED = {"data": 1, "model": 8, "group": 2}
MATRIX = "sglang-jax, docs/performance/qwen3_benchmark.md, main-10f32e4 of September 2025"
COOKBOOK = "sglang-jax, docs/cookbook, 0.1.0 of May 2026"
HOSTS: Mapping[str, float] = {MATRIX: 5.5e-3, COOKBOOK: 16 / 1744}
"""Seconds that a step of these servers takes at the least with 16 rows. Their host prepares a step while the chips do
the one before, so that a step takes as long as the longer of the two (their issue 293, of October 2025: 5.5 ms of
scheduling beside 5 ms of model and sampler for 16 rows of Qwen3-8B, and "scheduling cannot be fully masked"). Of 0.1.0
it is the peak of what 16 rows of Qwen3-30B-A3B make on v6e-16, 1,744 tokens a second: a model with 3 B parameters at
work on 16 chips, which is no load of this list."""


def _sglang(name: str, model: Mapping[str, Any], rows: int, prompt: int, milliseconds: float, rate: float,
            half: Literal["c", "t"] = "t") -> Case:  # fmt: skip
    """One of the table of September 2025: every prompt as long as the others, and every answer 1,024 tokens."""
    return Case(name=name, model=model, target="v6e-4", rows=rows, prompt=prompt, output=1024, half=half,
                seconds=1e-3 * milliseconds, tokens_per_second=rate, host=HOSTS[MATRIX], source=MATRIX)  # fmt: skip


def _cookbook(name: str, model: Mapping[str, Any], milliseconds: float, rate: float, *, prompt: int, output: int,
              target: str = "v6e-4", **options: Any) -> Case:  # fmt: skip
    """One of the recipes: 100 requests, 16 at once, prompts and answers of any length up to 1,024 or 512."""
    return Case(name=name, model=model, target=target, rows=16, prompt=prompt, output=output, varied=True, half="t",
                seconds=1e-3 * milliseconds, tokens_per_second=rate, host=HOSTS[COOKBOOK], source=COOKBOOK,
                **options)  # fmt: skip


CASES = (
    Case(name="llama3.3_70b_v6e-8_64", model=LLAMA_3_70B, target="v6e-8", rows=64, prompt=1000, output=1000,
         seconds=25.35e-3, tokens_per_second=2495, half="c", source=_VLLM),
    Case(name="llama3.3_70b_v6e-8_128", model=LLAMA_3_70B, target="v6e-8", rows=128, prompt=1000, output=1000,
         seconds=35.12e-3, tokens_per_second=3544, half="t", source=_VLLM),
    _sglang("qwen3_8b_v6e-4_1k", QWEN_3_8B, 64, 1024, 11.11, 5297, "c"),
    _sglang("qwen3_8b_v6e-4_4k", QWEN_3_8B, 64, 4096, 21.13, 2529),
    _sglang("qwen3_8b_v6e-4_8k", QWEN_3_8B, 64, 8192, 31.98, 1459),
    _cookbook("qwen3_32b_v6e-4_16", QWEN_3_32B, 16.89, 833.8, prompt=506, output=524),
    _cookbook("llama3.1_8b_v6e-4_16", LLAMA_3_8B, 9.94, 1448.91, prompt=265, output=258),
    Case(name="llama2_70b_v5e-16_1", model=LLAMA_2_70B, target="v5e-16", rows=1, prompt=1048, output=1000, whole=2048,
         seconds=17e-3, half="c", int8=True, mesh=GROUPED, repeats=4, source=_SEED),
    Case(name="llama2_70b_v5e-16_32", model=LLAMA_2_70B, target="v5e-16", rows=32, prompt=1048, output=1000, whole=2048,
         seconds=47.6e-3, half="t", int8=True, mesh=GROUPED, repeats=4, source=_SEED),
)  # fmt: skip
LATER = (
    _sglang("qwen3_8b_v6e-4_1k_8", QWEN_3_8B, 8, 1024, 5.99, 1311.49),
    _sglang("qwen3_8b_v6e-4_1k_16", QWEN_3_8B, 16, 1024, 6.62, 2243.06),
    _sglang("qwen3_8b_v6e-4_1k_32", QWEN_3_8B, 32, 1024, 8.18, 3682.22),
    _sglang("qwen3_8b_v6e-4_1k_128", QWEN_3_8B, 128, 1024, 17.06, 6731.67),
    _sglang("qwen3_8b_v6e-4_4k_16", QWEN_3_8B, 16, 4096, 9.00, 1588.69),
    _sglang("qwen3_8b_v6e-4_8k_16", QWEN_3_8B, 16, 8192, 11.48, 1147.52),
    _sglang("qwen3_32b_v6e-4_1k_8", QWEN_3_32B, 8, 1024, 18.29, 427.69),
    _sglang("qwen3_32b_v6e-4_1k_32", QWEN_3_32B, 32, 1024, 22.17, 1355.93),
    _sglang("qwen3_32b_v6e-4_4k_16", QWEN_3_32B, 16, 4096, 22.45, 626.42),
    _cookbook("gemma2_27b_v6e-4_16", GEMMA_2_27B, 14.47, 974.57, prompt=506, output=524),
    _cookbook("llama3.3_70b_v6e-16_16", LLAMA_3_70B, 16.33, 882.17, prompt=506, output=524, target="v6e-16",
              mesh=GROUPED),
)  # fmt: skip
"""Chosen on 2026-11-24, before any of them was compiled, of the same two sources: they test, and nobody has tuned to
them. Of the table: fewest rows, 16, 32 and as many as its cache held, of short prompts, and 16 of longer ones."""
EXCLUDED: Mapping[str, str] = {
    "Llama 2 7B bf16 on v5e-4, 1.2 ms a token": "below the floor of 4.1 ms; the same source's 201 tokens/s/chip is "
    "4.97 ms, 4 × 1.24",
    "Qwen3-32B on v6e-4, batch 256": "weights and cache take 42 GB a chip of 33.5; 73 rows were in flight",
    "Qwen3-32B on v6e-4, 64 rows at 8K": "15 rows were in flight",
    "the scaling book's 52 int8 caches on v5e 4×2": "128 GB less 70 of weights is 58, not 68: 43 caches",
    "the scaling book's 67 int4 caches on v5e 4×2": "the same subtraction",
    "JetStream, Llama 2 7B on v5e, 3,062 tokens/s": "the chips are not named, and a mean of 5 s a token stands "
    "beside a median of 0.16",
}
"""Published rows that are no anchors, and why."""


def _planned() -> tuple[Case, ...]:
    """Llama 2 on v5e with a static cache: no row of these is published but the two above."""
    found = []
    for name, model, target, mesh in (
        ("llama2_7b_v5e-1", LLAMA_2_7B, "v5e-1", {"data": 1, "model": 1}),
        ("llama2_13b_v5e-4", LLAMA_2_13B, "v5e-4", {"data": 1, "model": 4}),
        ("llama2_70b_v5e-16", LLAMA_2_70B, "v5e-16", GROUPED),
    ):
        for int8 in (False, True):
            for context in (256, 2048):
                for rows in (1, 8, 32, 64):
                    kind = "int8" if int8 else "bf16"
                    found.append(
                        Case(name=f"{name}_{kind}_{context}_{rows}", model=model, target=target, rows=rows,
                             prompt=context // 2, output=context, int8=int8, mesh=mesh)
                    )  # fmt: skip
    return tuple(found)


PLANNED = _planned()
