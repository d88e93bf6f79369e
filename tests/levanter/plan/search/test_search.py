"""The search against brute force: which layouts divide, what they take, and what is said of those that lost."""

import itertools
import math
from dataclasses import replace

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from haliax_ext.abstract import Leaf, abstract, cast, leaves
from haliax_ext.hlo import MemoryFigures, OutOfMemory
from haliax_ext.meshspec import MeshSpec
from levanter.hardware import parse_accelerator
from levanter.mesh import MeshConfig, ModelAxes, resolve
from levanter.models import LlamaConfig
from levanter.models.activations import constrained_by, transformer_activations
from levanter.models.axes import ALIASES, KNOWN_AXES
from levanter.plan.aot import Compiled, Refused
from levanter.plan.comms import Network
from levanter.plan.context_parallel_cost import ContextParallelCost, context_parallel_seconds
from levanter.plan.search import Candidate, SearchSubject, candidates, estimate, render, search, search_to_json
from levanter.plan.step_time_model import StepTime
from levanter.plan.verdict import ProgramVerdict
from levanter.runplan import Workload

GIB = 1 << 30
LLAMA_405B = LlamaConfig(
    hidden_dim=16384, intermediate_dim=53248, num_layers=126, num_heads=128, num_kv_heads=8, max_seq_len=128
)
LLAMA_8B = LlamaConfig(
    hidden_dim=4096, intermediate_dim=14336, num_layers=32, num_heads=32, num_kv_heads=8, max_seq_len=4096
)
VOCAB = 128256
TENSOR_AXES = LLAMA_8B.tensor_axes


def subject_of(
    config: LlamaConfig, *, positions: int, global_batch: int | None = None, dtype=jnp.bfloat16
) -> SearchSubject:
    Vocab = hax.Axis("vocab", VOCAB)
    parameters = tuple(leaves(cast(abstract(lambda: config.build(Vocab, key=jax.random.PRNGKey(0))), np.dtype(dtype))))
    training = global_batch is not None
    activations = transformer_activations(
        config, batch=("batch", 1), positions=positions, vocab=VOCAB, chunk=128, dtype=np.dtype(jnp.bfloat16)
    )
    sizes = {axis.name: axis.size for axis in config.axes.values()}
    return SearchSubject(
        training=training,
        parameters=parameters,
        statistics=tuple(
            Leaf(f"optimizer.{slot}.{x.path}", x.axes, x.dtype) for slot in ("mu", "nu") for x in parameters if training
        ),
        frozen=frozenset(),
        activations=tuple(Leaf(a.name, a.axes, np.dtype(a.dtype)) for a in activations),
        batch_axis="batch",
        axes=ModelAxes(sizes={**sizes, "vocab": VOCAB, "position": positions}, known=KNOWN_AXES, aliases=ALIASES),
        tensor_axes=config.tensor_axes,
        layers=config.num_layers,
        summed=2 * config.num_layers,
        positions=positions,
        global_batch=global_batch,
        flops_per_token=(6.0 if training else 2.0) * config.matmul_parameters(VOCAB),
        compute_bytes=2,
    )


@pytest.mark.parametrize(("kv", "groups", "mlp", "devices"), [(8, 16, 53248, 128), (12, 1, 4096, 8), (4, 7, 96, 24)])
def test_tensor_ways_are_those_that_divide(kv, groups, mlp, devices):
    sizes = {"embed": 64 * devices, "mlp": mlp, "kv_head": kv, "q_heads_per_group": groups, "vocab": devices * 10}
    found = {c.tensor_ways for c in candidates(sizes, tensor_axes=TENSOR_AXES, devices=devices, global_batch=None)}
    legal = {
        a * b
        for a, b in itertools.product(range(1, devices + 1), repeat=2)
        if devices % (a * b) == 0 and kv % a == 0 and groups % b == 0 and mlp % (a * b) == 0
    }
    assert found == legal


def test_a_training_batch_is_cut_into_whole_microbatches():
    sizes = {"embed": 4096, "mlp": 14336, "kv_head": 8, "q_heads_per_group": 4, "vocab": 1024}
    found = candidates(sizes, tensor_axes=TENSOR_AXES, devices=16, global_batch=24)
    assert found
    for c in found:
        assert 24 % (c.data * c.rows) == 0
    # 16 ways do not divide 24 rows.
    assert not [c for c in found if c.data == 16]


