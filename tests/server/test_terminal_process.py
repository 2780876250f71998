"""`specserve chat` and `specserve bench` as people run them: at a terminal, in a pipe, alone."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.errors import EngineUnavailable
from server.api.keys import read_keys
from server.cli import main
from server.cli.own_server import _wait_for_url
from server.terminal.safe import safe
from tests.server.processes import PATIENCE, ROOT, model, small
from tests.server.support import FakeEngine, ids, make_app, make_info, serving, wait_until

__all__ = ["model"]  # a fixture

_KEY = "a-very-secret-key-of-a-test"

#: Makes the pseudo-terminal the one that Ctrl-C comes from.
_PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from server.cli import main
sys.exit(main())
"""


class Terminal:
    """A program at a pseudo-terminal of 160 by 40 characters."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORFGBG")}
        own = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True, cwd=ROOT,
            env={**kept, **own, **environment},
        )  # fmt: skip
        os.close(slave)
        self.screen = b""
        self._read = 0

    def enter(self, text: str) -> None:
        """Types at the next prompt, and sends it."""
        self.wait_for("›")
        self.type(text + "\r")

    def type(self, text: str) -> None:
        """Presses keys."""
        os.write(self._master, text.encode())

    def wait_for(self, words: str) -> None:
        """Reads on until the words have been said, after those that were waited for last."""
        deadline = time.monotonic() + 60
        while (found := self.screen.find(words.encode(), self._read)) < 0:
            assert time.monotonic() < deadline, self.screen[self._read :]
            if select.select([self._master], [], [], 1.0)[0]:
                try:
                    self.screen += os.read(self._master, 65536)
                except OSError:  # it has ended
                    raise AssertionError(self.screen[self._read :]) from None
        self._read = found + len(words)

    def exit_code(self) -> int:
        """Waits for the end."""
        with contextlib.suppress(OSError):  # a terminal that nobody reads stops its program
            while select.select([self._master], [], [], PATIENCE)[0]:
                self.screen += os.read(self._master, 65536)
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def terminal(*arguments: str, **environment: str) -> Iterator[Terminal]:
    made = Terminal(*arguments, **environment)
    try:
        yield made
    finally:
        made.close()


def test_a_chat_at_a_terminal(tmp_path: Path) -> None:
    text = "**bold** \x1b]0;owned\x07 and a few words more, so that it takes a while"
    engine = FakeEngine(text, blocks=(4, 1))
    app = make_app(engine, keys=read_keys([_KEY]))
    state = {"XDG_STATE_HOME": str(tmp_path), "SOME_KEY": _KEY}
    with (
        serving(app) as url,
        terminal("chat", "--url", f"{url}/v1", "--api-key-env", "SOME_KEY", **state) as screen,
    ):
        screen.wait_for("/help")
        command = Path(f"/proc/{screen.process.pid}/cmdline").read_bytes()
        assert _KEY.encode() not in command
        screen.enter("first line\x1b\rsecond line")
        screen.wait_for("speed-up unknown")
        assert "first line\nsecond line" in _text_of(engine)
        screen.enter("/colours")
        screen.wait_for("guessed it")
        screen.enter("/race")
        screen.wait_for("letter by letter")
        engine.delay = 0.5  # it takes ten seconds and more
        screen.enter("again")
        wait_until(lambda: len(engine.requests) == 4)
        screen.wait_for("tokens/s · ctrl-c")
        screen.type("\x03")
        screen.wait_for("stopped")
        wait_until(lambda: not engine.running)
        assert engine.aborts
        screen.enter("/exit")
        assert screen.exit_code() == 0
    assert b"\x1b]0;" not in screen.screen
    assert b"\x1b[?25h" in screen.screen[-2000:]  # the cursor is back
    [history] = tmp_path.rglob("chat-history")
    assert history.stat().st_mode & 0o777 == 0o600
    assert "second line" in history.read_text()


def _text_of(engine: FakeEngine) -> str:
    from tests.server.support import make_tokenizer

    text: str = make_tokenizer().decode(engine.requests[-1].prompt)
    return text


def test_no_color_and_no_history(tmp_path: Path) -> None:
    with (
        serving(make_app(FakeEngine("one two three", blocks=(4, 1)))) as url,
        terminal(
            "chat", "--url", url, "--no-history", "--colours",
            NO_COLOR="1", XDG_STATE_HOME=str(tmp_path),
        ) as screen,
    ):  # fmt: skip
        screen.wait_for("/help")
        screen.enter("hello")
        screen.wait_for("speed-up unknown")
        screen.wait_for("›")
        screen.type("\x04")  # Ctrl-D
        assert screen.exit_code() == 0
    colours = re.findall(rb"\x1b\[[0-9;]*\b(?:3[0-8]|4[0-8]|9[0-7])(?:;[0-9;]*)?m", screen.screen)
    assert colours == []
    assert list(tmp_path.rglob("*")) == []


def test_a_chat_in_a_pipe() -> None:
    with serving(make_app(FakeEngine("a\x1b[31m b"))) as url:
        done = subprocess.run(
            [sys.executable, "-m", "server.cli", "chat", "--url", url, "--lines"],
            input="one\ntwo\n", capture_output=True, text=True, timeout=PATIENCE, check=True,
            cwd=ROOT,
        )  # fmt: skip
    assert done.stdout == "a␛[31m b\n" * 2
    assert done.stderr == ""


# -- a server of its own -------------------------------------------------------------------

_OWN = """
import sys, time
from pathlib import Path
from server.cli.own_server import own_server
from server.cli.settings import Settings
model = sys.argv[1]
settings = Settings(model=model, dtype="float32", runner="reference", threads=1,
                    kv_cache_memory="16MiB", max_sequences=4, max_batch_tokens=64)
