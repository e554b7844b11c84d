"""What several commands share: option types, options, and the lines that tell the next step."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tela.errors import UsageError
from tela.paths import check_name


def _parse_seconds(text: str) -> float:
    from tela.config import parse_duration  # status takes no duration and loads no configuration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _named(name: str, parse: Callable[[str], Any]) -> click.types.FuncParamType[str, Any]:
    parameter_type = click.types.FuncParamType(parse)
    parameter_type.name = name  # what help shows in place of a value
    return parameter_type


DURATION = _named("duration", _parse_seconds)
"""``90s``, ``10m``, ``12h``, ``30d``; a bare number is seconds. The value is a float in seconds."""
NAME = _named("name", check_name)
"""A name of a daemon, swarm, provider, zone or region."""

name_option = click.option("--name", type=NAME, envvar="TELA_NAME", help="The daemon, where several run.")
state_dir_option = click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of keys, certificates and swarms [TELA_STATE_DIR].",
)


def json_option(command: Callable[..., object]) -> Callable[..., object]:
    """``-o json`` and its short form ``--json``: the command gets ``as_json``."""

    @click.option("--json", "output", flag_value="json", default=None, help="The same as -o json: one JSON object.")
    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="Form of the answer.")
    @functools.wraps(command)
    def with_form(*arguments: object, output: str, **options: object) -> object:
        return command(*arguments, as_json=output == "json", **options)

    return with_form


def is_json_wanted(arguments: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also where it is too wrong to be parsed."""
    pairs = itertools.pairwise(arguments)
    return "--json" in arguments or any(pair in {("-o", "json"), ("--output", "json")} for pair in pairs)


def next_step(*lines: str) -> None:
    """Tell what to do next: on stderr, so that stdout holds the answer alone."""
    for line in lines:
        click.echo(line, err=True)


def environ() -> dict[str, str]:
    """The environment of this process, as a value."""
    return dict(os.environ)
