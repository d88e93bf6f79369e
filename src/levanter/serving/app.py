"""`app`: the ASGI application. It needs no port: tests call it in their own process."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from levanter.io.package_version import version
from levanter.serving import chat, completions, openapi, tokenizer_endpoints
from levanter.serving.errors import (
    ApiError,
    JsonResponse,
    api_error_response,
    http_error_response,
    internal_error_response,
)
from levanter.serving.metrics import UNROUTED, RequestRejected
from levanter.serving.responses import TokenStrings
from levanter.serving.service import Service

Application: TypeAlias = Starlette


def app(service: Service, *, routes: Sequence[BaseRoute] = (), middleware: Sequence[Middleware] = ()) -> Starlette:
    """The application of a service; its engine runs while the application does (ASGI's lifespan).

    Args:
        service: one model and its engine. Handlers access it as `request.app.state.service`.
        routes: further routes: the web page, metrics.
        middleware: middleware in front of all routes, the outermost first.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        # The engine starts and ends with the application, so a test that runs the application runs the engine too.
        async with service.running():
            yield

    async def handle_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        # Errors without a reason are failures of admitted requests, which `ChoiceEnded` counts.
        if error.reason is not None:
            service.observe(RequestRejected(route=_route(request), reason=error.reason, status=error.status))
        return await api_error_response(request, error)

    async def handle_http_error(request: Request, error: Exception) -> Response:
        answer = await http_error_response(request, error)
        # The client chooses the path, so the event does not contain it.
        service.observe(RequestRejected(route=UNROUTED, reason="absent", status=answer.status_code))
        return answer

    application = Starlette(
        routes=[*ROUTES, *routes],
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={
            ApiError: handle_api_error,
            HTTPException: handle_http_error,
            # Starlette re-raises after this response, so that the error reaches the log.
            Exception: internal_error_response,
        },
    )
    application.state.service = service
    # One cache of token strings for all requests.
    application.state.texts = TokenStrings(service.reader.tokenizer)
    return application


def _route(request: Request) -> str:
    """The path of a request's route, with its parameters by name: a label that clients cannot choose."""
    route = request.scope.get("route")
    return str(getattr(route, "path", UNROUTED))


def _service(request: Request) -> Service:
    return cast(Service, request.app.state.service)


async def health(request: Request) -> Response:
    """Answers `GET /health`: whether the engine runs."""
    service = _service(request)
    # Liveness: a server that is shutting down is healthy. A launcher may restart a process that is not.
    return JsonResponse({"status": "ok" if service.healthy else "failed"}, status=200 if service.healthy else 503)


async def ready(request: Request) -> Response:
    """Answers `GET /ready`: whether requests are admitted."""
    service = _service(request)
    # Readiness: a load balancer stops sending requests to a server that is shutting down.
    admits = service.state == "ready" and service.healthy
    return JsonResponse({"status": service.state if service.healthy else "failed"}, status=200 if admits else 503)


async def models(request: Request) -> Response:
    """Answers `GET /v1/models`."""
    service = _service(request)
    return JsonResponse({"object": "list", "data": [_model(service, name) for name in service.names]})


async def model(request: Request) -> Response:
    """Answers `GET /v1/models/{name}`."""
    service, name = _service(request), request.path_params["name"]
    if name not in service.names:
        # The name is cut, so that a client cannot make the response as long as its path.
        raise ApiError(404, f"model: {name[:200]!r} is not served here", reason="absent", code="model_not_found")
    return JsonResponse(_model(service, name))


async def interface(request: Request) -> Response:
    """Answers `GET /openapi.json`."""
    del request
    return JsonResponse(openapi.document(version()))


def _model(service: Service, name: str) -> dict:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "levanter",
        # All names are of one model; the first is that in responses.
        "root": service.names[0],
        "max_model_len": service.context,
    }


ROUTES: Sequence[BaseRoute] = (
    Route("/health", health),
    Route("/ready", ready),
    Route("/openapi.json", interface),
    Route("/v1/models", models),
    # `path` accepts slashes, which names of models on the Hugging Face Hub contain.
    Route("/v1/models/{name:path}", model),
    Route("/v1/tokens", tokenizer_endpoints.tokens, methods=["POST"]),
    Route("/tokenize", tokenizer_endpoints.tokenize, methods=["POST"]),
    Route("/detokenize", tokenizer_endpoints.detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_endpoints.tokenizer_info),
    Route(chat.PATH, chat.chat_completions, methods=["POST"]),
    Route(completions.PATH, completions.completions, methods=["POST"]),
)
"""The routes of every application."""
