"""A model over HTTP, for clients of OpenAI's interface.

One event loop handles HTTP and one thread runs the engine. Requests go to that thread through an `Inbox`; tokens come
back as `Delivery` values, which `Service` routes to the `PendingRequest` that waits for them. Starlette and uvicorn are
imported only in this package.

- `app(service)` is the ASGI application; a `Service` is one model and its engine.
- `ServerEvent` values (`serving.metrics`) report what happens to observers; the metrics are computed from them.
"""

from importlib.util import find_spec

NOT_INSTALLED = "a server needs starlette and uvicorn: pip install 'levanter-fork[serve]'"


def is_installed() -> bool:
    """Whether the packages that implement HTTP are installed."""
    return find_spec("starlette") is not None and find_spec("uvicorn") is not None
