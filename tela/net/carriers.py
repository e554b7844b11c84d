"""What is under Noise: sockets as they are, or a WebSocket in them, or that in TLS."""

from __future__ import annotations

import socket
import ssl

import trio

from tela.errors import PeerError
from tela.net.endpoints import NOWHERE, Endpoint
from tela.net.multiaddrs import Address, Carrier
from tela.net.websocket import connect_websocket


async def carry(bytes_stream: trio.abc.Stream, target: Address) -> trio.abc.Stream:
    """What carries Noise over a connection to ``target``. TLS is for proxies on the way; Noise proves who is there."""
    if target.carrier is Carrier.TCP:
        return bytes_stream
    try:
        if target.carrier is Carrier.WSS:
            tls = trio.SSLStream(
                bytes_stream, ssl.create_default_context(), server_hostname=target.host, https_compatible=True
            )
            await tls.do_handshake()
            bytes_stream = tls
        return await connect_websocket(bytes_stream, target.host)
    except BaseException as error:
        await trio.aclose_forcefully(bytes_stream)
        if isinstance(error, trio.BrokenResourceError) and error.__cause__:  # it hides what TLS says
            raise PeerError(str(error.__cause__)) from error
        raise


def remote_endpoint(stream: trio.abc.Stream) -> Endpoint:
    """The other end of a socket; NOWHERE where it is reset already: an error would end the listener."""
    if not isinstance(stream, trio.SocketStream):
        return NOWHERE
    try:
        return Endpoint(*stream.socket.getpeername()[:2])
    except OSError:
        return NOWHERE


def share_port(stream: trio.abc.Stream) -> Endpoint:
    """Our end of a socket, from which others may leave from now on: a NAT may map them all to the same port outside."""
    if not isinstance(stream, trio.SocketStream):
        return NOWHERE
    _share(stream.socket)
    return Endpoint(*stream.socket.getsockname()[:2])


async def connect_from(local: Endpoint, target: Endpoint) -> trio.SocketStream:
    """A connection that leaves from a shared port.

    Raises:
        OSError: it failed.
    """
    sock = await _bound(local)
    try:
        await sock.connect((target.host, target.port))
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


async def listen_at(local: Endpoint, backlog: int) -> trio.SocketListener:
    """A listener at a shared port. Raises OSError."""
    sock = await _bound(local)
    sock.listen(backlog)
    return trio.SocketListener(sock)


async def _bound(local: Endpoint) -> trio.socket.SocketType:
    sock = trio.socket.socket(socket.AF_INET6 if ":" in local.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        _share(sock)
        await sock.bind((local.host, local.port))
    except BaseException:
        sock.close()
        raise
    return sock


def _share(sock: trio.socket.SocketType) -> None:
    """Let others of this user bind the port as well; Linux asks it of all of them, the last of which listens."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def bound_endpoint(listener: trio.SocketListener, carrier: Carrier) -> Endpoint:
    """Where a listener really listens, with the port that it got."""
    host, port = listener.socket.getsockname()[:2]
    return Endpoint(host, port, carrier)
