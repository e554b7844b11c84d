"""Proxies: which one, what is said to them, what their answers mean; no sockets."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import ConfigError, ProxyError
from tela.net import tunnel
from tela.net.tunnel import Proxies, Proxy, find_proxies, parse_proxy

PLAIN = Proxy("http", "proxy.example", 3128)
KNOWN = Proxy("socks5", "127.0.0.1", 1080, "me", "secret")


@pytest.mark.parametrize(
    ("text", "proxy"),
    [
        ("http://proxy.example:3128", PLAIN),
        ("proxy.example:3128/", PLAIN),
        ("http://u:p%40ss@[2001:db8::1]:80", Proxy("http", "2001:db8::1", 80, "u", "p@ss")),
        ("socks5://127.0.0.1:1080", Proxy("socks5", "127.0.0.1", 1080)),
        ("socks5h://me:secret@127.0.0.1:1080", KNOWN),
    ],
)
def test_parse_proxy(text, proxy):
    parsed = parse_proxy(text)
    assert (parsed, parsed.user, parsed.password) == (proxy, proxy.user, proxy.password)


@pytest.mark.parametrize(
    "text",
    [
        "http://u:secret@h",
        "https://u:secret@h:443",
        "http://u:secret@h:99999",
        "http://u:secret@h:1/secret",
        "http://u:secret@[::1:80",
        f"http://{'s' * 256}@h:1",
        "http://h:1?secret",
        "//",
    ],
)
def test_parse_proxy_of_anything_else_tells_no_secret(text):
    with pytest.raises(ValueError, match=r"write it as|longer than 255") as raised:
        parse_proxy(text)
    assert "secret" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_proxy_shows_no_credentials():
    assert "secret" not in f"{KNOWN} {KNOWN!r} {Proxies(KNOWN)!r}"
    assert "'me'" not in f"{KNOWN!r}"


@pytest.mark.parametrize(
    ("setting", "environ", "proxies", "n_warnings"),
    [
        ("", {}, Proxies(), 0),
        ("", {"HTTPS_PROXY": "http://proxy.example:3128"}, Proxies(None, PLAIN), 0),
        ("", {"https_proxy": "proxy.example:3128", "HTTPS_PROXY": "other:1"}, Proxies(None, PLAIN), 0),
        ("", {"HTTPS_PROXY": "https://proxy.example:3128"}, Proxies(), 1),
        ("direct", {"HTTPS_PROXY": "http://proxy.example:3128"}, Proxies(), 0),
        ("proxy.example:3128", {"HTTPS_PROXY": "other:1", "NO_PROXY": "A, .b"}, Proxies(PLAIN, None, ("a", ".b")), 0),
        ("", {"https_proxy": "proxy.example:3128", "no_proxy": "*"}, Proxies(None, PLAIN, ("*",)), 0),
    ],
)
def test_find_proxies(setting, environ, proxies, n_warnings):
    found, warnings = find_proxies(setting, environ)
    assert (found, len(warnings)) == (proxies, n_warnings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_loopback_is_never_reached_through_a_proxy(host):
    assert Proxies(PLAIN, PLAIN).route(host, 1, is_hub=True) is None


def test_environment_is_for_hubs_and_the_option_for_everybody():
    assert Proxies(ambient=PLAIN).route("192.0.2.1", 1, is_hub=True) is PLAIN
    assert Proxies(ambient=PLAIN).route("192.0.2.1", 1, is_hub=False) is None
    assert Proxies(chosen=KNOWN, ambient=PLAIN).route("192.0.2.1", 1, is_hub=False) is KNOWN


@pytest.mark.parametrize(
    ("rule", "host", "is_exempt"),
    [
        ("*", "anything", True),
        ("example.org", "example.org", True),
        ("example.org", "hub.example.org", True),
        (".example.org", "hub.Example.org.", True),
        ("*.example.org", "hub.example.org", True),
        ("example.org", "notexample.org", False),
        ("hub.example.org:4001", "hub.example.org", True),
        ("hub.example.org:443", "hub.example.org", False),
        ("10.1.0.11", "10.1.0.11", True),
        ("10.0.0.0/8", "10.1.0.11", True),
        ("10.0.0.0/8", "11.1.0.11", False),
        ("10.1.0.11:4001", "10.1.0.11", True),
        ("2001:db8::/32", "2001:db8::1", True),
        ("[2001:db8::1]:4001", "2001:db8::1", True),
        ("2001:db8::/32", "10.1.0.11", False),
    ],
)
def test_no_proxy(rule, host, is_exempt):
    assert (Proxies(chosen=PLAIN, exempt=(rule,)).route(host, 4001, is_hub=True) is None) is is_exempt


def test_connect_request_names_the_target_and_carries_credentials():
    request = tunnel.connect_request(Proxy("http", "h", 1, "u", "p"), "hub.example", 4001)
    assert request.startswith(b"CONNECT hub.example:4001 HTTP/1.1\r\nHost: hub.example:4001\r\n")
    assert b"Proxy-Authorization: Basic " + base64.b64encode(b"u:p") in request
    assert request.endswith(b"\r\n\r\n")
    assert b"Authorization" not in tunnel.connect_request(PLAIN, "2001:db8::1", 1)
    assert b"CONNECT [2001:db8::1]:1 " in tunnel.connect_request(PLAIN, "2001:db8::1", 1)


@pytest.mark.parametrize("host", ["a\r\nX: 1", "a b", "", "a" * 254, "ü"])
def test_host_that_a_peer_made_up_is_not_said_to_the_proxy(host):
    with pytest.raises(ConfigError):
        tunnel.connect_request(PLAIN, host, 1)
    with pytest.raises(ConfigError):
        tunnel.socks_request(host, 1)


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "proxy-refused"),
        (b"HTTP/1.1 407 Proxy Authentication Required\r\nA: b\r\n\r\n", "proxy-auth"),
        (b"HTTP/1.0 503\r\n\r\n", "proxy-unreachable"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "proxy-refused"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "proxy-protocol"),
        (b"", "proxy-protocol"),
    ],
)
def test_connect_reply_that_is_a_no_tells_the_answer(head, code):
    with pytest.raises(ProxyError) as raised:
        tunnel.check_connect_reply(head)
    assert raised.value.code == code
    assert raised.value.hint
    assert "no HTTP" in str(raised.value) or head[9:12].decode() in str(raised.value)


def test_connect_reply_that_is_a_yes():
    tunnel.check_connect_reply(b"HTTP/1.0 200 Connection established\r\nVia: x\r\n\r\n")
    assert tunnel.head_bytes(b"HTTP/1.0 200 OK\r\n\r\n\x13/multistream") == 19
    assert tunnel.head_bytes(b"HTTP/1.0 200 OK\r\n\r") is None


def test_socks_messages():
    assert tunnel.socks_greeting(PLAIN) == b"\5\1\0"
    assert tunnel.socks_greeting(KNOWN) == b"\5\2\0\2"
    assert tunnel.socks_credentials(KNOWN) == b"\1\2me\6secret"
    assert tunnel.socks_request("hub.example", 4001) == b"\5\1\0\3\x0bhub.example\x0f\xa1"
    assert tunnel.socks_request("192.0.2.1", 80) == b"\5\1\0\1\xc0\0\2\1\0\x50"
    assert len(tunnel.socks_request("2001:db8::1", 80)) == 4 + 16 + 2


def test_socks_methods():
    assert tunnel.wants_credentials(b"\5\2", KNOWN)
    assert not tunnel.wants_credentials(b"\5\0", KNOWN)
    for reply, proxy, code in [
        (b"\5\xff", KNOWN, "proxy-auth"),
        (b"\5\2", PLAIN, "proxy-auth"),
        (b"HT", PLAIN, "proxy-protocol"),
    ]:
        with pytest.raises(ProxyError) as raised:
            tunnel.wants_credentials(reply, proxy)
        assert raised.value.code == code
    tunnel.check_credentials_reply(b"\1\0")
    with pytest.raises(ProxyError):
        tunnel.check_credentials_reply(b"\1\1")


@pytest.mark.parametrize(
    ("answer", "code"),
    [(1, "proxy-unreachable"), (2, "proxy-refused"), (5, "proxy-unreachable"), (9, "proxy-protocol")],
)
def test_socks_reply_that_is_a_no_tells_the_answer(answer, code):
    with pytest.raises(ProxyError, match=f"answered {answer}") as raised:
        tunnel.socks_reply_rest(bytes([5, answer, 0, 1, 0]))
    assert raised.value.code == code


@pytest.mark.parametrize(("kind", "rest"), [(1, 5), (4, 17), (3, 9)])
def test_socks_reply_that_is_a_yes_has_a_rest(kind, rest):
    assert tunnel.socks_reply_rest(bytes([5, 0, 0, kind, 7])) == rest


@given(st.binary(min_size=5, max_size=5))
def test_socks_reply_of_any_bytes_is_taken_or_a_proxy_error(head):
    if head[:2] == b"\5\0" and head[3] in {1, 3, 4}:
        assert 5 <= tunnel.socks_reply_rest(head) <= 257
    else:
        with pytest.raises(ProxyError):
            tunnel.socks_reply_rest(head)
