from __future__ import annotations

import pytest

from tela.errors import ConfigError
from tela.net.endpoints import Endpoint, endpoints_of, parse_endpoint
from tela.net.multiaddrs import Carrier


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("127.0.0.1:0", Endpoint("127.0.0.1", 0)),
        ("[::1]:4001", Endpoint("::1", 4001)),
        ("ws://127.0.0.1:4080", Endpoint("127.0.0.1", 4080, Carrier.WS)),
        ("wss://hub.example.org", Endpoint("hub.example.org", 443, Carrier.WSS)),
        ("wss://hub.example.org/", Endpoint("hub.example.org", 443, Carrier.WSS)),
        ("wss://[2001:db8::5]", Endpoint("2001:db8::5", 443, Carrier.WSS)),
        ("wss://[2001:db8::5]:8443", Endpoint("2001:db8::5", 8443, Carrier.WSS)),
        ("ws://hub", Endpoint("hub", 80, Carrier.WS)),
    ],
)
def test_parse_endpoint(text, endpoint):
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:port", "host:65536", "http://host:1", "://host:1", "wss://host/path", "::1:4001"]
)
def test_malformed_endpoint_is_an_error_that_shows_the_form(text):
    with pytest.raises(ValueError, match="write"):
        parse_endpoint(text)
    with pytest.raises(ConfigError):
        endpoints_of([text])
