"""Proxies on the way out: which one a dial takes, and what is said to it. Bytes in, bytes out: no sockets here.

Three ways out (design/overlay.md 5): directly, through an HTTP proxy by CONNECT (RFC 9110 section 9.3.6), or through
SOCKS5 (RFC 1928, credentials by RFC 1929), as ``ssh -D`` offers it. Names are resolved by the proxy: inside a cluster
without a way out there is often no DNS for the outside either. Credentials are in no error and no repr.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from tela.errors import ConfigError, ProxyError

MAX_HEAD_BYTES: Final = 16 * 1024
"""Of an HTTP proxy's answer; squid's error pages come behind the head and are not read."""
MAX_CREDENTIAL_BYTES: Final = 255
"""RFC 1929 has one byte for the length of each."""
DIRECT: Final = "direct"
"""As ``--proxy``: no proxy at all, whatever the environment says."""

_FORM: Final = "write it as http://user:password@host:port, socks5://host:port, or direct"
_SCHEMES: Final = {"http": "http", "socks5": "socks5", "socks5h": "socks5"}
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] (\d{3})(?: ([^\r\n]*))?\r\n")
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]{1,253}", re.ASCII)
_SOCKS_VERSION: Final = 5
_AUTH_NONE, _AUTH_PASSWORD, _AUTH_UNACCEPTED = 0, 2, 255
_ATYP_IP4, _ATYP_NAME, _ATYP_IP6 = 1, 3, 4
_SOCKS_ANSWERS: Final = {
    1: ("general failure", "proxy-unreachable"),
    2: ("its rules do not allow this connection", "proxy-refused"),
    3: ("network unreachable", "proxy-unreachable"),
    4: ("host unreachable", "proxy-unreachable"),
    5: ("connection refused by the target", "proxy-unreachable"),
    6: ("time to live expired", "proxy-unreachable"),
    7: ("it does not know CONNECT", "proxy-protocol"),
    8: ("it does not know this kind of address", "proxy-protocol"),
}
_HINTS: Final = {
    "proxy-auth": "put the right user:password into the proxy's URL; TELA_PROXY keeps it out of the process list",
    "proxy-refused": "the proxy's owner must allow CONNECT to this host and port; many allow port 443 only",
    "proxy-unreachable": "the proxy answers, but cannot reach the hub: check the hub's address and port",
    "proxy-protocol": "is it a proxy of this kind? " + _FORM,
}


@dataclass(frozen=True, slots=True)
class Proxy:
    """One proxy. ``str()`` is what may be logged."""

    scheme: str  # http | socks5
    host: str
    port: int
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{authority(self.host, self.port)}"


@dataclass(frozen=True, slots=True)
class Proxies:
    """What a node was told about proxies."""

    chosen: Proxy | None = None  # --proxy: for every dial
    ambient: Proxy | None = None  # HTTPS_PROXY: for dials to hubs
    exempt: tuple[str, ...] = ()  # NO_PROXY: never through either

    def route(self, host: str, port: int, *, is_hub: bool) -> Proxy | None:
        """The proxy for a dial, None for a direct one. This host is never reached through a proxy."""
        proxy = self.chosen or (self.ambient if is_hub else None)
        if proxy is None or is_loopback(host) or any(_covers(rule, host, port) for rule in self.exempt):
            return None
        return proxy


def find_proxies(setting: str, environ: Mapping[str, str]) -> tuple[Proxies, tuple[str, ...]]:
    """Proxies out of ``--proxy`` and the environment, and warnings about variables that cannot be used.

    Raises:
        ValueError: the setting is malformed; a malformed variable of the environment is a warning only, for it may be
            meant for other programs.
    """
    exempt = _first(environ, "no_proxy", "NO_PROXY")
    rules = tuple(rule.strip().lower() for rule in exempt.split(",") if rule.strip())
    if setting:
        chosen = None if setting == DIRECT else parse_proxy(setting)
        return Proxies(chosen, None, rules), ()
    ambient = _first(environ, "https_proxy", "HTTPS_PROXY")
    if not ambient:
        return Proxies(), ()
    try:
        return Proxies(None, parse_proxy(ambient), rules), ()
    except ValueError as error:
        return Proxies(), (f"HTTPS_PROXY is ignored: {error}",)


def parse_proxy(text: str) -> Proxy:
    """Read a proxy's URL; without a scheme it is an HTTP proxy, as for curl.

    >>> str(parse_proxy("socks5h://127.0.0.1:1080")), str(parse_proxy("u:secret@proxy.example:3128"))
    ('socks5://127.0.0.1:1080', 'http://proxy.example:3128')

    Raises:
        ValueError: not a proxy's URL; the message says how one is written, and repeats nothing secret.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"not a proxy's URL: {_FORM}") from None
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"proxies of kind {parts.scheme!r} are not known: {_FORM}")
    if not host or not port or parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(f"a proxy has a host and a port and no more: {_FORM}")
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    if max(len(user.encode()), len(password.encode())) > MAX_CREDENTIAL_BYTES:
        raise ValueError(f"user or password of the proxy is longer than {MAX_CREDENTIAL_BYTES} bytes")
    return Proxy(_SCHEMES[parts.scheme], host, port, user, password)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this host, by its name or address alone."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def authority(host: str, port: int) -> str:
    """``host:port``, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- HTTP CONNECT ----------------------------------------------------------------------------------------------------


def connect_request(proxy: Proxy, host: str, port: int) -> bytes:
    """The request for a tunnel to ``host:port``.

    Raises:
        ConfigError: the host, which a peer may have announced, would smuggle words into the request.
    """
    target = authority(_checked(host), port)
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.user or proxy.password:
        token = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {token}")
    return "\r\n".join([*lines, "", ""]).encode()


def head_bytes(received: bytes) -> int | None:
    """Length of the head at the start of ``received``, None while it is incomplete."""
    end = received.find(b"\r\n\r\n")
    return None if end < 0 else end + 4


def check_connect_reply(head: bytes) -> None:
    """Accept the head of a proxy's answer.

    Raises:
        ProxyError: it is no 2xx; message and code tell the proxy's answer.
    """
    status_line = _STATUS_LINE.match(head)
    if status_line is None:
        raise _error("answered what is no HTTP", "proxy-protocol")
    status = int(status_line[1])
    if 200 <= status < 300:
        return
    reason = (status_line[2] or b"").decode("ascii", "replace")[:80]
    code = {407: "proxy-auth", 502: "proxy-unreachable", 503: "proxy-unreachable", 504: "proxy-unreachable"}
    raise _error(f"answered {status} {reason}".rstrip(), code.get(status, "proxy-refused"))


# -- SOCKS5 ----------------------------------------------------------------------------------------------------------


def socks_greeting(proxy: Proxy) -> bytes:
    """The first message: what we can authenticate with."""
    methods = bytes([_AUTH_NONE, _AUTH_PASSWORD] if proxy.user else [_AUTH_NONE])
    return bytes([_SOCKS_VERSION, len(methods)]) + methods


def wants_credentials(reply: bytes, proxy: Proxy) -> bool:
    """Whether the answer to the greeting (2 bytes) asks for :func:`socks_credentials`.

    Raises:
        ProxyError: it speaks no SOCKS5, or accepts none of our methods.
    """
    version, method = reply
    if version != _SOCKS_VERSION:
        raise _error("answered what is no SOCKS5", "proxy-protocol")
    if method == _AUTH_PASSWORD and proxy.user:
        return True
    if method != _AUTH_NONE:
        raise _error("wants other credentials", "proxy-auth")
    return False


def socks_credentials(proxy: Proxy) -> bytes:
    """User and password, in clear (RFC 1929)."""
    user, password = proxy.user.encode(), proxy.password.encode()
    return bytes([1, len(user)]) + user + bytes([len(password)]) + password


def check_credentials_reply(reply: bytes) -> None:
    """Accept the answer to the credentials (2 bytes).

    Raises:
        ProxyError: they are wrong.
    """
    if reply[1] != 0:
        raise _error("did not accept user and password", "proxy-auth")


def socks_request(host: str, port: int) -> bytes:
    """The request for a connection; names go to the proxy as they are.

    Raises:
        ConfigError: the host is none.
    """
    address = _address(host)
    if address is None:
        name = _checked(host).encode()
        target = bytes([_ATYP_NAME, len(name)]) + name
    else:
        target = bytes([_ATYP_IP4 if address.version == 4 else _ATYP_IP6]) + address.packed
    return bytes([_SOCKS_VERSION, 1, 0]) + target + struct.pack(">H", port)


SOCKS_REPLY_HEAD_BYTES: Final = 5
"""Up to the first byte of the bound address, which tells the length of a name."""


def socks_reply_rest(head: bytes) -> int:
    """How many bytes follow the head of the answer to the request.

    Raises:
        ProxyError: there is no connection; message and code tell the proxy's answer.
    """
    version, answer, _, kind, first = head
    if version != _SOCKS_VERSION:
        raise _error("answered what is no SOCKS5", "proxy-protocol")
    if answer != 0:
        text, code = _SOCKS_ANSWERS.get(answer, ("unknown answer", "proxy-protocol"))
        raise _error(f"answered {answer}: {text}", code)
    n_address = {_ATYP_IP4: 4, _ATYP_IP6: 16, _ATYP_NAME: 1 + first}.get(kind)
    if n_address is None:
        raise _error(f"answered with an address of unknown kind {kind}", "proxy-protocol")
    return n_address - 1 + 2


# -- parts -----------------------------------------------------------------------------------------------------------


def _error(text: str, code: str) -> ProxyError:
    return ProxyError(text, code=code, hint=_HINTS[code])


def _checked(host: str) -> str:
    if not _HOST.fullmatch(host):
        raise ConfigError(f"not a host: {host[:64]!r}")
    return host


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name].strip() for name in names if environ.get(name, "").strip()), "")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _covers(rule: str, host: str, port: int) -> bool:
    """Whether one entry of NO_PROXY, in lower case, names a target: ``*``, domain, address, network, ``:port``."""
    host = host.lower().rstrip(".")
    if rule == "*":
        return True
    address = _address(host)
    if address is not None:
        try:
            return address in ipaddress.ip_network(rule.strip("[]"), strict=False)
        except ValueError:
            return rule == authority(host, port)
    name, _, rule_port = rule.partition(":")
    domain = name.removeprefix("*").lstrip(".")
    return rule_port in {"", str(port)} and (host == domain or host.endswith(f".{domain}"))
