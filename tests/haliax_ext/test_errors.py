"""Errors: what a message carries, and how several become one."""

import pytest

from haliax_ext.errors import (
    AxisCollisionError,
    IndivisibleError,
    ManyShardingErrors,
    MeshError,
    ReplicationError,
    ShardingError,
    UnknownAxisError,
    gib,
    named_shape,
    nearest,
    raise_all,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    "kind", [MeshError, UnknownAxisError, AxisCollisionError, IndivisibleError, ReplicationError, ManyShardingErrors]
)
def test_users_can_catch_any_of_them(kind):
    assert issubclass(kind, ShardingError)
    assert issubclass(kind, ValueError)


def test_the_suggestion_follows_the_problem():
    error = IndivisibleError("12 heads by 8", path="q_proj.weight", suggestion="use 4")
    assert str(error) == "12 heads by 8\n  → use 4"
    assert (error.path, error.problem, error.suggestion) == ("q_proj.weight", "12 heads by 8", "use 4")
    assert str(ShardingError("plain")) == "plain"


def test_nothing_one_and_many():
    raise_all([])
    one = MeshError("a")
    with pytest.raises(MeshError) as caught:
        raise_all([one])
    assert caught.value is one
    with pytest.raises(ManyShardingErrors) as many:
        raise_all(iter([one, UnknownAxisError("b", suggestion="c")]))
    assert str(many.value) == "2 sharding errors:\n[1] a\n[2] b\n  → c"
    assert many.value.errors[0] is one


def test_formats():
    assert named_shape({"layers": 32, "mlp": 8192}) == "[layers 32, mlp 8192]"
    assert named_shape([]) == "[]"
    assert [gib(n) for n in (0, 1023, 1536, 3 << 20, 135_291_469_824)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 MiB",
        "126.00 GiB",
    ]


def test_near_words():
    assert nearest("embd", ["embed", "mlp", "vocab"]) == ["embed"]
    assert nearest("zzz", ["embed"]) == []
