"""The ``tela`` program: its commands, and the one place where errors become lines and exit codes."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import click

import tela
from tela.cli.options import is_json_wanted, json_option
from tela.cli.render import error_lines
from tela.errors import TelaError, UsageError

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells have it."""

_EPILOG = """\b
Exit codes: 0 done or yes, 1 no or failed, 2 usage or configuration,
3 no daemon, 4 deadline passed, 5 refused, 6 integrity, 130 interrupted;
tela join ends with its engine's own code.
"""


COMMANDS: Final = {
    "doctor": ("doctor", "Check this host for what troubles a daemon."),
    "drain": ("leave", "Take no new requests; those in flight may end."),
    "ingress": ("join", "Serve the swarm's models as one OpenAI API."),
    "invite": ("invite", "Make invites, list them and take them back."),
    "join": ("join", "Join a swarm with an engine, and serve until either ends."),
    "leave": ("leave", "Drain a daemon, and wait until it has stopped."),
    "metrics": ("status", "Print a daemon's metrics in Prometheus' text format."),
    "provider": ("provider", "Manage the providers of a swarm."),
    "registry": ("registry", "Look into a daemon's replica of the registry."),
    "status": ("status", "Show your daemons on this host, and the swarm they see."),
    "swarm": ("swarm", "Make and manage swarms."),
    "wait": ("status", "Wait until a model, or the daemon, is serving."),
    "version": ("main", "Print the version of tela."),
}
"""Module and summary of each command: only the one that runs is loaded, and none for ``tela --help``."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"tela.cli.{module}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in sorted(COMMANDS.items())])


@click.group(
    cls=_Commands,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["--help"], "max_content_width": 100},
    no_args_is_help=True,
)
def cli() -> None:
    """GPUs in many places, one OpenAI-compatible service.

    \b
    A first swarm:
      tela swarm init > hub.invite
      tela ingress --hub hub.invite
      tela invite create > worker.invite
      tela join worker.invite -- vllm serve MODEL
    """  # noqa: D301 - \b is click's mark for lines to be left as they are


@cli.command()
@json_option
def version(*, as_json: bool) -> None:
    """Print the version of tela."""
    click.echo(json.dumps({"version": tela.__version__}) if as_json else tela.__version__)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        Its exit code (docs/reference/exit-codes.md). Errors have been told on stderr.
    """
    try:
        result = cli.main(args=list(arguments), prog_name="tela", standalone_mode=False)
    except TelaError as error:
        return _report(error, arguments)
    except click.ClickException as error:
        return _report(_usage_error(error), arguments)
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has what it wanted; nothing may be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return result if isinstance(result, int) else 0


def _usage_error(error: click.ClickException) -> UsageError:
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "tela"
    message = error.format_message().rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint=f"see {command} --help")


def _report(error: TelaError, arguments: Sequence[str]) -> int:
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for line in error_lines(error, as_json=is_json_wanted(ours)):
        click.echo(line, err=True)
    return error.exit_code