@pytest.mark.parametrize("candidate", candidates(
    {"embed": 4096, "mlp": 14336, "kv_head": 8, "q_heads_per_group": 4, "vocab": VOCAB}, tensor_axes=TENSOR_AXES,
    devices=64, global_batch=None
)[::5], ids=str)  # fmt: skip
def test_argument_bytes_are_those_of_the_mesh_it_writes(candidate):
    subject, pod = subject_of(LLAMA_8B, positions=128), parse_accelerator("v6e-64")
    options = yaml.safe_load(yaml.safe_dump(candidate.mesh_options()))
    resolved = resolve(MeshConfig(**options), subject.axes, devices=64)
    expected = 0
    for leaf in subject.parameters:
        mapping = resolved.mappings.params_at(leaf.path)
        cut = [axis for name in leaf.names for axis in mapping.mesh_axes(name)]
        ways = np.prod([resolved.spec.shape[axis] for axis in cut], dtype=int)
        expected += int(np.prod([size for _, size in leaf.axes])) * 2 // ways
    assert estimate(candidate, subject, pod).argument_bytes == expected


def test_fsdp_gathers_what_the_computation_needs_whole():
    subject, pod = subject_of(LLAMA_8B, positions=128), parse_accelerator("v6e-64")
    price = estimate(Candidate(data=16, model=4), subject, pod)
    # Everything but the norms (whole in the model axis) is cut 4 ways in use; norms have `embed` alone.
    matrices = sum(np.prod([s for _, s in x.axes]) for x in subject.parameters if "norm" not in x.path)
    norms = sum(np.prod([s for _, s in x.axes]) for x in subject.parameters if "norm" in x.path)
    gathered = (matrices / 4 + norms) * 2
    # An 8 × 8 v6e slice has no closed ring: 16 devices take data in over two links at the worst place.
    intake = pod.generation.ici_link_bandwidth * 2
    assert price.gathers == pytest.approx(gathered * 15 / 16 / intake, rel=0.05)
    assert estimate(Candidate(data=16, model=4, fsdp=False), subject, pod).gathers == 0
    assert estimate(Candidate(data=64, model=1), subject, pod).tensor == 0


def test_rematerialization_costs_a_third_and_saves_memory():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=128), parse_accelerator("v6e-128")
    with_, without = (estimate(Candidate(data=128, model=1, remat=r), subject, pod) for r in (True, False))
    assert with_.compute == pytest.approx(without.compute * 4 / 3)
    assert with_.activation_bytes < without.activation_bytes
    # Accumulating over microbatches gathers the parameters again for each.
    base = Candidate(data=32, model=4, remat=True, rows=4)
    four = estimate(Candidate(data=32, model=4, remat=True, rows=1), subject, pod)
    assert four.gathers == pytest.approx(4 * estimate(base, subject, pod).gathers)
    assert four.tokens == 128 * 4096


def verdict_of(candidate: Candidate, *, seconds: float, tokens: int, needed: int = 0) -> ProgramVerdict:
    mesh = MeshSpec.of(data=candidate.data, model=candidate.model)
    times = {"lower_seconds": 0.0, "compile_seconds": 0.0}
    if needed:
        refusal = OutOfMemory(needed=needed, available=int(30.75 * GIB), allocations=(), message="")
        return ProgramVerdict(name="score", outcome=Refused(name="score", mesh=mesh, refusal=refusal, **times))
    memory = MemoryFigures(argument=GIB, output=0, alias=0, temp=GIB, generated_code=0)
    work = Workload(
        program="score", tokens=tokens, unit="tokens", items=tokens, flops_full=1.0, flops_causal=1.0, executions=1,
        reason="",
    )  # fmt: skip
    return ProgramVerdict(
        name="score",
        outcome=Compiled(
            name="score", mesh=mesh, memory=memory, figures=None, text_error=None, coordinates=None, **times
        ),
        time=StepTime(cycles=seconds, kernels_at_peak=0.0, kernels_expected=0.0, memory=0.0, links=()),
        workload=work,
    )


