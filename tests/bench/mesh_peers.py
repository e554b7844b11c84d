"""The ends that ``make bench-mesh`` compares: tela's mesh, a stock py-libp2p host, a TLS connection for each stream."""

from __future__ import annotations

import datetime as dt
import logging
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import libp2p
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_noise_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr

from tela.identity import KeyPair
from tela.net.libp2p import Libp2pMesh, open_mesh

READ_BYTES = 65_536
NAME_BYTES = 16
"""A TLS connection tells first, padded to this, which job it is for."""


class Stream(Protocol):
    """A byte stream of the bench."""

    async def send(self, data: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def finish(self) -> None: ...


Jobs = Mapping[str, Callable[[Stream], Awaitable[None]]]


class Client(Protocol):
    """Who dials the server of its kind."""

    async def dial(self) -> None: ...
    async def hang_up(self) -> None: ...
    async def open(self, job: str) -> Stream: ...


# -- tela -------------------------------------------------------------------------------------------------------------


class _TelaClient:
    def __init__(self, mesh: Libp2pMesh, address: str) -> None:
        self._mesh, self._address = mesh, address

    async def dial(self) -> None:
        self._peer = await self._mesh.dial([self._address])

    async def hang_up(self) -> None:
        await self._mesh.disconnect(self._peer)

    async def open(self, job: str) -> Stream:
        return await self._mesh.open(self._peer, f"/bench/{job}")


@asynccontextmanager
async def tela_client(address: str) -> AsyncIterator[Client]:
    async with open_mesh(KeyPair.generate(), []) as mesh:
        yield _TelaClient(mesh, address)


async def serve_tela(jobs: Jobs, tell: Callable[[str], None]) -> None:
    async with open_mesh(KeyPair.generate(), ["127.0.0.1:0"]) as mesh:
        for name, job in jobs.items():
            mesh.handle(f"/bench/{name}", job)
        tell(mesh.addresses[0])
        await trio.sleep_forever()


# -- stock py-libp2p --------------------------------------------------------------------------------------------------


class _StockStream:
    def __init__(self, stream) -> None:
        self._stream = stream

    async def send(self, data: bytes) -> None:
        await self._stream.write(data)

    async def receive(self) -> bytes:
        try:
            return await self._stream.read(READ_BYTES)
        except EOFError:
            return b""
        except Exception as error:
            if type(error).__name__ in {"StreamEOF", "StreamReset"}:
                return b""
            raise

    async def finish(self) -> None:
        await self._stream.close()


def _stock_host():
    logging.disable(logging.CRITICAL)
    keys = create_new_key_pair()
    noise = NoiseTransport(keys, noise_privkey=create_new_noise_key_pair().private_key)
    return libp2p.new_host(key_pair=keys, sec_opt={NOISE_PROTOCOL: noise}, muxer_opt={YAMUX_PROTOCOL: Yamux})


class _StockClient:
    def __init__(self, host, address: str) -> None:
        self._host, self._info = host, info_from_p2p_addr(Multiaddr(address))

    async def dial(self) -> None:
        await self._host.connect(self._info)

    async def hang_up(self) -> None:
        await self._host.disconnect(self._info.peer_id)

    async def open(self, job: str) -> Stream:
        return _StockStream(await self._host.new_stream(self._info.peer_id, [f"/bench/{job}"]))


@asynccontextmanager
async def stock_client(address: str) -> AsyncIterator[Client]:
    host = _stock_host()
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        yield _StockClient(host, address)


async def serve_stock(jobs: Jobs, tell: Callable[[str], None]) -> None:
    host = _stock_host()
    for name, job in jobs.items():

        async def serve(stream, job=job) -> None:
            await job(_StockStream(stream))

        host.set_stream_handler(f"/bench/{name}", serve)
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        tell(str(host.get_addrs()[0]))
        await trio.sleep_forever()


# -- trio TLS ---------------------------------------------------------------------------------------------------------


class _TlsStream:
    def __init__(self, stream: trio.SSLStream) -> None:
        self._stream = stream

    async def send(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        try:
            return await self._stream.receive_some(READ_BYTES)
        except trio.BrokenResourceError:
            return b""

    async def finish(self) -> None:
        await trio.aclose_forcefully(self._stream)


def _no_delay(stream: trio.SocketStream) -> trio.SocketStream:
    stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
    return stream


class _TlsClient:
    def __init__(self, port: int) -> None:
        self._port = port
        self._context = ssl.create_default_context()
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    async def dial(self) -> None:
        self._first = await self.open("usage")

    async def hang_up(self) -> None:
        await self._first.finish()

    async def open(self, job: str) -> Stream:
        tcp = _no_delay(await trio.open_tcp_stream("127.0.0.1", self._port))
        stream = trio.SSLStream(tcp, self._context, server_hostname="bench")
        await stream.do_handshake()
        await stream.send_all(job.encode().ljust(NAME_BYTES))
        return _TlsStream(stream)


@asynccontextmanager
async def tls_client(address: str) -> AsyncIterator[Client]:
    yield _TlsClient(int(address))


def _server_context() -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    now = dt.datetime.now(dt.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = builder.not_valid_before(now).not_valid_after(now + dt.timedelta(days=1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.pem"
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        signed = certificate.sign(key, hashes.SHA256())
        path.write_bytes(key.private_bytes(*form) + signed.public_bytes(serialization.Encoding.PEM))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(path)
    return context


async def serve_tls(jobs: Jobs, tell: Callable[[str], None]) -> None:
    context = _server_context()

    async def serve(tcp: trio.SocketStream) -> None:
        stream = trio.SSLStream(_no_delay(tcp), context, server_side=True)
        try:
            name = b""
            while len(name) < NAME_BYTES:
                name += await stream.receive_some(NAME_BYTES - len(name))
            await jobs[name.decode().strip()](_TlsStream(stream))
        except trio.BrokenResourceError:
            pass  # the client hung up

    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(
            lambda task_status: trio.serve_tcp(serve, 0, host="127.0.0.1", task_status=task_status)
        )
        tell(str(listener.socket.getsockname()[1]))


# -- more connections -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def more_tela(address: str, n_clients: int) -> AsyncIterator[None]:
    """So many clients that have dialled, each a peer of its own."""
    async with AsyncExitStack() as stack:
        for _ in range(n_clients):
            mesh = await stack.enter_async_context(open_mesh(KeyPair.generate(), []))
            await mesh.dial([address])
        yield


@asynccontextmanager
async def more_stock(address: str, n_clients: int) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for _ in range(n_clients):
            await (await stack.enter_async_context(stock_client(address))).dial()
        yield


@asynccontextmanager
async def more_tls(address: str, n_clients: int) -> AsyncIterator[None]:
    clients = [_TlsClient(int(address)) for _ in range(n_clients)]
    for client in clients:
        await client.dial()
    yield
    for client in clients:
        await client.hang_up()


CLIENTS = {"tela": tela_client, "stock": stock_client, "tls": tls_client}
SERVERS = {"tela": serve_tela, "stock": serve_stock, "tls": serve_tls}
MORE = {"tela": more_tela, "stock": more_stock, "tls": more_tls}
