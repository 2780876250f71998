"""Everything around generation: models, health, metrics, tokenizer."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from server.api.body import StrictRoute
from server.api.checks import check_model, require, template_variables
from server.api.context import ServerContext
from server.api.conversation import check_tools
from server.api.errors import ApiError
from server.api.lengths import check_messages, check_texts
from server.api.sampling import check_token_ids
from server.api.schemas import DetokenizeRequest, TokenizeRequest
from server.text.codec import TextCodec
from server.version import version


class Status(TypedDict):
    """Why a probe fails."""

    status: str


_NOT_NOW: dict[int | str, dict[str, Any]] = {503: {"model": Status}}
#: Only success is plain text; refusals are JSON here, too.
_METRICS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}


def ops_router(context: ServerContext) -> APIRouter:
    """Health, metrics, models and tokenizer routes."""
    router = APIRouter()
    _add_health(router, context)
    _add_models(router, context)
    tokenizer = APIRouter(route_class=StrictRoute)
    _add_tokenizer(tokenizer, context)
    router.include_router(tokenizer)
    return router


def _add_health(router: APIRouter, context: ServerContext) -> None:
    def health() -> Response:
        """200 while the server takes requests, else 503 with the reason."""
        status = context.status()
        if status == "ready":
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": status}, status_code=503)

    for path in ("/health", "/readyz", "/ping"):
        router.add_api_route(
            path, health, methods=["GET"], tags=["health"], name=path[1:], responses=_NOT_NOW
        )

    @router.get("/livez", tags=["health"], responses=_NOT_NOW)
    async def livez() -> Response:
        """503 if only a restart helps: the engine died, could not start, or hangs."""
        status = context.status()
        if status in ("dead", "failed", "stopped", "stuck"):
            return JSONResponse({"status": status}, status_code=503)
        return JSONResponse({"status": "ok"})

    @router.get("/metrics", tags=["health"], response_class=Response, responses=_METRICS)
    async def metrics(
        names: Annotated[list[str], Query(alias="name[]", default_factory=list)],
    ) -> Response:
        """Prometheus metrics; all, or the samples that are named."""
        up = context.status() == "ready"
        text = context.metrics.render(
            context.engine.info if up else None, step_age=context.engine.step_age, names=names
        )
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", tags=["health"])
    async def server_version() -> dict[str, str]:
        """The version of the server."""
        return {"version": version()}

    @router.get("/load", tags=["health"])
    async def load() -> dict[str, int]:
        """Generation requests being answered now."""
        return {"server_load": context.load}


def _add_models(router: APIRouter, context: ServerContext) -> None:
    def card(name: str) -> dict[str, Any]:
        ready = context.status() == "ready"
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "specserve",
            "root": context.model_name,
            "parent": None,
            "max_model_len": context.engine.info.max_model_len if ready else None,
        }

    @router.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The one model that is served, under each of its names."""
        return {"object": "list", "data": [card(name) for name in context.model_names]}

    @router.get("/v1/models/{model:path}", tags=["models"])
    async def model_card(model: str) -> dict[str, Any]:
        """The served model by its id."""
        check_model(context, model)
        return card(model)


def _add_tokenizer(router: APIRouter, context: ServerContext) -> None:
    @router.post("/tokenize", tags=["tokenizer"])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """The token ids of a text or of a conversation."""
        codec = context.codec()
        check_model(context, body.model)
        text, field = await _text_to_tokenize(context, codec, body)
        check_texts([text], codec, context.engine.info, field)
        special = body.add_special_tokens
        if special is None:
            special = body.messages is None
        [tokens] = await codec.encode([text], add_special_tokens=special)
        return {
            "count": len(tokens),
            "max_model_len": context.engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": (
                [codec.token_piece(token) for token in tokens] if body.return_token_strs else None
            ),
        }

    @router.post("/detokenize", tags=["tokenizer"])
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """The text of token ids; special tokens are written out."""
        codec = context.codec()
        check_model(context, body.model)
        info = context.engine.info
        require(
            len(body.tokens) <= info.max_model_len,
            "tokens",
            f"a list of {len(body.tokens)} ids",
            f"no longer than the context, {info.max_model_len}",
        )
        check_token_ids(body.tokens, info, "tokens")
        text = codec.decode(body.tokens, skip_special_tokens=False)
        return {"prompt": text, "content": text}


async def _text_to_tokenize(
    context: ServerContext, codec: TextCodec, body: TokenizeRequest
) -> tuple[str, str]:
    """The text, and the field it came from."""
    fields = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(fields) > 1:
        raise ApiError(400, "Send only one of prompt, content and messages.", param="prompt")
    variables = template_variables(body)
    if not fields:
        raise ApiError(400, "Send prompt, content or messages.", param="prompt")
    [field] = fields
    if body.messages is not None:
        messages = check_tools(body.messages, codec.template)
        check_messages(messages, codec, context.engine.info)
        text = await codec.write_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )
        return text, field
    text = getattr(body, field)
    return text, field
