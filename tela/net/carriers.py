"""What is under Noise: sockets as they are, or a WebSocket in them, or that in TLS."""

from __future__ import annotations

import ssl

import trio

from tela.errors import PeerError
from tela.net.endpoints import Endpoint
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


def remote_host(stream: trio.abc.Stream) -> str:
    """The IP address at the other end of a socket; "" where it is reset already: an error would end the listener."""
    if not isinstance(stream, trio.SocketStream):
        return ""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""


def bound_endpoint(listener: trio.SocketListener, carrier: Carrier) -> Endpoint:
    """Where a listener really listens, with the port that it got."""
    host, port = listener.socket.getsockname()[:2]
    return Endpoint(host, port, carrier)
