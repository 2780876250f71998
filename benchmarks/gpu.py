"""Everything that has to be known of a GPU, by one command on a bare machine with one.

    python -m benchmarks.gpu [--output docs] [--model SOURCE] [--dry-run]

Runs the tests of the kernels, of the runner and of the engine; times passes of decoders in the
shapes of 135M, 1B and 8B against the memory floor of the same run, under exact and fast
numerics; measures what scripted drafts gain; and puts load on the real server with a real model.
Writes `gpu.json`, and the figures into `gpu.md`. A part that fails is reported, and the others go
on. Takes less than eight minutes, and needs no network once the model is there.

Without a GPU there is nothing to measure. `--dry-run` walks through all of it on tiny shapes in
Triton's interpreter, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
MARK = "<!-- measured -->"
TESTS = ["tests/model/cuda/test_kernels.py", "tests/model/cuda/test_runner.py",
         "tests/model/cuda/test_engine.py"]  # fmt: skip
#: (sequences, rows of each, cached tokens of each)
CASES = [(1, 1, 1000), (1, 8, 1000), (8, 1, 1000), (64, 1, 1000), (64, 4, 1000), (1, 512, 0)]
TINY_CASES = [(1, 1, 20), (2, 2, 20), (1, 20, 0)]
#: Seconds that tests and server may take; all else takes a minute or two.
_TESTS_SECONDS, _SERVER_SECONDS = 240, 120


def main(arguments: list[str] | None = None) -> int:
    """Measures, writes and says how it went.

    Returns:
        0; 1 if a part failed; 2 if there is no GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="folder to write to")
    parser.add_argument("--model", help="what the server serves; default: its own default")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, without a GPU")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("There is no CUDA device here, so there is nothing to measure; --dry-run shows "
              "that this would run.", file=sys.stderr)  # fmt: skip
        return 2
    if importlib.util.find_spec("triton") is None:
        print("Triton is missing; install specserve[gpu].", file=sys.stderr)
        return 2
    if options.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    found: dict[str, Any] = {"machine": _machine(options.dry_run)}
    parts: dict[str, Callable[[], Any]] = {
        "steps": lambda: _steps(options.dry_run),
        "gains": lambda: _gains(options.dry_run),
        "tests": lambda: _tests(options.dry_run),
        "server": lambda: _server(options.model, options.dry_run),
    }
    for name, part in parts.items():
        began = time.monotonic()
        try:
            found[name] = part()
        except Exception as error:  # the machine may not be there a second time
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        _write(options.output, found)
    failed = [name for name in parts if isinstance(found[name], dict) and "failed" in found[name]]
    for name in failed:
        print(f"{name} failed: {found[name]['failed']}", file=sys.stderr)
    return int(bool(failed))


def _machine(dry: bool) -> dict[str, Any]:
    if dry:
        return {"device": "Triton's interpreter", "torch": torch.__version__, "dry_run": True}
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "memory_gib": round(found.total_memory / 2**30, 1),
        "capability": f"{found.major}.{found.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _floor(num_bytes: int) -> float:
    """Seconds to read as many bytes: the best of several sums."""
    device = _device()
    memory = torch.ones(max(1, num_bytes // 4), device=device)
    best = float("inf")
    for _ in range(8):
        if device.type == "cuda":
            first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
            first.record()
            memory.sum()
            last.record()
            last.synchronize()
            best = min(best, 1e-3 * first.elapsed_time(last))
        else:
            began = time.perf_counter()
            memory.sum()
            best = min(best, time.perf_counter() - began)
    return best


def _steps(dry: bool) -> list[dict[str, Any]]:
    from benchmarks.gpu_models import SHAPES, TINY, Passes, make_decoder, weight_bytes

    cases, repeats = (TINY_CASES, 1) if dry else (CASES, 20)
    rows = []
    for name, shape in (TINY if dry else SHAPES).items():
        decoder = make_decoder(shape, _device())
        floor = _floor(weight_bytes(decoder))
        tokens = max(s * (r + c) for s, r, c in cases)
        for numerics in ("fast", "exact"):
            passes = Passes(decoder, numerics, tokens)
            for case in cases:
                seconds, host = passes.seconds(case, repeats)
                rows.append({"model": name, "numerics": numerics, "case": case, "ms": 1e3 * seconds,
                             "host_ms": 1e3 * host, "floors": seconds / floor})  # fmt: skip
            del passes
        del decoder
        torch.cuda.empty_cache()
    return rows


def _gains(dry: bool) -> list[dict[str, Any]]:
    from benchmarks.gpu_models import SHAPES, TINY, gain, loaded_of, make_decoder

    shape = TINY["tiny"] if dry else SHAPES["8B"]
    decoder = make_decoder(shape, _device())
    rows = []
    for streams, tokens in ((2, 6),) if dry else ((1, 256), (16, 128), (64, 96), (256, 48)):
        found = gain(loaded_of(decoder, "exact"), streams, tokens, acceptance=0.8)
        rows.append(asdict(found))
        torch.cuda.empty_cache()
    if not all(row["equal"] for row in rows):
        raise AssertionError(f"answers with drafts differ from those without: {rows}")
    return rows


def _tests(dry: bool) -> dict[str, Any]:
    chosen = [f"{TESTS[0]}::test_splits_cover_the_longest_text"] if dry else TESTS
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=_TESTS_SECONDS, check=False
    )
    summary = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:]
    found = {"said": " ".join(summary)}
    return found if done.returncode == 0 else found | {"failed": done.stdout[-3000:]}


