"""Members that accepted links, on disk."""

from __future__ import annotations

import stat

import pytest

from tela.identity import KeyPair
from tela.net.known_peers import MAX_ADDRESSES, MAX_FILE_BYTES, MAX_KNOWN_PEERS, KnownPeers
from tela.net.multiaddrs import peer_id
from tela.record import NodeId


def node(number: int) -> NodeId:
    return KeyPair(number.to_bytes(32, "big")).public


def address(peer: NodeId, host: str = "192.0.2.1") -> str:
    return f"/ip4/{host}/tcp/4001/p2p/{peer_id(peer)}"


def test_known_peers_survive_a_restart(tmp_path):
    path = tmp_path / "node" / "known-peers.json"
    known = KnownPeers(path, now=lambda: 5.0)
    known.remember(node(1), [address(node(1))], is_hub=True)
    known.remember(node(2), [address(node(2)), address(node(2), "192.0.2.2")], is_hub=False)
    known.remember(node(2), [address(node(2), "192.0.2.3")], is_hub=False)
    again = KnownPeers(path, now=lambda: 6.0)
    assert again.addresses() == {node(1): (address(node(1)),), node(2): (address(node(2), "192.0.2.3"),)}
    assert again.hubs() == {node(1)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["known-peers.json"]


def test_known_peers_are_bounded_and_the_longest_unseen_makes_room(tmp_path):
    clock = iter(range(1000))
    known = KnownPeers(tmp_path / "known", now=lambda: next(clock))
    for number in range(1, MAX_KNOWN_PEERS + 6):
        known.remember(node(number), [address(node(number))] * 20, is_hub=False)
        known.remember(node(1), [address(node(1))], is_hub=False)
    peers = known.addresses()
    assert len(peers) == MAX_KNOWN_PEERS
    assert node(1) in peers
    assert node(2) not in peers
    assert max(map(len, peers.values())) == MAX_ADDRESSES
    assert (tmp_path / "known").stat().st_size < MAX_FILE_BYTES
    assert KnownPeers(tmp_path / "known", now=lambda: 0).addresses() == peers


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": {"addresses": ["/ip4/1.1.1.1/tcp/1"], "linked_unix_s": 1}}',
        b'{"a": {"addresses": [], "linked_unix_s": 1}}',
        b"{" + b" " * MAX_FILE_BYTES + b"}",
        b'"\xff"',
    ],
)
def test_file_that_is_none_of_ours_is_ignored_with_a_line_and_replaced(tmp_path, content, capsys):
    path = tmp_path / "known"
    path.write_bytes(content)
    known = KnownPeers(path, now=lambda: 1.0)
    assert known.addresses() == {}
    assert "peers.file" in capsys.readouterr().out
    known.remember(node(1), [address(node(1))], is_hub=False)
    assert set(KnownPeers(path, now=lambda: 1.0).addresses()) == {node(1)}


def test_disk_that_cannot_be_written_costs_a_line_only(tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"")
    known = KnownPeers(None, now=lambda: 1.0)
    known.remember(node(1), [address(node(1))], is_hub=False)
    assert capsys.readouterr().out == ""
    known = KnownPeers(tmp_path / "file" / "known", now=lambda: 1.0)
    known.remember(node(1), [address(node(1))], is_hub=False)
    assert "cannot write" in capsys.readouterr().out
    assert set(known.addresses()) == {node(1)}
