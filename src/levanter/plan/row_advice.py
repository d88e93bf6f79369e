"""What is said where more rows of text are asked for than fit: how many do, and what would hold them, by arithmetic."""

from dataclasses import replace

from haliax_ext.errors import gib
from levanter.hardware import Accelerator, default_topologies, parse_accelerator
from levanter.inference.capacity import DecodeCost
from levanter.runplan import RunPlan


def serving_of(plan: RunPlan | None) -> DecodeCost | None:
    """What a run that generates text holds and moves; None for other runs."""
    found = None if plan is None else getattr(plan.work, "serving", None)
    return found if isinstance(found, DecodeCost) else None


def too_many_rows(plan: RunPlan, pod: Accelerator | None = None) -> list[str]:
    """What is said of a run that generates text where its devices have too little memory; nothing for other runs.

    Args:
        plan: the run.
        pod: the chips; None for the devices here.
    """
    served, limit = serving_of(plan), plan.target.limit_bytes
    return [] if served is None or limit is None else [what_fits(served, limit, pod)]


def what_fits(served: DecodeCost, limit: int, pod: Accelerator | None, *, room: int | None = None) -> str:
    """What is said where more rows are asked for than fit: how many do, and what would hold them.

    Args:
        served: as asked for.
        limit: bytes of a device.
        pod: the chips; larger ones of its kind are tried.
        room: what Programs take beside their inputs; what is taken for them by default.
    """
    room = served.room if room is None else room
    most = served.fitting(limit, served.context, room=room)
    said = f"{most:,} rows of {served.context:,} positions fit, {served.rows:,} asked"
    ways: list[str] = []
    if most:
        ways.append(f"inference.max_rows: {most} (or auto)")
    if served.dtype != "int8":
        ways += _if_enough(
            served, "inference.cache_dtype: int8", served.fitting(limit, served.context, "int8", room=room)
        )
    held = served.weights
    if not held.integers and held.width > 1:
        smaller = replace(served, weights=replace(held, others=held.others // held.width))
        ways += _if_enough(served, "quantize: int8", smaller.fitting(limit, served.context, room=room))
    context = served.context
    while context > 1024 and served.fitting(limit, context, room=room) < served.rows:
        context //= 2
    if context < served.context and (rows := served.fitting(limit, context, room=room)) >= served.rows:
        ways.append(f"inference.max_seq_len: {context}, {rows} rows")
    if pod is not None:
        ways += _larger_pods(served, limit, pod, room)
    return f"{said}: " + (", or ".join(ways) if ways else "nothing smaller than other weights or more chips")


def _if_enough(served: DecodeCost, what: str, rows: int) -> list[str]:
    more = f"{what}, {rows:,} rows"
    return [more] if rows >= served.rows else [f"{more} only"] if rows else []


def _larger_pods(served: DecodeCost, limit: int, pod: Accelerator, room: int) -> list[str]:
    """The smallest larger pod whose chips, with all of them in tensor parallelism, have room."""
    tensor = served.devices // served.shards
    for chips in default_topologies(pod.generation):
        devices = chips * pod.generation.devices_per_chip
        ways, data = devices // served.shards, served.shards
        if chips <= pod.chips or devices % data or ways % tensor:
            continue
        kv_ways = max(n for n in range(1, served.kv_heads + 1) if served.kv_heads % n == 0 and ways % n == 0)
        group = ways // kv_ways
        if served.query_groups % group:
            break
        held = served.weights
        sharded = (held.total - held.replicated) * tensor // ways
        sharded += served.repeated_weights(kv_ways=kv_ways, group=group)
        smaller = replace(
            served,
            weights=replace(held, integers=0, scales=0, table=0, others=sharded + held.replicated),
            kv_ways=kv_ways,
        )
        rows = smaller.fitting(limit, served.context, room=room)
        if rows >= served.rows:
            name = parse_accelerator(f"{pod.generation.name}-{chips * pod.generation.cores_per_chip}").name
            mesh = " × ".join(
                f"{axis} {size}" for axis, size in (("data", data), ("model", kv_ways), ("group", group)) if size > 1
            )
            return [f"{name} with {mesh}, {rows} rows of {gib(smaller.bytes_of_row(served.context))} a chip"]
    return []
