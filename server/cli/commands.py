"""What each command does; what is slow to import, only when the command comes to it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from server import logs
from server.cli import audit, bench, chat, plan, train
from server.cli.console import Console, LogConsole
from server.cli.listen import bind
from server.cli.settings import Settings


def run_serve(options: argparse.Namespace, settings: Settings) -> int:
    """Serves a model over HTTP until a signal comes."""
    if options.print_config:
        print(settings.to_yaml(), end="")
        return 0
    _set_up_logging(settings)
    settings.server_options()  # tells what is wrong with the keys
    with LogConsole() if settings.log_format == "json" else Console() as console:
        # A taken port is told before a long download, and before long imports.
        bind(settings.host, settings.port).close()
        from server.cli.serve import serve

        directory, name = _find_model(settings, console)
        settings = _find_drafters(settings, console)
        _hide_progress_bars()
        return serve(settings, directory, name, console)


def run_generate(options: argparse.Namespace, settings: Settings) -> int:
    """Answers one prompt."""
    _set_up_logging(settings, least=logging.WARNING)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    with Console() as console:
        from server.cli.generate import Prompt, generate

        directory, _ = _find_model(settings, console)
        settings = _find_drafters(settings, console)
        _hide_progress_bars()
        prompt = Prompt(
            text,
            raw=options.raw,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
        asyncio.run(generate(prompt, settings, directory, console))
    return 0


def run_chat(options: argparse.Namespace, settings: Settings) -> int:
    """Talks with a model."""
    with _server_for(options, settings) as (url, key):
        return chat.run(options, url, key)


def run_bench(options: argparse.Namespace, settings: Settings) -> int:
    """Compares answers without speculation, with each drafter, and with all of them."""
    with _server_for(options, settings) as (url, key):
        return bench.run(options, url, key)


@contextlib.contextmanager
def _server_for(options: argparse.Namespace, settings: Settings) -> Iterator[tuple[str, str]]:
    """The server that is named, or one of our own: its address and key."""
    key = chat.read_key(options.api_key_env)
    if options.url is not None:
        chat.refuse_settings(options)
        yield options.url, key
        return
    from server.cli.own_server import own_server

    with Console() as console:
        model = _find_model(settings, console)
        settings = _find_drafters(settings, console)
        with contextlib.ExitStack() as stack:
            with console.waiting(f"starting {model[1]}") as say:
                found = stack.enter_context(own_server(settings, model, say))
            yield found


def run_pull(_: argparse.Namespace, settings: Settings) -> int:
    """Fetches a model and prints where it lies."""
    with Console() as console:
        directory, _name = _find_model(settings, console)
    print(directory)
    return 0


def run_audit(options: argparse.Namespace, settings: Settings) -> int:
    """Compares answers with and without drafts."""
    _set_up_logging(settings, least=logging.WARNING)
    command = audit.read_arguments(options)
    with Console() as console:
        directory, _ = _find_model(settings, console)
        settings = _find_drafters(settings, console)
        _hide_progress_bars()
        return audit.run(command, settings, directory, console)


def run_plan(options: argparse.Namespace, _: Settings) -> int:
    """Works out from a few numbers when speculation pays."""
    return plan.run(options)


def run_train(options: argparse.Namespace, settings: Settings) -> int:
    """Makes a drafter for a model."""
    _set_up_logging(settings, least=logging.WARNING)
    with Console() as console:
        from engine.model import sources

        target = sources.resolve(options.target, report=console.say, progress=console.progress)
    _hide_progress_bars()
    return train.run(options, target)


def run_doctor(_: argparse.Namespace, settings: Settings) -> int:
    """Shows what this machine offers."""
    from server.cli.doctor import doctor

    _hide_progress_bars()
    return doctor(settings)


def _find_model(settings: Settings, console: Console) -> tuple[Path, str]:
    """The model's local directory and its name in the API."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when it is imported
    from engine.model import sources

    directory = sources.resolve(settings.model, report=console.say, progress=console.progress)
    names = settings.served_model_name or (sources.display_name(settings.model, directory),)
    return directory, names[0]


def _find_drafters(settings: Settings, console: Console) -> Settings:
    """The settings with `draft_model` and `draft_head` resolved to local directories."""
    if settings.draft_model is None and settings.draft_head is None:
        return settings
    from engine.model import sources

    found = {}
    if settings.draft_model is not None:
        place = sources.resolve(settings.draft_model, report=console.say, progress=console.progress)
        found["draft_model"] = str(place)
    if settings.draft_head is not None:
        found["draft_head"] = str(sources.resolve_head(settings.draft_head, report=console.say))
    return settings.model_copy(update=found)


def _hide_progress_bars() -> None:
    """Weights load in a second or two; transformers' bars would only smear the output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _set_up_logging(settings: Settings, least: int = logging.DEBUG) -> None:
    level = max(least, logging.getLevelNamesMapping()[settings.log_level.upper()])
    logs.set_up(level, settings.log_format)
