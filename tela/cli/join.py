"""``tela join`` and ``tela ingress``: they become the daemon. What follows ``--`` is the engine's, untouched."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from tela.cli.options import environ, state_dir_option
from tela.cli.render import render_duration
from tela.config import NodeOptions, Seconds, Settings, Words, engine_options, load_settings, variable_of
from tela.engine.command import parse_command
from tela.errors import ConfigError, UsageError
from tela.net.endpoints import Choice
from tela.net.tunnel import find_proxies
from tela.paths import daemon_paths, default_name, open_state_dir
from tela.record import Role

if TYPE_CHECKING:  # loads PyNaCl; see tela.cli.swarm
    from tela.net.invite import Invite

DEFAULT_HUB_LISTEN: Final = "0.0.0.0:4001"
"""A hub must be found again after a restart, so its port is fixed; libp2p nodes use 4001 by custom."""
_ENGINE_ARGV: Final = "tela.engine_argv"

Function = TypeVar("Function", bound=Callable[..., Any])


class _WithEngineCommand(click.Command):
    """Cuts the arguments at the first ``--`` before click sees them: the engine's argv is not ours."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[_ENGINE_ARGV] = args[:at], tuple(args[at + 1 :])
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- ENGINE COMMAND..."]


def setting(*flags: str, key: str, text: str, **attributes: Any) -> Callable[[Function], Function]:  # noqa: ANN401
    """An option for a setting: help shows its default and its variable; None where the user gave none."""
    value: object = reduce(getattr, key.split("__"), Settings())
    notes = [variable_of(key)]
    if isinstance(value, Seconds):
        notes.append(f"default: {render_duration(value)}")
        attributes["metavar"] = "DURATION"
    elif value or value == 0:
        notes.append(f"default: {value}")
    return click.option(*flags, key, default=None, help=f"{text} [{'; '.join(notes)}]", **attributes)


def _words() -> list[Callable[[Any], Any]]:
    """Options by which an owner tells others of a node."""
    return [
        setting("--contact", key="contact", text="Whom to ask about this node; every member can read it."),
        setting(
            "--price",
            key="price",
            text="What an hour of one GPU costs, in the unit that the swarm agreed on.",
            type=float,
        ),
        setting("--tier", key="tier", text="Tier of service that the swarm agreed on, such as stable or spot."),
        setting(
            "--label",
            key="labels",
            text="Anything else to know of the node; may be given again.",
            multiple=True,
            metavar="KEY=VALUE",
        ),
    ]


def node_options(command: Function) -> Function:
    """Options of every daemon."""
    decorators: list[Callable[[Any], Any]] = [
        click.argument("invite", required=False, metavar="[INVITE]"),
        setting(
            "--name",
            key="name",
            text="What to call the daemon; by default its role, and the job's id under Slurm.",
            metavar="NAME",
        ),
        setting(
            "--listen",
            key="listen",
            text="Accept links here; may be given again. ws://HOST:PORT is for a proxy in front.",
            multiple=True,
            metavar="HOST:PORT",
        ),
        setting(
            "--advertise",
            key="advertise",
            text="Announce this instead; wss://HOST is what a proxy in front serves.",
            multiple=True,
            metavar="HOST:PORT",
        ),
        setting(
            "--iface",
            key="iface",
            text="Be reached on this interface only; may be given again. For --listen 0.0.0.0:PORT.",
            multiple=True,
            metavar="NAME",
        ),
        setting(
            "--exclude-cidr",
            key="exclude_cidr",
            text="Announce no address of this network; may be given again.",
            multiple=True,
            metavar="NETWORK",
        ),
        setting(
            "--proxy",
            key="proxy",
            text="Dial through this proxy, http://USER:PASSWORD@HOST:PORT or socks5://HOST:PORT; direct: through none. "
            "By default hubs are dialled through HTTPS_PROXY, but for what NO_PROXY names.",
            metavar="URL",
        ),
        *_words(),
        setting("--drain", key="drain", text="How long requests may take to end when the daemon stops."),
        state_dir_option,
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Read this file [TELA_CONFIG].",
        ),
        click.option("--verbose", "-v", "log_level", flag_value="debug", help="Log each message."),
        click.option("--quiet", "-q", "log_level", flag_value="warning", help="Log warnings and errors only."),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


