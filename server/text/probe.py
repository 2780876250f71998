"""Compiles descriptions in a process of its own first, where too much work can be stopped.

Native code that compiles a grammar cannot be interrupted, and there are short descriptions that
keep it busy for minutes or fill the memory. So whatever comes in is compiled by a *probe*: a small
helper process that has the tokenizer ready forks a child for each description, and the child gives
itself limits on computing time, waiting time and memory, beyond which the kernel ends it. Only
what a probe has finished is compiled in the server.

The helper starts with the first description and ends with the server.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from engine.errors import Overloaded
from server.text.description import GrammarSource, Refused, sentence


@dataclass(frozen=True, slots=True)
class Limits:
    """What compiling one description may take.

    Attributes:
        seconds: of computing.
        bytes: on top of what the helper has.
        patience: seconds in all, on a machine that has no time for it.
    """

    seconds: float = 2.0
    bytes: int = 256 * 2**20
    patience: float = 30.0

    def __str__(self) -> str:
        return f"{self.seconds:g} s of computing or {self.bytes >> 20} MiB"


#: Until the helper has made its tokenizer and answers for the first time.
_START_SECONDS = 120.0

#: Others' answers go first.
_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Tried:
    """What a probe found out.

    Attributes:
        definition: the description in the library's own form.
        bytes: that compiling it took.
    """

    definition: str
    bytes: int


class Probe:
    """Finds out what descriptions take to compile; any number of threads may ask at once.

    Args:
        serialized: a fast tokenizer in the JSON form of `tokenizers`.
        end_tokens: tokens that end a text.
        limits: for each description.
    """

    def __init__(
        self, serialized: str, end_tokens: frozenset[int], limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair()
        told = [theirs.fileno(), sorted(end_tokens), *astuple(self._limits)]
        command = [sys.executable, "-m", "server.text.probe", json.dumps(told)]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what natively written code says of its end
            env={**os.environ, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # the terminal's Ctrl-C is for the server
        )
        theirs.close()
        self._process = process
        self._close = weakref.finalize(self, _end, os.getpid(), self._control, process)
        feed = threading.Thread(target=_feed, args=(process, serialized), daemon=True)
        feed.start()

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def compile(self, source: GrammarSource) -> Tried:
        """Compiles a description, which can then be compiled here in bounded time and memory.

        Raises:
            Refused: it does not compile, or takes too much.
            Overloaded: the helper does not answer.
        """
        answer = b""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock, contextlib.suppress(OSError):
                socket.send_fds(self._control, [b"j"], [theirs.fileno()])
            with contextlib.suppress(OSError):
                ours.settimeout(_START_SECONDS)
                ours.sendall(json.dumps([source.kind, source.text]).encode())
                ours.shutdown(socket.SHUT_WR)
                answer = _all_of(ours)
        if not answer:
            if not self.alive:
                raise Overloaded("The process that tries grammars has ended; ask again.")
            raise Refused(f"it takes more than {self._limits}")
        said: dict[str, Any] = json.loads(answer)
        if "refused" in said:
            raise Refused(said["refused"], said["where"])
        return Tried(**said)

    def close(self) -> None:
        """Ends the helper."""
        self._close()


def _feed(process: subprocess.Popen[bytes], serialized: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as pipe:
        pipe.write(serialized.encode())


def _end(owner: int, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Called when a probe is no longer used, or at the end of the process that made it; a process
    that was forked from that one leaves it alone."""
    control.close()
    if os.getpid() == owner:
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # not its child


_made: dict[tuple[str, frozenset[int], int], Probe] = {}
_making = threading.Lock()


def probe_for(serialized: str, end_tokens: frozenset[int]) -> Probe:
    """This process's probe for a tokenizer; a new one if it has ended."""
    key = (serialized, end_tokens, os.getpid())
    with _making:
        if key not in _made or not _made[key].alive:
            _made[key] = Probe(serialized, end_tokens)
        return _made[key]


def _all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(functools.partial(connection.recv, 1 << 16), b""))


# -- in the helper -----------------------------------------------------------------------------


def main() -> None:
    """Forks a child for every description, until nobody can send one any more."""
    from server.text.compile import native_tokenizer

    descriptor, ends, *limits = json.loads(sys.argv[1])
    control = socket.socket(fileno=descriptor)
    native = native_tokenizer(sys.stdin.read(), frozenset(ends))
    os.nice(_NICENESS)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel clears them away
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for connection in _jobs(control):
        with connection:
            if os.fork() == 0:
                try:
                    control.close()
                    _limit(Limits(*limits))
                    _answer(connection, native)
                finally:
                    os._exit(0)


def _jobs(control: socket.socket) -> Iterator[socket.socket]:
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        for descriptor in descriptors:
            yield socket.socket(fileno=descriptor)


def _limit(limits: Limits) -> None:
    """From now on the kernel ends this process when it has taken too much."""
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + limits.bytes,) * 2)
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.patience)


def _answer(connection: socket.socket, native: Any) -> None:
    from server.text.compile import tried

    kind, text = json.loads(_all_of(connection))
    before, said = _most_memory(), dict[str, Any]()
    try:
        said["definition"] = tried(native, GrammarSource(kind, text, ""))
        said["bytes"] = _most_memory() - before
    except Refused as refused:
        said = {"refused": str(refused), "where": refused.where}
    except BaseException as error:  # a panic of native code is no Exception
        said = {"refused": sentence(f"{type(error).__name__}: {error}"), "where": ""}
    connection.sendall(json.dumps(said).encode())


def _most_memory() -> int:
    """Bytes that this process has had resident at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