with own_server(settings, (Path(model), "Tiny"), print) as (url, key):
    print("URL", url, key, flush=True)
    time.sleep(600)
"""


def _answers(url: str, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).status_code


def test_an_own_server_is_private_and_ends_with_its_owner(model: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWN, str(model)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert owner.stdout is not None
        line = next(line for line in owner.stdout if line.startswith("URL"))
        _, url, key = line.split()
        assert _answers(url) == 401
        assert _answers(url, key) == 200
        owner.kill()  # nothing of it can do anything any more
        owner.wait(PATIENCE)

        def gone() -> bool:
            try:
                _answers(url, key)
            except httpx.TransportError:
                return True
            return False

        wait_until(gone)
    finally:
        owner.kill()
        owner.communicate()


def test_a_chat_on_its_own_says_what_generate_says(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["generate", "abc", "--max-tokens", "12", *small(model)]) == 0
    expected = capsys.readouterr().out
    with monkeypatch.context() as patch, (model / "question").open("w+") as question:
        question.write("abc")
        question.seek(0)
        patch.setattr(sys, "stdin", question)
        assert main(["chat", "--max-tokens", "12", *small(model)]) == 0
    captured = capsys.readouterr()
    assert captured.out == safe(expected.removesuffix("\n")) + "\n"
    assert captured.err == "starting Tiny ...\n"


@pytest.mark.parametrize(
    "line",
    [
        "specserve: it is broken.",
        "2026-01-01 00:00:00,000 ERROR   specserve.server: it is broken.",
    ],
)
def test_an_own_server_that_cannot_start_says_why(line: str) -> None:
    said: list[str] = []
    with pytest.raises(EngineUnavailable, match=r"^no server could be started: it is broken\.$"):
        _wait_for_url(io.StringIO(f"loading\n{line}\n"), said.append)
    assert said == ["loading", line]
    url = _wait_for_url(io.StringIO("  URL       http://127.0.0.1:1/v1\n"), said.append)
    assert url == "http://127.0.0.1:1"


# -- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["chat", "bench"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "ftp://x"], "'ftp://x' is not like http://host:port"),
        (["--url", "http://a:b@x"], "--api-key-env"),
        (["--url", "http://127.0.0.1:1", "--max-draft", "2"], "leave --max-draft out"),
        (["--url", "http://127.0.0.1:1", "some/model"], "leave MODEL out"),
        (["--api-key-env", "SURELY_NOT_SET"], "SURELY_NOT_SET"),
        (["--url", "http://127.0.0.1:1"], "Does it run?"),
    ],
)
def test_mistakes_are_one_line(
    command: str, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([command, *arguments])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]
    assert code in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("specserve: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


# -- bench ---------------------------------------------------------------------------------


def test_a_bench_of_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    monkeypatch.setenv("SOME_KEY", _KEY)
    engine = FakeEngine(
        "one two three", blocks=(4, 1), info=make_info(drafters=("lookup", "model"))
    )
    engine.state_of_speculation = {
        **engine.state_of_speculation,  # type: ignore[dict-item]
        "drafters": ["lookup", "model", "grammar"],
    }
    with serving(make_app(engine, keys=read_keys([_KEY]))) as url:
        code = main([
            "bench", "--url", url, "--api-key-env", "SOME_KEY", "--prompts", str(prompts),
            "--concurrency", "1,2", "--rounds", "2", "--requests", "4", "--max-tokens", "8",
            "--output", str(tmp_path / "out"),
        ])  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0, out
    lanes = [line.split("│")[2].strip() for line in out.splitlines() if line.startswith("│")]
    assert lanes == ["off", "lookup", "model", "auto"] * 2
    assert "24 pairs compared, 0 different" in out
    assert "2.67" in out  # tokens a pass: 8 in passes of 4, 1 and 3
    asked = {(r.speculation.enabled, r.speculation.drafter) for r in engine.requests}
    assert asked >= {(False, None), (None, "lookup"), (None, "model"), (True, None)}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "lookup" in page
    for file in (tmp_path / "out").iterdir():
        assert _KEY.encode() not in file.read_bytes()


def test_an_interrupted_bench_reports_what_was_measured(tmp_path: Path) -> None:
    engine = FakeEngine(lambda *_: ids("on and on ") * 20, delay=0.01)
    with serving(make_app(engine)) as url:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "server.cli", "bench", "--url", url, "--concurrency", "2",
                "--rounds", "2", "--requests", "400", "--output", str(tmp_path),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        wait_until(lambda: len(engine.requests) > 16, PATIENCE)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert "Interrupted" in err
        assert "│ off" in out
        assert (tmp_path / "report.html").exists()
        wait_until(lambda: not engine.running)
