"""The web page of a server: a chat with the model, the plan, and the load.

It is one file that sends requests to this server only. Its content security policy allows its own script and style, by
their digests, and requests to its own origin. Text of the model is inserted as text, never as markup.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from levanter.html import document, style_sheet
from levanter.serving.errors import JsonResponse
from levanter.serving.metrics import CONTENT_TYPE, Metrics
from levanter.serving.service import Service


@dataclass(frozen=True, kw_only=True)
class PageData:
    """The data that the page shows.

    Attributes:
        metrics: the metrics.
        service: one model and its engine.
        plan: the report of the run's plan.
    """

    metrics: Metrics
    service: Service
    plan: str


def page_routes(data: PageData) -> Sequence[BaseRoute]:
    """The routes of the page, its data, and the metrics.

    Args:
        data: the data.
    """
    # Rendered once: the page is the same for every request, and its digests must match it.
    text, headers = render_page()

    async def at_root(request: Request) -> Response:
        del request
        return Response(text, media_type="text/html", headers=headers)

    async def status(request: Request) -> Response:
        del request
        service, metrics = data.service, data.metrics
        return JsonResponse(
            {
                "model": service.names[0],
                "version": metrics.facts.version,
                "devices": metrics.facts.devices,
                # `state` does not say whether the engine's thread still runs.
                "state": service.state if service.healthy else "failed",
                "context": service.context,
                "tokens": metrics.tokens,
                "load": asdict(service.load),
            },
            headers={"Cache-Control": "no-store"},
        )

    async def plan(request: Request) -> Response:
        del request
        return JsonResponse({"report": data.plan})

    async def prometheus(request: Request) -> Response:
        del request
        return Response(data.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return (Route("/", at_root), Route("/status", status), Route("/plan", plan), Route("/metrics", prometheus))


def render_page() -> tuple[str, Mapping[str, str]]:
    """The page, and the headers that restrict what it may do."""
    folder = resources.files(__name__)
    body, css, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    # The digest covers the text between the tags exactly, so both are made before they are inserted.
    style = style_sheet(css)
    text = document(title="Levanter", style=style, body=body, script=script)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
