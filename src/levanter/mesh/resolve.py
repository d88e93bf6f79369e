"""`resolve`: the configured mesh → mesh axis sizes and mappings, in four steps, each with a value as its result.

    sizes             -1 replaced, products checked                         `MeshSpec`
    heads             defaults, aliases, `heads` in the model's own axes    `MeshRules`
    context_parallel  the mapping inside of attention                       `ContextParallel`
    mappings          names checked, notes collected                        `ResolvedMesh`

It needs the model's logical axes and their sizes (from the abstract model) and the glossary of known names; it needs no
device. Every decision that the user did not write is a note, printed before a run starts.
"""

from levanter.mesh.config import MeshConfig, ModelAxes
from levanter.mesh.context_parallel import Prices, plan_context_parallel
from levanter.mesh.heads import mesh_rules
from levanter.mesh.mappings import ResolvedMesh, resolved_mesh
from levanter.mesh.sizes import resolve_sizes


def resolve(
    config: MeshConfig,
    model: ModelAxes,
    *,
    devices: int,
    granules: int = 1,
    hbm_bytes: int | None = None,
    prices: Prices | None = None,
) -> ResolvedMesh:
    """Resolves sizes, defaults, `heads`, aliases, overrides, and context parallelism.

    Args:
        config: what the user wrote.
        model: its axes.
        devices: how many there are.
        granules: what DCN axes count.
        hbm_bytes: memory of a device, by which `attention_mapping: auto` chooses; None where it is not known.
        prices: seconds of each method of context parallelism on these devices, by which it chooses, too.

    Raises:
        ShardingError: everything that is wrong with sizes and names, together.

    >>> model = ModelAxes(sizes={"embed": 64, "mlp": 128, "kv_head": 2, "q_heads_per_group": 4})
    >>> resolved = resolve(MeshConfig(axes={"data": -1, "model": 4}, split_heads="auto"), model, devices=16)
    >>> print(resolved.spec)
    data 4 × replica 1 × model 2 × group 2 × replica_dcn 1 (DCN)
    >>> print(resolved.mappings.params)
    {mlp: [model, group], kv_head: model, q_heads_per_group: group, embed: data}
    >>> resolved.batch_ways
    4
    """
    memory = config.hbm_bytes(hbm_bytes)
    spec = resolve_sizes(config, devices=devices, granules=granules)
    rules = mesh_rules(config, model, spec)
    context_parallel = plan_context_parallel(config, model, rules, hbm_bytes=memory, prices=prices)
    return resolved_mesh(config, model, rules, context_parallel)
