import json

import pytest

from tela.cli.render import error_lines, printable, render_duration, render_gpus, render_status, render_table
from tela.errors import ConfigError
from tela.views import NodeView, Status


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.4, "0s"),
        (59.6, "1m"),
        (192, "3m12s"),
        (3600, "1h"),
        (3661, "1h1m"),
        (90_000, "1d1h"),
        (86_400 * 400, "400d"),
    ],
)
def test_render_duration_keeps_the_two_largest_units(seconds, text):
    assert render_duration(seconds) == text


def test_render_table_aligns_and_marks_what_is_empty():
    table = render_table(("A", "LONG"), [("wide cell", ""), ("x", "y")])
    assert table.splitlines() == ["A          LONG", "wide cell  -", "x          y"]


@pytest.mark.parametrize(
    ("text", "shown"), [("plain é 模", "plain é 模"), ("a\nb\tc", "a?b?c"), ("\x1b[31m", "?[31m"), ("\u202e", "?")]
)
def test_printable_keeps_text_and_no_control(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, ""),
        ({"n_gpus": 2}, "2x GPU"),
        ({"n_gpus": 1, "gpu": "H200", "vram_bytes": 150_754_820_096}, "1x H200 151 GB"),
    ],
)
def test_render_gpus(facts, text):
    assert render_gpus(NodeView(node="a", state="serving", **facts)) == text


def test_render_status_of_a_daemon_alone_is_one_table():
    alone = Status(version="1", pid=1, name="w", node="a", swarm="b", roles=(), state="join", uptime_s=0)
    assert len(render_status(alone).splitlines()) == 2


def test_error_lines_hold_message_and_hint_on_lines_of_their_own():
    error = ConfigError("what\nhappened", hint="do this")
    assert error_lines(error, as_json=False) == ["tela: error: what?happened", "  hint: do this"]
    assert error_lines(ConfigError("x"), as_json=False) == ["tela: error: x"]
    (line,) = error_lines(error, as_json=True)
    assert json.loads(line) == {
        "error": {"code": "config", "message": "what\nhappened", "hint": "do this", "exit_code": 2}
    }
