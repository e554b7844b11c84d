import io
import json

import msgspec
import pytest

from tela.cli.main import run
from tela.views import ChangeView, EntryView, VoteView
from tests.cli.conftest import serving
from tests.lab.backend import FakeBackend
from tests.lab.statements import NOW


def entry(node="aa", *, version=3, fingerprint="01", votes=(), **fields):
    return EntryView(
        node=node * 32,
        kind="node",
        name="evil\x1b[2J" if node == "ee" else f"n-{node}",
        status="serving",
        session=7,
        version=version,
        incarnation=0,
        floor=6,
        issued_unix_s=NOW,
        end_unix_s=NOW + 3600,
        size_bytes=371,
        fingerprint=fingerprint * 8,
        votes=votes,
        **fields,
    )


SUSPICION = VoteView(observer="b0b0b0b0", kind="suspect", session=7, incarnation=0, issued_unix_s=NOW)


def dump_of(place, capsys, *entries, swarm="00112233"):
    backend = FakeBackend(swarm=swarm)
    backend.entries = entries
    with serving(place, backend):
        assert run(["registry", "dump", "--json"]) == 0
    return capsys.readouterr().out


def diff(place, capsys, monkeypatch, here, there, *options):
    """Exit code and output of a diff of ``here`` with a dump from stdin."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(there.encode())))
    backend = FakeBackend()
    backend.entries = here
    with serving(place, backend):
        code = run(["registry", "diff", "-", *options])
    return code, capsys.readouterr()


def test_dump_shows_each_entry_and_who_votes_on_it(place, capsys):
    backend = FakeBackend()
    backend.entries = (entry("aa"), entry("ee", votes=(SUSPICION,)))
    with serving(place, backend):
        assert run(["registry", "dump"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["aaaaaaaa", "n-aa", "node", "serving", "7", "3", "0", "1h", "371", "-"]
    assert lines[2].endswith("suspect by b0b0b0b0")
    assert "\x1b" not in lines[2]
    assert lines[-1] == "2 entries, root 0000000000000000"


def test_diff_of_equal_replicas_succeeds(place, capsys, monkeypatch):
    there = dump_of(place, capsys, entry())
    code, output = diff(place, capsys, monkeypatch, (entry(),), there)
    assert (code, output.out) == (0, "the same 1 entries as at a1b2c3d4, root 0000000000000000\n")


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        ((entry(),), (), "only here"),
        ((), (entry(),), "only there"),
        ((entry(version=4, fingerprint="02"),), (entry(),), "newer here"),
        ((entry(),), (entry(version=4, fingerprint="02"),), "newer there"),
        ((entry(fingerprint="02", votes=(SUSPICION,)),), (entry(),), "the votes differ"),
        ((entry(fingerprint="02"),), (entry(),), "two records of one version"),
    ],
)
def test_diff_names_the_replica_that_is_behind(place, capsys, monkeypatch, here, there, why):
    dump = dump_of(place, capsys, *there)
    code, output = diff(place, capsys, monkeypatch, here, dump, "--json")
    assert code == 1
    (difference,) = json.loads(output.out)["differences"]
    assert difference["why"] == why
    code, output = diff(place, capsys, monkeypatch, here, dump)
    assert code == 1
    assert output.out.splitlines()[1].endswith(why)


def test_diff_with_another_swarm_or_no_dump_is_an_error(place, capsys, monkeypatch):
    code, output = diff(place, capsys, monkeypatch, (), dump_of(place, capsys, swarm="ffffffff"))
    assert code == 2
    assert "swarm ffffffff" in output.err
    code, output = diff(place, capsys, monkeypatch, (), "{}")
    assert code == 1
    assert "tela registry dump --json" in output.err


def change(node, status, unix_s=NOW):
    return ChangeView(
        unix_s=unix_s, node=node, name="w", was="", status=status, reason="it says so", heard_from="b0b0b0b0"
    )


def test_log_filters_by_node_and_keeps_the_last(place, capsys):
    backend = FakeBackend()
    backend.changed = (change("aa000000", "join"), change("bb000000", "join"), change("aa000000", ""))
    with serving(place, backend):
        assert run(["registry", "log"]) == 0
        everything = capsys.readouterr().out.splitlines()
        assert run(["registry", "log", "--node", "aa", "--limit", "1", "--json"]) == 0
        last = msgspec.json.decode(capsys.readouterr().out)
    assert len(everything) == 4
    assert everything[1].split()[2:] == ["aa000000", "w", "unknown", "join", "it", "says", "so", "b0b0b0b0"]
    assert "forgotten" in everything[3]
    assert [(one["node"], one["status"]) for one in last["changes"]] == [("aa000000", "")]
