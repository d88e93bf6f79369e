"""Step time of a compiled program, from the compiler's figures. Modelled, not measured.

The time is a range with one expected figure in it. The low end assumes that everything overlaps: the largest of
compute, HBM traffic, the busiest links, transfers to host memory, and the model's FLOPs at peak. The high end is the
schedule as compiled: all compute, and the part of every collective that the schedule does not hide. *Expected* is the
same with calibrated cycles: `CYCLE_SCALE` times the compiler's.

*Compute* is the compiler's estimated cycles over the clock, plus hand-written kernels, for which the compiler has no
estimate: their FLOPs follow from their shapes, and they run at peak in the low end and at `kernel_efficiency` of it in
the high one. *Model FLOPs* do not count recomputation: 2 for a multiply-add of each matmul parameter and token, three
times that for training, plus attention, all of it or its causal half. *MFU* is model FLOPs over peak, and with the low
end bounded by peak it cannot exceed one.

Not modelled: the host, input, checkpoints, network contention with other jobs, stragglers. Operations without an
estimate are named in `unknown`; with them the ends of the range are lower bounds.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from haliax_ext.hlo import Collective, CompiledFigures, Kernel, Shape
from levanter.hardware import Accelerator
from levanter.plan.calibration import TimeCalibration, calibration, kernel_efficiency
from levanter.plan.comms import Network
from levanter.plan.gpu_kernel_time import TICKS, kernel_shares
from levanter.plan.kernel_cost import kernel_cost

# Seconds that a second of estimated cycles takes, by generation: fitted so that the modelled step time of one published
# run of each equals the published one (`benchmarks/published_step_times.py`, docs/performance.md). Generations
# that are not listed use the compiler's cycles.
CYCLE_SCALE: Mapping[str, float] = {"v4": 0.97, "v5p": 0.8, "v6e": 0.8}

# A lower bound that exceeds the compiled schedule by this factor means that one of the two is wrong.
SUSPECT = 3.0


def mfu(model_flops: float, *, accelerator: Accelerator, seconds: float) -> float:
    """Model FLOPs of a step (all tokens) over those of all chips at bf16 peak in the same time."""
    return model_flops / (accelerator.devices * accelerator.peak_flops() * seconds)


@dataclass(frozen=True, kw_only=True)
class LinkUse:
    """The collectives over one set of mesh axes.

    Attributes:
        over: the mesh axes, as text.
        network: `ici` or `dcn`.
        busy: seconds their links are in use.
        exposed: seconds of that which the schedule does not hide.
        total_bytes: of all of them.
    """

    over: str
    network: str
    busy: float
    exposed: float
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One execution on a pod, in seconds. Modelled, not measured.

    Attributes:
        cycles: the compiler's estimate over the clock.
        cycle_scale: of the generation, see `CYCLE_SCALE`.
        kernels_at_peak: hand-written kernels, grouped products and sorts at peak.
        kernels_expected: the same at `kernel_efficiency`, or as `kernel_cost` expects.
        memory: HBM traffic over HBM bandwidth.
        copies: bytes of copies that have no estimate, over HBM bandwidth.
        transfers: activations sent to host memory, over the bandwidth of one direction of the link to the host.
        links: by mesh axes.
        peak: the model's FLOPs at peak; 0 where they are not known.
        unknown: operations that have no estimate.
        calibration: whether the expected time is calibrated, and the least range.
    """

    cycles: float
    kernels_at_peak: float
    kernels_expected: float
    memory: float
    links: tuple[LinkUse, ...]
    cycle_scale: float = 1.0
    peak: float = 0.0
    copies: float = 0.0
    transfers: float = 0.0
    unknown: tuple[str, ...] = ()
    calibration: TimeCalibration = TimeCalibration()

    @property
    def compute(self) -> float:
        """Seconds of computation: the compiler's estimate, hand-written kernels, and copies that have no estimate."""
        return self.cycles + self.kernels_expected + self.copies

    @property
    def exposed(self) -> float:
        """Communication that the schedule does not hide."""
        return sum(link.exposed for link in self.links)

    @property
    def expected(self) -> float:
        """The expected time: the schedule as compiled, with calibrated cycles, and at least `low`."""
        return max(self._scheduled, self.low)

    @property
    def low(self) -> float:
        """Everything overlapped; for an uncalibrated time also the share of it that the fastest published run took."""
        least, (share, _) = max(self.bounds.values()), self.calibration.spread
        # An uncalibrated schedule may be slower than the chips are, so the published share may lower the
        # bound, but never below the FLOPs at peak.
        return least if share == 1.0 else max(min(least, share * self._scheduled), self.peak)

    @property
    def _scheduled(self) -> float:
        """The schedule as compiled, with calibrated cycles."""
        return self.cycle_scale * self.cycles + self.kernels_expected + self.copies + self.exposed

    @property
    def high(self) -> float:
        """The schedule with the compiler's cycles, or the expected time with its spread, whichever is longer."""
        return max(self.compute + self.exposed, self.calibration.spread[1] * self.expected)

    @property
    def bound_by(self) -> str:
        """The name of the largest lower bound."""
        bounds = self.bounds
        return max(bounds, key=lambda name: bounds[name])

    @property
    def bounds(self) -> dict[str, float]:
        """Lower bounds of the time in seconds, by what sets them; a step takes at least the largest."""
        return {
            # A scale above 1 must not raise a lower bound: the compiler's own cycles are one already.
            "compute": min(1.0, self.cycle_scale) * self.cycles + self.kernels_at_peak,
            "memory": self.memory,
            "links": max((link.busy for link in self.links), default=0.0),
            "peak": self.peak,
            "host transfers": self.transfers,
        }

    @property
    def suspect(self) -> Mapping[str, float]:
        """Lower bounds that cannot be right: those more than `SUSPECT` times the compiled schedule.

        The compiler's cycles include waiting for memory, and the schedule includes exposed communication, so neither
        HBM traffic nor links nor the model's FLOPs can take much longer than the compiled schedule.
        """
        schedule = self.compute + self.exposed
        return {name: seconds for name, seconds in self.bounds.items() if schedule and seconds > SUSPECT * schedule}


