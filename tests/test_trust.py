"""The runbook of docs/explanation/trust.md holds commands that exist, with options that they have."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from tela.cli.main import cli

TRUST = Path(__file__).parent.parent / "docs" / "explanation" / "trust.md"
COMMANDS = [line for block in re.findall(r"```\n(.*?)```", TRUST.read_text(), re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("tela ")])
def test_command_of_the_runbook_can_be_given(line: str) -> None:
    command, words = cli, shlex.split(line)[1:]
    context = click.Context(command)
    while isinstance(command, click.Group):
        child = command.get_command(context, words.pop(0))
        assert child is not None, line
        command = child
    command.make_context("tela", words, resilient_parsing=False)


def test_runbook_has_every_command_that_takes_something_back() -> None:
    assert {"tela swarm rotate", "tela swarm revoke NODE", "tela invite revoke ID", "tela provider revoke NAME"} <= set(
        COMMANDS
    )
