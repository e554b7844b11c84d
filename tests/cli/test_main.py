import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import tela
from tela import errors
from tela.cli.main import COMMANDS, cli, run

ROOT = Path(__file__).parents[2]
HEAVY = ("trio", "libp2p", "httpx", "ortools", "structlog", "prometheus_client", "cryptography", "nacl", "httptools")


def all_commands(command=cli, path=("tela",)):
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from all_commands(command.get_command(context, name), (*path, name))


@pytest.mark.parametrize("path", [path for path, _ in all_commands()], ids=" ".join)
def test_help_of_each_command_says_what_it_does(path):
    result = CliRunner().invoke(cli, [*path[1:], "--help"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage:")
    assert "\\b" not in result.output


@pytest.mark.parametrize(
    ("path", "command"), list(all_commands()), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_summary_of_each_command_fits_its_line_and_each_option_has_help(path, command):
    assert not command.get_short_help_str(60).endswith("...")
    for parameter in command.params:
        assert parameter.param_type_name == "argument" or parameter.help, parameter.name


def test_help_ends_with_the_exit_codes_of_every_error():
    output = CliRunner().invoke(cli, ["--help"]).output
    reference = (ROOT / "docs/reference/exit-codes.md").read_text()
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.TelaError):
            assert re.search(rf"\b{error.exit_code} ", output[output.index("Exit codes") :]), error
            assert f"| {error.exit_code} |" in reference, error


def test_version(capsys):
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"{tela.__version__}\n"
    assert run(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": tela.__version__}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nope"], "--nope"),
        (["nope"], "nope"),
        (["status", "--nope"], "--nope"),
        (["status", "extra"], "extra"),
        (["wait", "--timeout", "5y"], "'5y' is no duration"),
        (["wait", "--replicas", "0"], "replicas"),
        (["wait", "--for", "ever"], "ever"),
        (["status", "--name", "../x"], "'../x' cannot be a name"),
        (["swarm", "init", "--provider", "a b"], "'a b' cannot be a name"),
        (["invite", "create", "--uses", "0"], "uses"),
    ],
)
def test_usage_error_is_two_lines_on_stderr_and_exit_code_2(arguments, words, capsys):
    assert run(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    first, *rest = output.err.splitlines()
    assert first.startswith("tela: error: ")
    assert words in first
    assert len(rest) <= 1
    assert all(line.startswith("  hint: ") for line in rest)


def test_error_with_json_is_one_object_on_stderr(capsys):
    assert run(["status", "--json"]) == 3
    output = capsys.readouterr()
    error = json.loads(output.err)["error"]
    assert output.out == ""
    assert (error["code"], error["exit_code"]) == ("no-daemon", 3)
    assert error["hint"]


def test_json_of_the_engine_is_not_ours(capsys):
    assert run(["join", "--", "engine", "--json"]) == 2
    assert capsys.readouterr().err.startswith("tela: error: ")


def test_interrupt_exits_130(monkeypatch):
    def interrupt(environ):
        raise KeyboardInterrupt

    monkeypatch.setattr("tela.cli.status.running_daemons", interrupt)
    assert run(["status"]) == 130


def tela_process(*arguments, **options):
    program = "import sys; from tela.cli.main import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, **options
    )


def test_process_exits_with_the_code_and_without_a_traceback():
    done = tela_process("drain")
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("tela: error: no daemon")


def test_reader_that_goes_away_is_no_traceback():
    program = "import sys; from tela.cli.main import main; main(['--help'])"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    with process:
        assert b"Traceback" not in process.stderr.read()


LOADED = "import sys; from tela.cli.main import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["status"], ["status", "--json"], ["join", "--help"], ["version"], ["wait", "--timeout", "0s"]],
    ids=" ".join,
)
def test_light_commands_load_nothing_heavy(arguments):
    done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "tela.cli.main" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_status_of_a_live_daemon_loads_nothing_heavy(place):
    from tests.cli.conftest import serving
    from tests.lab.backend import FakeBackend

    with serving(place, FakeBackend()):
        done = subprocess.run([sys.executable, "-c", LOADED, "status"], capture_output=True, text=True, check=True)
    assert "euler" in done.stdout
    assert set(done.stderr.split()).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_summary_that_help_shows_is_the_command_s_own(name):
    command = cli.get_command(click.Context(cli), name)
    assert COMMANDS[name][1] == command.get_short_help_str(200)


@pytest.mark.parametrize("form", [["--json"], ["-o", "json"], ["--output", "json"]])
def test_json_is_asked_for_in_either_form(form, capsys):
    assert run(["version", *form]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": tela.__version__}
    assert run(["version", "--nonsense", *form]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["exit_code"] == 2


def test_table_is_the_form_unless_json_is_asked_for(capsys):
    assert run(["version", "-o", "table"]) == 0
    assert capsys.readouterr().out == f"{tela.__version__}\n"
    assert run(["version", "-o", "xml"]) == 2