def test_what_the_compiler_says_decides():
    subject, pod = subject_of(LLAMA_405B, positions=128), parse_accelerator("v4-256")
    asked: list[Candidate] = []

    def compile_candidate(candidate: Candidate) -> ProgramVerdict:
        asked.append(candidate)
        if len(asked) == 1:
            return verdict_of(candidate, seconds=1.0, tokens=1, needed=40 * GIB)
        tokens = candidate.rows * candidate.data * 128
        return verdict_of(candidate, seconds=tokens * (3.0 if len(asked) == 2 else 1.0 + len(asked)), tokens=tokens)

    result = search(subject, pod, compile_candidate=compile_candidate)
    # What was refused does not count; beside the best three the best of each other kind is compiled.
    kinds = [c.kind for c in asked]
    assert len(asked) == 4 + len(set(kinds[4:])) and not set(kinds[4:]) & set(kinds[1:4])
    # The layout that was refused comes again with fewer rows at the most.
    assert all(c.rows < asked[0].rows for c in asked[1:] if replace(c, rows=1) == replace(asked[0], rows=1))
    assert result.best is not None and result.best.candidate == asked[1]
    assert result.compiled[-1].candidate == asked[0]
    found = yaml.safe_load(result.fragment({"trainer.per_device_eval_parallelism": asked[1].rows}))
    assert found["trainer"]["mesh"] == asked[1].mesh_options()
    assert found["trainer"]["per_device_eval_parallelism"] == asked[1].rows
    said = {n.change: n.why_not for n in result.neighbours}
    assert "GiB" in said["parameters replicated over data"]
    assert all(said.values())


@pytest.mark.parametrize("refused", [(), (0,), (0, 1, 2)], ids=str)
def test_what_is_compiled_next_is_said_beforehand(refused):
    """In waves of different layouts, as many as are wanted: whatever comes of one, all of a wave are asked for."""
    subject, pod = subject_of(LLAMA_405B, positions=128), parse_accelerator("v4-256")
    asked: list[Candidate] = []
    waves: list[list[Candidate]] = []

    def compile_candidate(candidate: Candidate) -> ProgramVerdict:
        asked.append(candidate)
        return verdict_of(candidate, seconds=1.0, tokens=1, needed=40 * GIB if len(asked) - 1 in refused else 0)

    search(subject, pod, compile_candidate=compile_candidate, ahead=lambda ones: waves.append([*ones]))
    first, second = waves[0], waves[1]
    assert asked[:3] == first and len({replace(c, rows=1) for c in first}) == 3
    # As many more as were refused; then the best of each other kind.
    assert len(second) == len(refused) or not refused
    if refused:
        assert asked[3 : 3 + len(second)] == second
    announced = [candidate for wave in waves for candidate in wave]
    assert set(asked) <= set(announced)
    assert len(asked) == len(set(asked)) == 3 + len(refused) + len(asked[3 + len(refused) :])
    kinds = [c.kind for c in asked[3 + len(refused) :]]
    assert len(kinds) == len(set(kinds))


def test_nothing_fits():
    subject, pod = subject_of(LLAMA_405B, positions=128), parse_accelerator("v4-16")
    result = search(subject, pod, compile_candidate=lambda c: pytest.fail("nothing is worth compiling"))
    assert result.best is None and result.fitting == 0
    assert result.closest is not None
    # 8 chips hold an eighth of the weights each at best.
    assert result.closest.estimate.argument_bytes > 94 * GIB


def test_without_a_compiler_arithmetic_ranks_and_the_report_says_so():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=64), parse_accelerator("h100x16")
    result = search(subject, pod, compile_candidate=None)
    assert result.best is not None and not result.compiled and len(result.ranked) > 1
    seconds = [tried.estimate.seconds_per_token for tried in result.ranked]
    assert result.best == result.ranked[0] and seconds == sorted(seconds)
    assert all(tried.estimate.fits(pod.hbm_bytes) for tried in result.ranked)
    text = render(result, target="h100x16")
    assert "nothing was compiled: arithmetic ranks them" in text and "best by arithmetic; to paste:" in text
    assert len(search_to_json(result, target="h100x16")["by_arithmetic"]) == len(result.ranked)


