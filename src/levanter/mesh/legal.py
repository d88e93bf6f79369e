"""Which sizes a tensor-parallel mesh axis may have for a model: divisibility, with heads understood.

Most axes ask for plain division. `heads` does not: a mesh axis of 16 divides 128 heads, but not 8 `kv_head`, and not
every 4 `q_heads_per_group`. So a size is legal for heads if `expand_heads` would take it, and where it would not, the
remark says which factoring it would take.
"""

from collections.abc import Iterable, Mapping

from haliax_ext.divisibility import SizeVerdict, legal_sizes
from haliax_ext.meshspec import MeshSpec
from levanter.mesh.heads import GROUP_AXIS, KV_HEAD, Q_PER_GROUP, distribute, factor


def model_sizes(
    sizes: Mapping[str, int],
    candidates: Iterable[int],
    *,
    mapped: Iterable[str] = ("heads", "mlp", "vocab"),
    mesh_axis: str = "model",
) -> tuple[SizeVerdict, ...]:
    """Judges candidate sizes of a mesh axis for a model.

    Args:
        sizes: the model's axes.
        candidates: sizes of the mesh axis.
        mapped: the logical axes that go to it; `heads` stands for `kv_head` and `q_heads_per_group`.
        mesh_axis: its name, for the remarks.
    """
    mapped = tuple(mapped)
    plain = [(name, sizes[name]) for name in mapped if name in sizes]
    if "heads" not in mapped or KV_HEAD not in sizes:
        return legal_sizes(plain, candidates)
    kv, groups = sizes[KV_HEAD], sizes.get(Q_PER_GROUP, 1)
    return tuple(_with_heads(verdict, kv, groups, mesh_axis) for verdict in legal_sizes(plain, candidates))


def _with_heads(verdict: SizeVerdict, kv: int, groups: int, mesh_axis: str) -> SizeVerdict:
    size = verdict.size
    done = distribute([mesh_axis], kv_heads=kv, q_per_group=groups, mesh=MeshSpec.of(**{mesh_axis: size}))
    both = factor(size, kv_heads=kv, q_per_group=groups)
    if done is not None:
        whole = size > 1 and not done.kv_head
        return SizeVerdict(
            size=size, blockers=verdict.blockers, remark="K and V are replicated over it" if whole else ""
        )
    if both is not None:
        remark = f"heads divide as {mesh_axis} {both[0]} × {GROUP_AXIS} {both[1]}"
        blockers = ((KV_HEAD, kv, kv % size), (Q_PER_GROUP, groups, groups % size))
    else:
        remark = ""
        blockers = (("heads", kv * groups, kv * groups % size),)
        if not blockers[0][2]:
            blockers = ((KV_HEAD, kv, kv % size), (Q_PER_GROUP, groups, groups % size))
    return SizeVerdict(size=size, blockers=(*blockers, *verdict.blockers), remark=remark)