def _server(model: str | None, dry: bool) -> dict[str, Any]:
    """Plain against speculative, on the real server with a real model."""
    if dry and model is None:
        return {"left out": "a dry run loads no model"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = [sys.executable, "-m", "server.cli", "serve", "--port", str(port)]
    serve += ["--runner", "cuda", "--kv-cache-share", "0.8", *(["--model", model] if model else [])]
    server = subprocess.Popen(serve, cwd=ROOT)
    try:
        _wait_for(port, server)
        command = [sys.executable, "-m", "loadtest", "run", "--target", f"http://127.0.0.1:{port}",
                   "--ab", "speculation", "--concurrency", "1,16", "--rounds", "2",
                   "--max-tokens", "64", "--check-equal"]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=_SERVER_SECONDS, check=False
        )
    finally:
        server.terminate()
        server.wait(30)
    found = {"report": done.stdout}
    return found if done.returncode == 0 else found | {"failed": done.stderr[-3000:]}


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    import httpx

    until = time.monotonic() + _SERVER_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise TimeoutError(f"the server was not ready within {_SERVER_SECONDS} s")


def _write(folder: Path, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    page = folder / "gpu.md"
    before = page.read_text().partition(MARK)[0].rstrip() if page.exists() else "# On a GPU"
    page.write_text(f"{before}\n\n{MARK}\n\n{report(found)}\n")


def report(found: dict[str, Any]) -> str:
    """The figures in Markdown.

    Args:
        found: what `gpu.json` holds; parts may be missing.
    """
    lines = [", ".join(f"{name}: {value}" for name, value in found["machine"].items()), ""]
    if isinstance(found.get("steps"), list):
        lines += ["| model | sequences x rows, context | fast ms | x floor | exact ms | x floor "
                  "| exact / fast | host ms |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
        steps = {(s["model"], tuple(s["case"]), s["numerics"]): s for s in found["steps"]}
        for (model, case, numerics), fast in steps.items():
            if numerics == "fast":
                exact, (sequences, rows, context) = steps[model, case, "exact"], case
                lines.append(
                    f"| {model} | {sequences} x {rows}, {context} | {fast['ms']:.2f} | "
                    f"{fast['floors']:.2f} | {exact['ms']:.2f} | {exact['floors']:.2f} | "
                    f"{exact['ms'] / fast['ms']:.2f} | {exact['host_ms']:.2f} |"
                )
    if isinstance(found.get("gains"), list):
        lines += ["", "| streams | plain tokens/s | with drafts | ratio |", "|---|---|---|---|"]
        lines += [
            f"| {g['streams']} | {g['plain']:.0f} | {g['speculative']:.0f} | "
            f"{g['speculative'] / g['plain']:.2f} |"
            for g in found["gains"]
        ]
    for name in ("tests", "server"):
        for key, said in found.get(name, {}).items():
            lines += ["", f"{name}, {key}:", "", "```text", str(said).strip(), "```"]
    for name in ("steps", "gains"):
        if isinstance(found.get(name), dict):
            lines += ["", f"{name} failed: {found[name]['failed']}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