def test_parameters_are_cut_over_all_of_the_batch_a_part_of_it_or_none():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=64), parse_accelerator("v6e-64")
    found = candidates(subject.axes.sizes, tensor_axes=TENSOR_AXES, devices=64, global_batch=64)
    whole_batch = {c for c in found if c.model == c.rows == 1 and c.remat is True}
    assert {(c.kind, c.replica, c.data) for c in whole_batch} == {
        ("whole", 1, 64), ("cut", 1, 64), *(("replica", 64 // data, data) for data in (2, 4, 8, 16, 32)),
    }  # fmt: skip
    for candidate in whole_batch:
        resolved = resolve(MeshConfig(**candidate.mesh_options()), subject.axes, devices=64)
        assert resolved.batch_ways == candidate.batch_ways == 64
        assert resolved.spec.shape["replica"] == candidate.replica
        price = estimate(candidate, subject, pod)
        assert not price.problem
        elements = sum(np.prod([size for _, size in x.axes]) for x in (*subject.parameters, *subject.statistics))
        ways = candidate.data if candidate.fsdp else 1
        assert price.argument_bytes == pytest.approx(elements * 2 / ways, rel=0.01)


def test_replicas_gather_over_fewer_chips_and_reduce_over_all():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=64), parse_accelerator("v6e-64")
    cut, eight, whole = (
        estimate(c, subject, pod)
        for c in (
            Candidate(data=64, model=1),
            Candidate(data=8, replica=8, model=1),
            Candidate(data=64, model=1, fsdp=False),
        )
    )
    # An 8 × 8 slice: the whole of it takes data in over two links at its corner, one side of it over one.
    elements = sum(np.prod([size for _, size in x.axes]) for x in subject.parameters)
    link = pod.generation.ici_link_bandwidth
    assert cut.gathers == pytest.approx(2 * 2 * elements * 63 / 64 / (2 * link), rel=0.02)
    assert eight.gathers == pytest.approx(2 * 2 * elements * 7 / 8 / link, rel=0.02)
    assert whole.gathers == 0
    # In 4 bytes: scattered over eight, what is left summed over the other eight; or summed whole over all.
    scattered = 4 * elements * 7 / 8 / link
    assert eight.gradients == pytest.approx(scattered + 2 * 4 * elements / 8 * 7 / 8 / link, rel=0.02)
    assert whole.gradients == pytest.approx(2 * 4 * elements * 63 / 64 / (2 * link), rel=0.02)


def test_hbm_sees_weights_and_activations_in_every_pass():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=64), parse_accelerator("v6e-64")
    one, two = (estimate(Candidate(data=64, model=1, rows=1, remat=r), subject, pod) for r in (True, False))
    elements = sum(np.prod([size for _, size in x.axes]) for x in subject.parameters)
    state = 3 * elements * 2 // 64
    named = sum(np.prod([s for n, s in x.axes if n != "batch"]) * 2 for x in subject.activations
                if x.path not in ("embedded tokens",) and not x.path.startswith("logits")
                and constrained_by(x.path) != "attention")  # fmt: skip  # Those are queries, keys and values once more.
    logits = 4096 * VOCAB * 4
    each = elements * 2 + 2 * (LLAMA_8B.num_layers * named + logits)
    assert one.memory * pod.hbm_bandwidth == pytest.approx(4 * each + 2 * state, rel=0.01)
    assert two.memory * pod.hbm_bandwidth == pytest.approx(3 * each + 2 * state, rel=0.01)


def test_a_refused_layout_is_tried_with_fewer_rows():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=512), parse_accelerator("v6e-64")
    asked: list[Candidate] = []

    def compile_candidate(candidate: Candidate) -> ProgramVerdict:
        asked.append(candidate)
        needed = 40 * GIB if candidate.rows == asked[0].rows else 0
        return verdict_of(candidate, seconds=1.0, tokens=1, needed=needed)

    result = search(subject, pod, compile_candidate=compile_candidate)
    assert result.best is not None and result.best.candidate.rows < asked[0].rows
    assert replace(asked[0], rows=1) in [replace(c, rows=1) for c in asked[1:]]


