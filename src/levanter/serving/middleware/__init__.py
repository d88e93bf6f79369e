"""The doors of a server, one behind the other: who comes through all of them reaches a route."""

from collections.abc import Collection, Sequence

from starlette.middleware import Middleware

from levanter.serving.api_key import ApiKey
from levanter.serving.events import Observer
from levanter.serving.limits import LimitsConfig
from levanter.serving.middleware.authentication import RequireKey
from levanter.serving.middleware.body_limit import BodyLimit
from levanter.serving.middleware.http_version import HttpVersionCheck
from levanter.serving.middleware.rate_limit import RequestRate
from levanter.serving.middleware.reject import unobserved
from levanter.serving.middleware.same_origin import SameOrigin


def doors(
    *,
    limits: LimitsConfig,
    key: ApiKey | None = None,
    names: Collection[str] | None = None,
    observe: Observer = unobserved,
) -> Sequence[Middleware]:
    """The doors, the outermost first: what `serving.app.app` takes as its middleware.

    Args:
        limits: what clients may send.
        key: what they must carry; None for nothing.
        names: by which they may call the server; None for any. One without a key that only this machine reaches has
            `serving.origin.LOCAL_NAMES` and its own address.
        observe: is told of whom is turned away.
    """
    found = [Middleware(HttpVersionCheck, observe=observe)]
    if names is not None:
        found.append(Middleware(SameOrigin, names=names, observe=observe))
    # Keys are guessed no faster than requests may come, and a body is read only of who is otherwise welcome.
    if limits.requests_per_minute is not None:
        found.append(Middleware(RequestRate, per_minute=limits.requests_per_minute, observe=observe))
    if key is not None:
        found.append(Middleware(RequireKey, key=key, observe=observe))
    return (*found, Middleware(BodyLimit, limits=limits, observe=observe))
