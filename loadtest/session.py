"""A whole run: measure, report, and say by exit status how it went."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadtest import html, output, plots, report, workloads
from loadtest.client import Client
from loadtest.options import Options
from loadtest.plan import Block, Lane, UsageError, lay_out, make_lanes
from loadtest.progress import LiveProgress
from loadtest.report import Report
from loadtest.runner import BlockResult, Runner
from loadtest.stats import error_rate

#: Exit statuses.
SUCCESS, TOO_MANY_ERRORS, CANNOT_START, ANSWERS_DIFFER, INTERRUPTED = 0, 1, 2, 3, 130

#: Columns of tables that do not go to a terminal.
_PLAIN_WIDTH = 180


def conduct(options: Options, api_key: str, *, brief: bool = False) -> int:
    """Measures, reports, and returns the exit status.

    Tables go to standard output, everything else to standard error.

    Args:
        api_key: sent as bearer token unless empty.
        brief: of the numbers on standard output only the overview.

    Raises:
        UsageError: the run cannot start.
    """
    try:
        return asyncio.run(_run(options, api_key, brief))
    except KeyboardInterrupt:
        return INTERRUPTED


async def _run(options: Options, api_key: str, brief: bool) -> int:
    prompts = workloads.load(options.workload, options.size)
    _make_directory(options.output)
    async with Client(options.timeout, api_key) as client:
        targets = [
            await client.prepare(target, options.asking.path, _first_request(options))
            for target in options.targets
        ]
        options = replace(options, targets=tuple(targets))
        lanes = make_lanes(options.targets, options.arms)
        blocks: list[Block] = []
        for level in options.levels:
            blocks += lay_out(level, lanes, options.rounds, options.requests_at(level))
        with LiveProgress(Console(stderr=True), len(blocks)) as progress:
            runner = Runner(client, options.asking, prompts, progress)
            _stop_on_interrupt(runner, progress)
            results = await _measure(runner, options, lanes, blocks)
    found = report.make_report(options.settings(), lanes, options.levels, results, options.slo)
    _publish(found, options.output, brief)
    return _status(found, options, interrupted=runner.stopped)


async def _measure(
    runner: Runner, options: Options, lanes: Sequence[Lane], blocks: Sequence[Block]
) -> list[BlockResult]:
    """Warms every lane up, then runs the blocks."""
    widest = max(int(level.value) for level in options.levels)
    for lane in lanes:
        await runner.warm_up(lane, options.warmup, max(1, min(widest, options.warmup)))
    return await runner.run(blocks, options.duration)


def _first_request(options: Options) -> dict[str, object]:
    """A tiny request, by which a target shows that it can answer at all."""
    body: dict[str, object] = {"max_tokens": 1, "temperature": 0, "stream": True}
    if options.asking.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"
    return body | dict(options.asking.body)


def _make_directory(output: Path | None) -> None:
    """Finds out before the run, not after it, whether results can be written."""
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output {output} cannot be made: {error}.") from error


def _stop_on_interrupt(runner: Runner, progress: LiveProgress) -> None:
    """The first ctrl-C ends the run and reports what there is; the second ends the process."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        progress.say("Interrupted: reporting what was measured so far.")
        runner.stop()

    with suppress(NotImplementedError):  # Windows: ctrl-C ends the process at once
        loop.add_signal_handler(signal.SIGINT, interrupted)


def _publish(found: Report, directory: Path | None, brief: bool) -> None:
    """Prints the report and writes its files."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    output.show(found, console, brief=brief)
    if directory is None:
        return
    paths = output.write(found, directory)
    paths.append(html.write_html(found, directory))
    try:
        paths += plots.write_plots(found, directory)
    except plots.PlotsUnavailable as error:
        print(error, file=sys.stderr)
    print("Written: " + ", ".join(str(path) for path in paths), file=sys.stderr)


def _status(found: Report, options: Options, *, interrupted: bool) -> int:
    if interrupted:
        return INTERRUPTED
    rate = error_rate(found.results)
    if rate > options.max_error_rate:
        print(
            f"loadtest: {100 * rate:.1f} % of the requests failed; --max-error-rate allows "
            f"{100 * options.max_error_rate:.1f} %.",
            file=sys.stderr,
        )
        return TOO_MANY_ERRORS
    if found.equality is not None and found.equality.mismatches:
        return ANSWERS_DIFFER
    return SUCCESS