def step_time(
    figures: CompiledFigures,
    network: Network,
    *,
    model_flops: float = 0.0,
    causal: bool = True,
    parameters: float | None = None,
    experts: int | None = None,
    attended: float | None = None,
) -> StepTime | None:
    """The time of one execution.

    Args:
        figures: of the program compiled for this pod.
        network: the mesh on the pod.
        model_flops: of one execution over all tokens; 0 if not known.
        causal: whether attention kernels visit the causal half of their blocks only (their masks are not in the text).
        parameters: of the model, which decide whether published runs of its size calibrate the time; None for unknown.
        experts: of each layer, over all devices; None where there are none.
        attended: the share of its pairs of blocks that the busiest device visits, where the kernels' tables of blocks
            are computed on the device; None where they are in the compiled text. With it, kernels hide the collectives
            that run at the same time.

    Returns:
        The range; `None` where the compiler states no cycles or the clock is not known.
    """
    pod = network.accelerator
    is_gpu = pod.generation.gpu is not None
    # Kernels of GPUs are estimated in ticks, in the place of a compiler's cycles.
    clock = TICKS if is_gpu else pod.generation.clock_hz
    if not figures.has_cycles or clock is None:
        return None
    unknown = list(figures.unknown)
    at_peak = expected = 0.0

    def attention_seconds(kernel: Kernel) -> float:
        """Seconds of one execution; 0 for a kernel that is not attention."""
        flops = kernel_flops(kernel, causal=causal, attended=attended)
        return 0.0 if flops is None else flops / pod.peak_flops() / kernel_efficiency(_head_size(kernel))

    for kernel in figures.kernels:
        flops = kernel_flops(kernel, causal=causal, attended=attended)
        shaped = kernel_cost(kernel, pod, experts=experts)
        if flops is not None:
            at_peak += flops / pod.peak_flops() * kernel.times
            expected += attention_seconds(kernel) * kernel.times
        elif shaped is not None:
            at_peak += shaped.at_peak * kernel.times
            expected += shaped.expected * kernel.times
        else:
            unknown.append(f"kernel {kernel.name} ({_executions(kernel.times)}): its cost is unknown")
    for opcode, times in figures.unestimated.items():
        unknown.append(f"{_executions(times)} of {opcode}: the compiler gives no estimate")
    # Without keys that travel, kernels are not credited with hiding collectives: the scales were fitted that way.
    hides = attention_seconds if attended is not None else lambda _: 0.0
    share = kernel_shares(pod).links if is_gpu else 1.0
    links, silent = _link_uses(figures.collectives, network, clock, hides, share)
    return StepTime(
        cycles=figures.total_cycles / clock,
        cycle_scale=CYCLE_SCALE.get(pod.generation.name, 1.0),
        kernels_at_peak=at_peak,
        kernels_expected=expected,
        memory=figures.hbm_bytes / pod.hbm_bandwidth,
        links=links,
        peak=model_flops / (pod.devices * pod.peak_flops()),
        copies=figures.copied_bytes / pod.hbm_bandwidth,
        unknown=tuple(unknown + silent),
        calibration=calibration(pod.generation.name, parameters),
    )


def _executions(times: int) -> str:
    return f"{times} execution{'' if times == 1 else 's'}"


