"""`specserve audit`: proves on this machine, with these settings, that speculation is invisible."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from engine.audit.options import ODDS, AuditOptions
from engine.errors import ConfigurationError, InvalidRequest
from engine.types import EngineInfo
from server.cli.console import Console
from server.cli.settings import Settings
from server.text.codec import TextCodec
from server.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from engine.audit.compare import Mismatch
    from engine.audit.distribution import DistributionTest
    from engine.audit.run import AuditReport

_SHOWN = 10  # mismatches that are listed one by one


@dataclass(frozen=True, slots=True)
class AuditCommand:
    """What the command line asked for.

    Args:
        prompts: JSON lines, each with `prompt` (a text) or `turns` (texts; the first counts);
            None = the prompts that come with specserve.
        options: what to do with them.
    """

    prompts: Path | None
    options: AuditOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own flags."""
    defaults = AuditOptions()
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSON lines with `prompt` or `turns`"
    )
    for name, kind, help_text in (
        ("max_tokens", int, "tokens of each answer"),
        ("streams", int, "requests at once"),
        ("temperature", float, "0 is greedy; above 0 every request has a seed"),
        ("samples", int, "texts of each distribution test; 0: none"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=default,
            metavar=name.split("_")[-1].upper(),
            help=f"{help_text} ({default:g})",
        )


def read_arguments(given: argparse.Namespace) -> AuditCommand:
    """What `add_arguments` parsed.

    Raises:
        InvalidRequest: a value is out of its range.
    """
    options = AuditOptions(given.max_tokens, given.streams, given.temperature, given.samples)
    for flag, value, least in (
        ("--max-tokens", options.max_tokens, 1),
        ("--streams", options.streams, 1),
        ("--samples", options.samples, 0),
    ):
        if value < least:
            raise InvalidRequest(f"{flag} is {value}, but it must be {least} or more.", flag)
    if not 0.0 <= options.temperature <= 2.0:
        raise InvalidRequest(
            f"--temperature is {options.temperature}, but it must be from 0 to 2.", "--temperature"
        )
    return AuditCommand(given.prompts, options)


def run(
    command: AuditCommand,
    settings: Settings,
    directory: Path,
    console: Console,
    say: Callable[[str], None] = print,
) -> int:
    """Audits and prints what was found.

    Args:
        directory: the model, as `sources.resolve` found it.
        console: is told what goes on.
        say: is given the lines of the report.

    Returns:
        0 if speculation is invisible, else 1.

    Raises:
        EngineError: the engine cannot start, or the prompts are no good.
    """
    from engine.audit.run import audit  # as slow to import as torch is

    texts = read_prompts(command.prompts)

    def encode(info: EngineInfo) -> list[tuple[int, ...]]:
        return _encode(TextCodec(load_tokenizer(info.model_path, settings.chat_template)), texts)

    report = audit(settings.engine_config(str(directory)), encode, command.options, console.say)
    for line in lines(report):
        say(line)
    return 0 if report.clean else 1


def read_prompts(path: Path | None) -> list[str]:
    """The prompts' texts.

    Raises:
        ConfigurationError: the file cannot be read, or a line of it.
    """
    source = resources.files("loadtest").joinpath("data", "prompts.jsonl")
    name = str(path or "the built-in prompts")
    try:
        content = (path or source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{name} cannot be read: {error}.") from error
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            texts.append(_prompt_in(line, f"line {number} of {name}"))
    if not texts:
        raise ConfigurationError(f"{name} holds no prompt; write one JSON object a line.")
    return texts


def _prompt_in(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where} is not JSON: {error}.") from error
    if isinstance(entry, dict):
        turns = entry.get("turns")
        text = turns[0] if isinstance(turns, list) and turns else entry.get("prompt")
        if isinstance(text, str) and text:
            return text
    raise ConfigurationError(f"{where} has neither `prompt` nor `turns` with a text.")


def _encode(codec: TextCodec, texts: list[str]) -> list[tuple[int, ...]]:
    templated = codec.has_chat_template
    if templated:
        texts = [codec.render_chat([{"role": "user", "content": text}]) for text in texts]
    return [*map(tuple, asyncio.run(codec.encode(texts, add_special_tokens=not templated)))]


def lines(report: AuditReport) -> Iterator[str]:
    """The report, for a person to read."""
    info, found = report.info, report.comparison
    ties, faults = found.near_ties, found.faults
    rows = {
        "model": f"{info.model_name} ({info.dtype} on {info.device}, {info.runner} runner)",
        "weights": f"{info.weights}; K/V in {info.kv_dtype}",
        "drafters": f"{', '.join(info.drafters) or 'none'}, up to {info.max_draft} tokens a step",
        "numerics": info.numerics,
        "prompts": f"{report.prompts} answered, {report.skipped} skipped (too long)",
        "drafts": f"{found.drafted} tokens checked, {found.accepted} kept"
        + ("" if found.drafted else ": nothing was speculated, so nothing is proven"),
        "tokens compared": str(found.tokens),
        "near-ties": f"{len(ties)} (scores within {report.near_tie:g}; "
        f"{1000 * len(ties) / max(1, found.tokens):.2f} of 1,000 tokens)",
        "faults": str(len(faults)),
        "failed requests": str(len(found.failures)),
    }
    for name, value in rows.items():
        yield f"{name:<18}{value}"
    for test in report.distributions:
        yield f"{'distribution':<18}{_describe(test)}"
    yield from _details([*faults, *ties], found.failures)
    yield "verdict: " + ("clean" if report.clean else "SPECULATION CHANGED WHAT WAS SAID")


def _describe(test: DistributionTest) -> str:
    return (
        f"{'ok' if test.passed else 'FAULT'}: chance {test.chance:.2g} (a sound server fails below "
        f"{ODDS:g}); {test.samples} texts, {test.degrees} degrees of freedom, finds a distance of "
        f"{test.detectable:.2f}; {test.drafted} draft tokens, {test.accepted} kept"
    )


def _details(mismatches: Sequence[Mismatch], failures: Sequence[tuple[str, str]]) -> Iterator[str]:
    for found in mismatches[:_SHOWN]:
        kind = "near-tie" if found.near_tie else "fault"
        yield (
            f"  {found.request_id}, token {found.position}: {found.speculated} with speculation, "
            f"{found.plain} without; {found.gap:.3g} apart ({kind})"
        )
    if len(mismatches) > _SHOWN:
        yield f"  and {len(mismatches) - _SHOWN} more"
    for request_id, reason in failures[:_SHOWN]:
        yield f"  {request_id} failed: {reason}"
