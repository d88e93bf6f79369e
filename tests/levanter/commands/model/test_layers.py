"""Positions that are cut, for the kernel for TPUs: what is no whole block is refused in a ring, noted in a gather."""

import pytest

from haliax_ext.errors import IndivisibleError
from levanter.commands.model.layers import splash_position_checks
from levanter.mesh import MeshConfig, ModelAxes, resolve
from levanter.models import LlamaConfig

pytestmark = pytest.mark.quick


def checked(exchange: str, positions: int, *, backend: str = "splash", order: str | None = None):
    model = LlamaConfig(attn_backend=backend)
    sizes = {"position": positions, "kv_head": 4, "q_heads_per_group": 1, "head_size": 128, "embed": 64, "mlp": 64}
    axes = ModelAxes(sizes=sizes, known=(*sizes, "key_position"))
    mesh = MeshConfig(
        axes={"context": 4},
        compute_mapping={"position": "context"},
        attention_mapping=exchange,
        position_order=order,
    )
    return splash_position_checks(model, resolve(mesh, axes, devices=8), positions=positions)


def test_a_ring_of_runs_that_are_no_whole_blocks_is_refused():
    with pytest.raises(IndivisibleError) as error:
        checked("ring", 1536)
    assert str(error.value) == (
        "trainer.mesh: attention_mapping: in a ring of 4 devices 1536 positions are 8 runs of 192, and the kernel for "
        "TPUs takes runs of whole blocks of 128\n  → make it 1024 or 2048 positions, use fewer devices in the ring, "
        "attention_mapping: gather, or model.attn_backend: blockwise"
    )
    with pytest.raises(IndivisibleError, match=r"4 runs of 64.*\n.*make it 512 positions"):
        checked("ring", 256, order="natural")


def test_what_the_kernel_can_have_is_not():
    assert checked("ring", 2048) == checked("ring", 1536, order="natural") == ()
    assert checked("ring", 1536, backend="blockwise") == checked("heads", 256) == checked("gather", 512) == ()


def test_a_small_part_of_gathered_keys_is_noted():
    (note,) = checked("gather", 256)
    assert note.status == "note"
    assert "a device has 64 positions of a sequence, and the kernel pads them to 128" in note.message