def _link_uses(
    collectives: tuple[Collective, ...],
    network: Network,
    clock: float,
    of_kernel: Callable[[Kernel], float],
    share: float,
) -> tuple[tuple[LinkUse, ...], list[str]]:
    spare_seconds: dict[str, float] = {}
    busy: dict[tuple[str, str], float] = defaultdict(float)
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    nbytes: dict[tuple[str, str], int] = defaultdict(int)
    silent: list[str] = []
    for collective in collectives:
        key = (collective.over, collective.network)
        nbytes[key] += collective.total_bytes
        seconds = network.collective_seconds(collective)
        if seconds is None:
            silent.append(f"{collective.kind} over {collective.over} ({collective.network}): its bandwidth is unknown")
            continue
        seconds /= share
        busy[key] += collective.times * seconds
        # What remains of a collective after the operations scheduled between its start and its end.
        bare = max(0.0, seconds - collective.hidden_cycles / clock)
        for name, kernel in collective.hidden_by:
            # A kernel can hide only as many seconds as it takes; several
            # collectives under one kernel share them.
            spare = spare_seconds.setdefault(name, of_kernel(kernel))
            spare_seconds[name] -= min(spare, bare)
            bare -= min(spare, bare)
        exposed[key] += collective.times * bare
    uses = [
        LinkUse(over=over, network=net, busy=busy[over, net], exposed=exposed[over, net], total_bytes=total)
        for (over, net), total in nbytes.items()
    ]
    return tuple(sorted(uses, key=lambda use: -use.busy)), list(dict.fromkeys(silent))


# Matmuls of [queries × keys × head size] that each attention kernel does over the blocks it visits: scores and values
# forward; dq recomputes the scores and makes dp and dq; dkv recomputes them and makes dp, dv and dk; the fused
# backward shares scores and dp between the two.
_ATTENTION_MATMULS: Mapping[str, int] = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}


def kernel_flops(kernel: Kernel, *, causal: bool, attended: float | None = None) -> float | None:
    """FLOPs of one execution of a known kernel on one device; `None` if it is not known.

    Known are JAX's splash attention kernels: queries [.., heads, seq, head_size], keys [.., kv_heads, seq, head_size].
    """
    for prefix, count in _KNOWN:
        if kernel.name.startswith(prefix):
            return count(kernel, causal, attended)
    return None


def _attended(kernel: Kernel) -> list[Shape]:
    """The operands of a kernel that have heads, positions and features: queries, keys and similar."""
    return [s for s in kernel.operands if s.dtype in ("bf16", "f32", "f16") and len(s.sizes) >= 3]


def _head_size(kernel: Kernel) -> int:
    """Features of a head, of a kernel whose FLOPs are known."""
    return _attended(kernel)[0].sizes[-1]


def _splash(kernel: Kernel, causal: bool, attended: float | None) -> float | None:
    arrays = _attended(kernel)
    which = next((k for k in ("fwd", "dkv", "dq") if f"_{k}" in kernel.name), None)
    if which is None or len(arrays) < 2 or arrays[0].sizes[-1] != arrays[1].sizes[-1]:
        return None
    query, key = arrays[0].sizes, arrays[1].sizes
    if which == "dkv" and any(len(result.sizes) > len(query) for result in kernel.results):
        which = "fused"  # Its name does not say so; that it makes the queries' gradient too, per block of keys, does.
    # Query heads × query positions × key positions.
    pairs = math.prod(query[:-1]) * key[-2]
    if causal:
        by_table = attended is None
        pairs *= _visited_share(kernel.operands, queries=query[-2], keys=key[-2]) if by_table else attended
    return 2.0 * _ATTENTION_MATMULS[which] * pairs * query[-1]


def _visited_share(operands: tuple[Shape, ...], *, queries: int, keys: int) -> float:
    """The share of all blocks that a causal mask makes the kernel visit; those on the diagonal are visited whole.

    The kernel's table of blocks is its first operand: [.., rows of queries, columns of keys], and for a sliding window
    shrunk to as many as any row (or column) visits. Blocks are square. Where the queries are a part of the sequence,
    it is the last part, which visits most and which the others wait for.
    """
    table = next((s.sizes for s in operands if s.dtype in ("s8", "s16", "s32") and len(s.sizes) == 3), None)
    if table is None:
        # Without a table the share is that of the triangle with its diagonal, by positions.
        return (1 + 1 / queries) / 2 if queries == keys else 1.0
    rows, columns = table[-2:]
    if queries < keys:
        # The last `rows` block rows of a causal square: all columns but a triangle above the diagonal.
        return (rows * columns - rows * (rows - 1) / 2) / (rows * columns)
    blocks, visited = max(rows, columns), min(rows, columns)
    # A window of `visited` blocks: a triangle at the beginning, then a band of constant width.
    return (visited * (visited + 1) / 2 + (blocks - visited) * visited) / blocks**2


_KNOWN: tuple[tuple[str, Callable[[Kernel, bool, float | None], float | None]], ...] = (
    ("splash_mha", _splash),
    ("splash_mqa", _splash),
)
