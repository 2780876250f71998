"""`specserve generate`: one answer on the terminal, without a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from engine.async_engine import AsyncEngine
from engine.errors import InvalidRequest
from engine.types import Failed, Finished, Request, SamplingParams, SequenceStats, Tokens
from server.cli.console import Console
from server.cli.settings import Settings
from server.text.codec import TextCodec
from server.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to generate.

    Args:
        raw: continue the text itself instead of answering it through the chat template.
        max_tokens: None = as many as the context has room for.
    """

    text: str
    raw: bool = False
    max_tokens: int | None = 256
    temperature: float = 0.0
    seed: int | None = None


async def generate(
    prompt: Prompt, settings: Settings, directory: Path, console: Console, out: TextIO | None = None
) -> None:
    """Streams one answer to `out` and says on the console what it cost.

    Raises:
        EngineError: the engine cannot start, or cannot serve this prompt.
    """
    engine = AsyncEngine(settings.engine_config(str(directory)), on_progress=console.say)
    await engine.start()
    try:
        codec = TextCodec(load_tokenizer(engine.info.model_path, settings.chat_template))
        stats = await _stream(engine, codec, prompt, out or sys.stdout)
    finally:
        await engine.stop()
    console.say(summary(stats))


async def _stream(
    engine: AsyncEngine, codec: TextCodec, prompt: Prompt, out: TextIO
) -> SequenceStats:
    templated = codec.has_chat_template and not prompt.raw
    text = prompt.text
    if templated:
        text = codec.render_chat([{"role": "user", "content": text}])
    [token_ids] = await codec.encode([text], add_special_tokens=not templated)
    room = engine.info.max_model_len - len(token_ids)
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {len(token_ids)} tokens, but the model's context holds "
            f"{engine.info.max_model_len}; shorten it."
        )
    sampling = SamplingParams(
        max_tokens=room if prompt.max_tokens is None else min(prompt.max_tokens, room),
        temperature=prompt.temperature,
        seed=prompt.seed,
    )
    detokenizer = codec.detokenizer(token_ids, skip_special_tokens=True)
    events = engine.submit(Request("generate", tuple(token_ids), sampling))
    async for event in events:
        if isinstance(event, Tokens):
            out.write("".join(detokenizer.push(token) for token in event.token_ids))
            out.flush()
        elif isinstance(event, Finished):
            out.write(detokenizer.finish() + "\n")
            out.flush()
            return event.stats
        elif isinstance(event, Failed):
            raise event.error
    raise AssertionError("a request's events end with Finished or Failed")


def summary(stats: SequenceStats) -> str:
    """Speed and what speculation did, on one line."""
    seconds = stats.finished - (stats.first_token or stats.finished)
    later = stats.generated_tokens - 1
    speed = f" at {later / seconds:.1f} tokens/s" if later > 0 and seconds > 0 else ""
    text = f"{stats.generated_tokens} tokens{speed}, {stats.target_passes} passes of the model"
    if stats.draft_tokens:
        share = 100 * stats.accepted_tokens / stats.draft_tokens
        text += f", {stats.accepted_tokens} of {stats.draft_tokens} drafts accepted ({share:.0f} %)"
    return text
