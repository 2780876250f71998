"""What one client can do to the others, measured on running servers.

Starts a server of each version that is named, attacks it, and prints what its victims felt::

    python -m tools.attacks --version before=/tmp/before --version after=.
    python -m tools.attacks texts connections --url http://127.0.0.1:8000
    python -m tools.attacks --small -- --model MODEL

=============  ================================================================================
texts          four prompts of 7.9 million characters; honest texts are tokenised meanwhile
prompt         6,500 tokens are read beside a stream; a short request comes a second later
connections    1,030 connections that never end their request's head; probes meanwhile
logprobs       log probabilities of 200 and of 2,000 prompt tokens beside a stream, cores taken
cores          16 tokens with two threads and with one, while twice as many processes as cores run
=============  ================================================================================

What follows ``--`` are flags of ``specserve serve``. All traffic goes to the address that is
given or to this machine, and everything ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx

from tools.attacks import attacks
from tools.attacks.asking import Found
from tools.attacks.servers import Server, burning, serving

NAMES = ("texts", "prompt", "connections", "logprobs", "cores")

#: Longest that other processes take cores.
_BURN_SECONDS = 240.0


def attack(name: str, server: Server, given: argparse.Namespace) -> Found:
    """Runs one attack by its name on a server that runs."""
    small = given.small
    match name:
        case "texts":
            found = attacks.texts(server, prompts=4, characters=790_000 if small else 7_900_000)
        case "prompt":
            tokens = 600 if small else given.tokens
            found = attacks.prompt(server, tokens=tokens, rounds=given.rounds)
        case "connections":
            found = attacks.connections(server, count=1030, seconds=4.0 if small else 33.0)
        case "logprobs":
            found = attacks.logprobs(server, lengths=[50, 200] if small else [200, 2000])
        case _:
            found = attacks.cores(server, tokens=16)
    print(f"{name} at {server.url} ...", file=sys.stderr, flush=True)
    try:
        return asyncio.run(found)
    except (httpx.HTTPError, OSError, RuntimeError) as error:  # some servers do not survive it
        return {"what became of it": f"{type(error).__name__}: {error}"[:200].replace("\n", " ")}


def attack_version(names: list[str], project: Path, given: argparse.Namespace) -> dict[str, Found]:
    """Runs attacks on servers of one version that are started for it."""
    processes = os.cpu_count() or 1
    found: dict[str, Found] = {}
    if names != ["cores"]:
        with serving(project, given.flags) as server:
            for name in names:
                if name != "cores":
                    with burning(processes if name == "logprobs" else 0, _BURN_SECONDS):
                        found[name] = attack(name, server, given)
    if "cores" in names:
        found["cores"] = {}
        for threads in (2, 1):
            with (
                serving(project, [*given.flags, "--threads", str(threads)]) as server,
                burning(2 * processes, _BURN_SECONDS),
            ):
                seen = attack("cores", server, given)
            found["cores"] |= {f"{what}, --threads {threads}": v for what, v in seen.items()}
    return found


def table(name: str, columns: dict[str, Found]) -> str:
    """What was found, in Markdown."""
    rows = dict.fromkeys(what for found in columns.values() for what in found)
    lines = [f"| {name} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for what in rows:
        values = " | ".join(found.get(what, "") for found in columns.values())
        lines.append(f"| {what} | {values} |")
    return "\n".join(lines) + "\n"


def _version(text: str) -> tuple[str, Path]:
    name, _, path = text.rpartition("=")
    if not (Path(path) / "server").is_dir():
        raise argparse.ArgumentTypeError(f"{path} is no checkout: it has no folder server")
    return name or path, Path(path).resolve()


def main(words: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.attacks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="ATTACK", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--url", help="of a server that runs already, without /v1")
    parser.add_argument(
        "--version", action="append", type=_version, metavar="NAME=FOLDER",
        help="a checkout whose server is started; several are compared; default: this one",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=6500, help="of the attack named prompt")
    parser.add_argument("--rounds", type=int, default=1, help="of the attack named prompt")
    parser.add_argument("--small", action="store_true", help="does it work at all? in little time")
    arguments, flags = _split(sys.argv[1:] if words is None else words)
    given = parser.parse_args(arguments, argparse.Namespace(flags=flags))
    if unknown := set(given.names) - set(NAMES):
        parser.error(f"there is no attack {unknown.pop()!r}; choose from: {', '.join(NAMES)}")
    versions = dict(given.version or [("here", Path(__file__).resolve().parents[2])])
    names = [name for name in NAMES if not given.names or name in given.names]
    if given.url:
        server = Server(given.url.rstrip("/"))
        found = {given.url: {name: attack(name, server, given) for name in names}}
    else:
        found = {as_: attack_version(names, path, given) for as_, path in versions.items()}
    for name in names:
        print(table(name, {as_: tables[name] for as_, tables in found.items()}), flush=True)
    return 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """What stands before ``--``, and the flags of a server behind it."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends servers and burners, too
    sys.exit(main())
