"""A model over HTTP, for clients of OpenAI's interface.

One event loop speaks HTTP, one thread runs the engine. What is asked goes to that thread through an `Inbox`, what comes
of it comes back as `Delivery` values, to the `Ticket` of who asked. Starlette and uvicorn live here and nowhere else.

- `app(service)` is the ASGI application; a `Service` is one model and its engine.
- What happens is told to observers as `ServerEvent` values (`serving.events`): metrics are made of these.
"""

from importlib.util import find_spec

NOT_INSTALLED = "a server needs starlette and uvicorn: pip install 'levanter[serve]'"


def is_installed() -> bool:
    """Whether the packages that speak HTTP are there."""
    return find_spec("starlette") is not None and find_spec("uvicorn") is not None
