"""The socket a server listens on; quick to import, so that a taken port is told at once."""

from __future__ import annotations

import logging
import resource
import socket

from engine.errors import ConfigurationError

BACKLOG = 2048

#: Files that are open besides connections: libraries, weights, logs, refused connections.
_OTHER_FILES = 512

logger = logging.getLogger("specserve.server")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Closed again at once, it tells early whether the port is free.

    Raises:
        ConfigurationError: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(f"host is {host!r}, which is no address here: {error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port."
        ) from error
    return listener


def allow_files(connections: int) -> None:
    """Lets this process open as many files as `connections` need, or says that it may not:
    a process without files accepts nobody, not even a probe."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        logger.warning(
            "max_connections is %d, but this process may open only %d files; lower it to %d, or "
            "raise the limit (ulimit -n)",
            connections,
            allowed,
            max(1, allowed - _OTHER_FILES),
        )
