"""A server stays whole under everything at once: `tools/soak.py`, for as long as a test may take.

``SOAK_SECONDS=600 pytest tests/end_to_end/test_soak.py`` takes its time.
"""

from __future__ import annotations

import asyncio
import os

from tests.end_to_end.conftest import Serve
from tools.soak import Soak

SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))


def test_soak(serve_tiny: Serve) -> None:
    with serve_tiny("--max-sequences", "8", "--kv-cache-memory", "1MiB") as server:
        soak = Soak(server.url, server.process.pid, rate=20)
        findings = asyncio.run(soak.run(SECONDS))
        server.signal()
        assert server.wait() == 0
        assert "Traceback" not in server.log.read_text()
    assert findings.problems == []
    kinds = {"whole", "stream", "chat", "tokens", "wrong", "leave", "impatient", "hang_up", "same"}
    assert kinds <= set(findings.counts)
