"""Runs what frameworks do against a server, and prints a table.

    python -m tools.clients --url http://127.0.0.1:8000/v1 [--npm DIRECTORY] [--only openai,litellm]

Packages that are not installed are said to be missing. `--npm` names a directory in which
`npm install ai @ai-sdk/openai-compatible @ai-sdk/openai zod` was run. The model must have a chat
template that knows tools; for one that has none, `hermes_tools.jinja` beside this file will do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from tools.clients.shared import CASES, Result, Server, run_case

_MODULES = ("openai_cases", "langchain_cases", "other_cases")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--npm", type=Path, help="directory with node_modules of the AI SDK")
    parser.add_argument("--only", default="", help="packages, separated by commas")
    arguments = parser.parse_args()
    with urllib.request.urlopen(arguments.url + "/models", timeout=60) as answer:
        server = Server(arguments.url, json.load(answer)["data"][0]["id"])
    wanted = set(filter(None, arguments.only.split(",")))
    for name in _MODULES:
        importlib.import_module(f"tools.clients.{name}")
    print("| package | version | what is run | outcome | time |\n|---|---|---|---|---|")
    results = []
    for package, what, run in CASES:
        if not wanted or package in wanted:
            results.append(run_case(package, what, run, server))
            print(results[-1].row(), flush=True)
    for result in _ai_sdk(arguments.npm, server) if arguments.npm is not None else []:
        results.append(result)
        print(result.row())
    return 1 if any(result.fault for result in results) else 0


def _ai_sdk(directory: Path, server: Server) -> list[Result]:
    script = Path(__file__).with_name("ai_sdk.mjs")
    command = ["node", str(script), str(directory.resolve()), server.url, server.model]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=True)
    return [Result(**row) for row in json.loads(done.stdout)]


if __name__ == "__main__":
    sys.exit(main())
