import pytest
from hypothesis import given
from hypothesis import strategies as st

from tela.errors import ConfigError
from tela.identity import Issuer, KeyPair, issue_issuer
from tela.net.invite import MAX_INVITE_BYTES, Invite, parse_invite, render_invite
from tela.net.multiaddrs import peer_id
from tela.record import SwarmId

NOW = 1_800_000_000
SWARM = SwarmId(b"s" * 16)
CA, ISSUING, HUB = (KeyPair(bytes([n]) * 32) for n in range(1, 4))
ISSUER = Issuer(ISSUING, issue_issuer(CA, swarm=SWARM, issuer=ISSUING.public, provider="eth", now=NOW, days=365))
TOKEN = ISSUER.token(zone="euler", region="ch", roles=("worker",), now=NOW, expires_s=86_400, uses=1)
ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{peer_id(HUB.public)}"
INVITE = Invite(SWARM, CA.public, (ADDRESS,), TOKEN)
LINE = render_invite(INVITE)


def test_invite_is_one_line_that_survives_a_shell():
    assert LINE.startswith("tela1-")
    assert all(character.isalnum() or character in "-_" for character in LINE)
    assert len(LINE) < 1024


@pytest.mark.parametrize("text", [LINE, f"  {LINE}\n", f"{LINE}\r\n"])
def test_parse_invite_is_the_inverse_of_render(text):
    assert parse_invite(text) == INVITE


def test_parse_invite_of_the_first_hub_has_no_addresses():
    first = Invite(SWARM, CA.public, (), TOKEN)
    assert parse_invite(render_invite(first)) == first


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tela1-",
        "hello",
        "tela2-" + LINE[6:],
        LINE[:-1],
        LINE[:-40],
        LINE[:20] + LINE[21:],
        LINE + "A",
        LINE + LINE,
        LINE[:50] + "!" + LINE[51:],
        LINE[:50] + "\n" + LINE[50:],
        "tela1-" + "A" * MAX_INVITE_BYTES,
        LINE.upper(),
        "tela1-ä",
    ],
)
def test_parse_invite_of_a_damaged_line_tells_what_to_do(text):
    with pytest.raises(ConfigError) as error:
        parse_invite(text)
    assert error.value.exit_code == 2
    assert error.value.hint


@given(st.integers(6, len(LINE) - 1), st.sampled_from("abcXYZ019-_"))
def test_parse_invite_with_one_wrong_character_is_never_taken(position, character):
    damaged = LINE[:position] + character + LINE[position + 1 :]
    if damaged == LINE:
        return
    try:
        parsed = parse_invite(damaged)
    except ConfigError:
        return
    assert parsed == INVITE  # the last character holds bits that mean nothing


@given(st.text(max_size=100))
def test_parse_invite_of_any_text_is_an_invite_or_a_config_error(text):
    for line in (text, "tela1-" + text):
        with pytest.raises(ConfigError):
            parse_invite(line)


@pytest.mark.parametrize("address", ["192.0.2.1:4001", ADDRESS[:-1], "/ip4/1.2.3.4/udp/1/p2p/x", "/unix/x"])
def test_parse_invite_with_a_malformed_hub_address_is_refused(address):
    with pytest.raises(ConfigError):
        parse_invite(render_invite(Invite(SWARM, CA.public, (address,), TOKEN)))