@click.command(cls=_WithEngineCommand)
@node_options
@click.option(
    "--role", type=click.Choice(["worker", "hub"]), default="worker", show_default=True, help="A hub needs no engine."
)
@setting("--engine-port", key="engine__port", text="Port of the engine, where its command does not tell.", type=int)
@setting("--health-path", key="engine__health_path", text="Where the engine says that it is healthy.")
@setting("--models-path", key="engine__models_path", text="Where the engine lists its models.")
@setting("--canary/--no-canary", key="engine__canary", text="Ask for one token before the engine counts as ready.")
@setting("--start-timeout", key="engine__start_timeout", text="How long the engine may take to become ready.")
@setting("--restart", key="engine__restart", text="How often to restart an engine that ended.", type=int)
@click.pass_context
def join(context: click.Context, /, *, invite: str | None, role: str, **flags: Any) -> int:  # noqa: ANN401
    """Join a swarm with an engine, and serve until either ends.

    INVITE is the line that tela invite create printed, a file that holds it, or - for stdin; without it, TELA_INVITE
    is used. Everything after -- is the engine's command and is passed on untouched but for {port}, {host}, {model}.

    \b
      tela join worker.invite -- vllm serve Qwen/Qwen3-8B
      tela join worker.invite -- llama-server -m model.gguf --port {port}

    Ends with the engine's exit code, 128+n where signal n ended it, 70 where it ended with 0 unasked.
    """  # noqa: D301 - \b is click's mark for lines to be left as they are
    argv: tuple[str, ...] = context.meta.get(_ENGINE_ARGV, ())
    if role == Role.WORKER and not argv:
        raise UsageError("no engine command", hint="put it behind --, as in: tela join INVITE -- vllm serve MODEL")
    if role == Role.HUB and argv:
        raise UsageError("a hub runs no engine", hint="leave out --role hub, or what follows --")
    return _run(Role(role), invite, flags, is_hub=role == Role.HUB, argv=argv)


@click.command()
@node_options
@click.option("--hub", "is_hub", is_flag=True, help="Accept nodes of the swarm too: the first daemon of a swarm must.")
@setting("--http", key="http", text="Serve the OpenAI API here.", metavar="HOST:PORT")
def ingress(*, invite: str | None, is_hub: bool, **flags: Any) -> int:  # noqa: ANN401
    """Serve the swarm's models as one OpenAI API.

    INVITE is as for tela join.

    \b
      tela ingress --hub hub.invite
    """  # noqa: D301 - \b is click's mark for lines to be left as they are
    return _run(Role.INGRESS, invite, flags, is_hub=is_hub, argv=())


def _run(role: Role, invite: str | None, flags: Mapping[str, Any], *, is_hub: bool, argv: tuple[str, ...]) -> int:
    options = build_options(role, invite, flags, is_hub=is_hub, argv=argv)
    for warning in options.warnings:
        click.echo(f"warning: {warning}", err=True)
    from tela import observe
    from tela.node import run_node

    observe.configure(options.log_level)
    return run_node(options)


def build_options(
    role: Role, invite: str | None, flags: Mapping[str, Any], *, is_hub: bool, argv: tuple[str, ...]
) -> NodeOptions:
    """Everything that a run needs, from flags, environment and files.

    Raises:
        UsageError: no invite, or a bad name.
        ConfigError: a malformed invite or setting, or nowhere to keep state.
    """
    environment = environ()
    config_file, chosen_state_dir = flags.get("config_file"), flags.get("state_dir")
    given = {key: value for key, value in flags.items() if key not in {"config_file", "state_dir"} and value != ()}
    settings, warnings = load_settings(given, environment, config_file=config_file)
    if argv:
        parse_command(argv, engine_port=settings.engine.port, environ=environment)  # tells a mistake at once
    state_dir, warning = open_state_dir(chosen_state_dir, environment)
    name = settings.name or default_name(role, environment)
    proxies, proxy_warnings = find_proxies(settings.proxy, environment)
    return NodeOptions(
        name=name,
        role=role,
        is_hub=is_hub,
        invite=read_invite(invite, environment),
        paths=daemon_paths(name, state_dir, environment),
        listen=settings.listen or ((DEFAULT_HUB_LISTEN,) if is_hub else ()),
        advertise=settings.advertise,
        choice=Choice(settings.iface, settings.exclude_cidr),
        proxies=proxies,
        http=settings.http,
        is_open=settings.allow_any,
        engine=engine_options(settings.engine, argv) if argv else None,
        words=Words(contact=settings.contact, price=settings.price, tier=settings.tier, labels=settings.labels),
        drain_s=settings.drain,
        log_level=settings.log_level,
        warnings=(*warnings, *proxy_warnings, *([warning] if warning else [])),
    )


def read_invite(argument: str | None, environment: Mapping[str, str]) -> Invite:
    """The invite that an argument or TELA_INVITE holds or names: the line itself, a file, @file, or - for stdin.

    Raises:
        UsageError: none was given.
        ConfigError: it cannot be read, or is not an invite.
    """
    from tela.net.invite import parse_invite

    source = argument or environment.get("TELA_INVITE", "")
    if not source:
        raise UsageError(
            "no invite", hint="pass the line, or a file that holds it, as an argument or in TELA_INVITE; - reads stdin"
        )
    return parse_invite(_invite_text(source))


def _invite_text(source: str) -> str:
    from tela.net.invite import MAX_INVITE_BYTES

    if source == "-":
        return sys.stdin.read(MAX_INVITE_BYTES + 1)
    path = Path(source.removeprefix("@"))
    try:
        with path.open("rb") as file:
            return file.read(MAX_INVITE_BYTES + 1).decode(errors="replace")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG and not source.startswith("@"):
            return source  # an invite is one word, longer than any file name
        raise ConfigError(f"{source!r} is not an invite, nor a file that can be read: {error.strerror}") from error
