"""What a request says of its drafts, in the engine's terms."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import NO_DRAFTER
from engine.errors import InvalidRequest
from engine.types import EngineInfo, SpeculationParams
from server.api.checks import joined
from server.api.errors import quote
from server.api.schemas import GenerationRequest
from server.text.codec import TextCodec


async def speculation_params(
    codec: TextCodec, body: GenerationRequest, info: EngineInfo, allow_trace: bool
) -> SpeculationParams:
    """How to draft for a request.

    Raises:
        InvalidRequest: it names a drafter that is not loaded, or asks for what is switched off.
    """
    asked, prediction = body.speculation, body.prediction
    tokens: Sequence[int] = ()
    if prediction is not None:
        # What lies beyond the context can never be generated.
        text = codec.beginning(joined(prediction.content), info.max_model_len)
        [tokens] = await codec.encode([text], add_special_tokens=False)
    drafter = asked.drafter if asked is not None else None
    choices = (*info.drafters, NO_DRAFTER)
    if drafter is not None and drafter not in choices:
        loaded = ", ".join(choices)
        raise InvalidRequest(
            f"speculation.drafter is {quote(drafter)}, which is not loaded; choose from: {loaded}.",
            "speculation.drafter",
        )
    trace = bool(asked is not None and asked.trace)
    if trace and not allow_trace:
        raise InvalidRequest(
            "speculation.trace is switched off on this server (allow_trace: false).",
            "speculation.trace",
        )
    wish = asked.num_speculative_tokens if asked is not None else None
    if wish is None and asked is not None and asked.max_draft is not None:
        wish = asked.max_draft
        if not 0 <= wish <= 64:
            raise InvalidRequest(
                f"speculation.max_draft is {wish}; it must be from 0 to 64.",
                "speculation.max_draft",
            )
    return SpeculationParams(
        enabled=asked.enabled if asked is not None else None,
        drafter=drafter,
        num_speculative_tokens=wish,
        prediction=tuple(tokens[: info.max_model_len]),
        trace=trace,
    )