@pytest.mark.parametrize("fastest", [1, 2, 4])
def test_where_arithmetic_sees_no_difference_the_compiler_is_asked_over_how_many_devices_parameters_lie(fastest):
    """From layout to layout, as long as each is faster than the one before; no further, and each once."""
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=512), parse_accelerator("v5p-128")
    asked: list[Candidate] = []

    def compile_candidate(candidate: Candidate) -> ProgramVerdict:
        asked.append(candidate)
        away = abs(math.log2(candidate.replica / fastest)) if candidate.fsdp else 9.0
        tokens = candidate.batch_ways * candidate.rows * 4096
        return verdict_of(candidate, seconds=tokens * (candidate.tensor_ways + away / 100), tokens=tokens)

    result = search(subject, pod, compile_candidate=compile_candidate, compiled=1)
    assert result.best is not None and result.best.candidate.tensor_ways == 1
    best, prices = result.best.candidate, {}
    for n in range(6):
        other = replace(best, replica=2**n, data=64 >> n)
        prices[2**n] = estimate(other, subject, pod).seconds_per_token
    assert best.replica == fastest
    alike = {n for n in (fastest // 2, 2 * fastest) if n and prices[n] <= 1.01 * prices[fastest]}
    assert alike and alike <= {
        c.replica for c in asked if replace(c, replica=1, data=64) == replace(best, replica=1, data=64)
    }
    assert len(asked) == len(set(asked)) < 8


@pytest.mark.parametrize(("seconds", "best"), [(0.5, True), (5.0, False)])
def test_the_layout_as_configured_is_in_the_list(seconds, best):
    subject, pod = subject_of(LLAMA_405B, positions=128), parse_accelerator("v4-256")
    own = verdict_of(Candidate(data=16, model=8), seconds=seconds, tokens=1)
    result = search(
        subject, pod, compile_candidate=lambda c: verdict_of(c, seconds=1.0, tokens=1), configured=own, compiled=1
    )
    text, plain = render(result, target="v4-256"), search_to_json(result, target="v4-256")
    assert f"as configured: 2.00 GiB, {1 / seconds:,.0f} tokens/s" in text
    assert ("none of them is faster than the layout as configured" in text) == best
    assert plain["as_configured_is_best"] is best and plain["as_configured"]["seconds_per_token"] == seconds


def test_every_speed_is_of_what_was_compiled_or_says_that_it_is_not():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=64), parse_accelerator("v6e-64")
    result = search(subject, pod, compile_candidate=lambda c: verdict_of(c, seconds=1.0, tokens=1), compiled=1)
    assert result.neighbours
    for neighbour in result.neighbours:
        spoken = neighbour.why_not
        if "slower" in spoken or "as fast" in spoken:
            assert spoken.startswith("compiled: ") or "not compiled" in spoken


def test_a_runs_own_rules_are_kept_where_they_have_a_meaning():
    given = {"pairs": {"mlp": "data", "head_size": "data"}, "o_proj": {"heads": ["model", "group"], "embed": None}}
    cut, grouped, whole = (
        Candidate(data=8, model=1),
        Candidate(data=2, model=2, group=2),
        Candidate(data=8, model=1, fsdp=False),
    )
    assert cut.mesh_options(given)["overrides"] == {"pairs": given["pairs"], "o_proj": {"embed": None}}
    assert grouped.mesh_options(given)["overrides"] == given
    # What leaves the parameters whole over `data` cuts none of them over it.
    assert whole.mesh_options(given)["overrides"] == {"o_proj": {"embed": None}}
    assert "overrides" not in cut.mesh_options()


def test_a_runs_own_rules_are_in_the_price_and_in_what_is_to_be_pasted():
    subject, pod = subject_of(LLAMA_8B, positions=4096, global_batch=64), parse_accelerator("v6e-64")
    plain = Candidate(data=64, model=1, remat=True)
    # Without `embed`, `lm_head` is cut along its other axis and takes as much; with neither it is whole.
    rules = {"lm_head": {"embed": None}}
    own = replace(subject, overrides=rules)
    head = next(leaf for leaf in subject.parameters if leaf.path == "lm_head.weight")
    size = int(np.prod([size for _, size in head.axes])) * head.dtype.itemsize
    more = estimate(plain, own, pod).argument_bytes - estimate(plain, subject, pod).argument_bytes
    assert more >= size * 63 // 64
    result = search(own, pod, compile_candidate=lambda c: verdict_of(c, seconds=1.0, tokens=1))
    assert result.best is not None and result.best.candidate.fsdp
    assert yaml.safe_load(result.fragment())["trainer"]["mesh"]["overrides"] == rules


LONG_8B = replace(LLAMA_8B, max_seq_len=131_072)


def long_subject(rows: int) -> SearchSubject:
    """Llama 3.1 8B on sequences of 131,072 tokens; attention over the causal half is 1.3 times its matmuls."""
    subject = subject_of(LONG_8B, positions=131_072, global_batch=rows, dtype=jnp.float32)
    return replace(subject, flops_per_token=subject.flops_per_token + 6.0 * 32 * 4096 * 131_072)


def test_positions_of_long_sequences_are_cut_too():
    sizes = {"embed": 4096, "mlp": 14336, "kv_head": 8, "q_heads_per_group": 4, "vocab": VOCAB}
    given = {"tensor_axes": TENSOR_AXES, "devices": 16, "global_batch": 16}
    found = candidates({**sizes, "position": 32_768}, **given)
    assert {c.context for c in found} == {1, 2, 4, 8, 16}
    assert all(c.replica * c.data * c.context * c.tensor_ways == 16 for c in found)
    # As many as 2,048 positions stay on a device; an odd number of runs is none of zigzag order.
    assert {c.context for c in candidates({**sizes, "position": 32_770}, **given)} == {1}
    assert {c.context for c in candidates({**sizes, "position": 16_384}, **given)} == {1}
    assert {c.context for c in candidates({**sizes, "position": 131_072}, **{**given, "global_batch": None})} == {1}
    other = {**given, "tensor_axes": (*TENSOR_AXES, ("channel",))}
    assert {c.context for c in candidates({**sizes, "channel": 4096, "position": 32_768}, **other)} == {1}


@pytest.mark.parametrize(
    ("layout", "exchange"),
    [
        (dict(data=8, context=8, model=1), "gather"),
        (dict(data=2, context=32, model=1), "gather"),
        (dict(data=1, context=8, model=8), "gather"),
    ],
)
def test_what_is_exchanged_is_that_of_the_mesh_it_writes(layout, exchange):
    """Forward twice and backward once, 64 rows over `data`; the arithmetic of one layer has tests of its own."""
    subject, pod = long_subject(64), parse_accelerator("v6e-64")
    candidate = Candidate(**layout, remat=True)
    prices = ContextParallelCost(accelerator=pod, backward=True, itemsize=2, attended=0.5)
    options = MeshConfig(**candidate.mesh_options())
    found = resolve(options, subject.axes, devices=64, hbm_bytes=pod.hbm_bytes, prices=prices)
    assert (found.method, found.position_ways) == (exchange, candidate.context)
    once = context_parallel_seconds(
        subject.axes.sizes,
        found.mappings,
        Network.of(found.spec, pod),
        rows=1,
        forward=2,
        backward=True,
        itemsize=2,
    )
    price = estimate(candidate, subject, pod)
    assert price.context_parallel == pytest.approx(64 // candidate.data * 32 * once) and once > 0
    assert estimate(Candidate(data=64, model=1, remat=True), subject, pod).context_parallel == 0


def test_why_a_sequence_of_128k_is_cut():
    """FSDP alone keeps 32 GiB of layer inputs for a row; tensor parallelism that divides leaves them whole."""
    subject, pod = long_subject(64), parse_accelerator("v6e-64")
    fsdp, context, tensor = (
        estimate(Candidate(**layout, remat=True), subject, pod)
        for layout in (dict(data=64, model=1), dict(data=16, context=4, model=1), dict(data=8, model=8))
    )
    assert context.fits(pod.hbm_bytes) and not fsdp.fits(pod.hbm_bytes) and not tensor.fits(pod.hbm_bytes)
    assert fsdp.kept_bytes > 32 * GIB > 4 * context.kept_bytes - 4 * GIB
    assert context.argument_bytes == fsdp.argument_bytes


@pytest.mark.slow
@pytest.mark.parametrize("rows", [32, 64])
def test_a_search_for_128k_cuts_positions_and_says_why_the_others_lose(rows):
    subject, pod = long_subject(rows), parse_accelerator("v6e-64")

    def compile_candidate(candidate: Candidate) -> ProgramVerdict:
        price = estimate(candidate, subject, pod)
        return verdict_of(candidate, seconds=price.seconds, tokens=price.tokens)

    result = search(subject, pod, compile_candidate=compile_candidate, compiled=2)
    assert result.best is not None and result.best.candidate.context > 1
    options = yaml.safe_load(result.fragment())["trainer"]["mesh"]
    assert options["compute_mapping"] == {"position": "context"} and options["attention_mapping"] == "auto"
    why = {neighbour.change: neighbour.why_not for neighbour in result.neighbours}
    alone = next(text for change, text in why.items() if change.startswith("context 1, FSDP alone"))
    assert alone == "sizes and rows do not divide so" if rows < 64 else "> 31.25 GiB" in alone
    assert why["context 1, no FSDP"] == "sizes and rows do not divide so"
    both = next(text for change, text in why.items() if change.startswith("context 1, FSDP and tensor parallelism"))
    assert "slower a token" in both or "> 31.25 GiB" in both
