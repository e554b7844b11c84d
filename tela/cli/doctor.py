"""``tela doctor``."""

from __future__ import annotations

import click

import tela
from tela.cli.options import environ, json_option
from tela.cli.render import render_table


@click.command()
@json_option
def doctor(*, as_json: bool) -> int:
    """Check this host for what troubles a daemon.

    Prints one line per check with the reason and the fix. Fails with 1 where a check fails.
    """
    from tela.cli.checks import Diagnosis, run_checks  # they load what asks the system, 45 ms

    checks = tuple(run_checks(environ()))
    if as_json:
        click.echo(Diagnosis(tela.__version__, checks).to_json())
    else:
        rows = [
            (check.verdict, check.name, check.why + (f"; fix: {check.fix}" if check.fix else "")) for check in checks
        ]
        click.echo(render_table(("VERDICT", "CHECK", "WHY"), rows))
    return int(any(check.verdict == "fail" for check in checks))
