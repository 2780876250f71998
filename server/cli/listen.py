"""The socket a server listens on; quick to import, so that a taken port is told at once."""

from __future__ import annotations

import socket

from engine.errors import ConfigurationError

BACKLOG = 2048


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
