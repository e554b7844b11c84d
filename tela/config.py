"""What a daemon is told: command line > environment > ./tela.toml > the user's tela.toml > defaults.

:class:`Settings` is what users may write, in the same words everywhere: ``--start-timeout 10m``,
``TELA_ENGINE__START_TIMEOUT=10m``, ``[engine] start_timeout = "10m"``.  :class:`NodeOptions` is what one run of a node
gets: settings, invite, engine command and paths, checked and in SI units.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tela.errors import ConfigError
from tela.net.endpoints import Choice, parse_endpoint
from tela.net.tunnel import Proxies, find_proxies
from tela.paths import Paths, user_config_file
from tela.record import MAX_LABELS, Role

if TYPE_CHECKING:  # tela --help shows defaults of Settings and must not load PyNaCl (style.md 3.6)
    from tela.net.invite import Invite

MAX_CONFIG_BYTES: Final = 1024 * 1024
"""A configuration file is small; anything longer is a mistake, such as a weights file."""

MAX_WORDS_BYTES: Final = 128
"""Of a contact, a tier or a label; all of them fit into one record."""

OTHER_VARIABLES: Final = {
    "TELA_CONFIG": "configuration file, instead of ./tela.toml and the user's",
    "TELA_DEBUG_VALIDATE": "1: cores check their invariants after every event",
    "TELA_INVENTORY": "JSON file that declares the GPUs of this host",
    "TELA_INVITE": "the invite, or a file that holds it",
    "TELA_LOG": "json: log as JSON lines on a terminal too",
    "TELA_RUNTIME_DIR": "directory of the control sockets",
    "TELA_STATE_DIR": "directory of keys, certificates and swarms",
}
"""Variables that are no settings: they are read before, or beside, the configuration."""

_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", re.ASCII)


class Seconds(float):
    """A length of time in a setting, written as ``90s`` or ``1h30m``; bare numbers are seconds."""

    __slots__ = ()


def parse_duration(text: str) -> float:
    """Seconds.

    >>> parse_duration("30d"), parse_duration("1h30m"), parse_duration("90")
    (2592000.0, 5400.0, 90.0)

    Raises:
        ValueError: not a duration; the message says how one is written.
    """
    compact = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d+)?", compact, re.ASCII):
        return float(compact)
    parts = _DURATION.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise ValueError(f"{text!r} is no duration: write it as 90s, 10m, 12h or 30d")
    return sum(float(number) * _UNITS_S[unit] for number, unit in parts)


def parse_host_port(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:8080`` or ``[::1]:8080``.

    Raises:
        ValueError: another form, or no such port.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isdecimal() or not port.isascii() or int(port) > 65_535:
        raise ValueError(f"{text!r} is no address: write it as 127.0.0.1:8080 or [::1]:8080")
    return host, int(port)


# -- what users write -----------------------------------------------------------------------------------------------


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to run and watch the wrapped engine."""

    port: int | None = None
    health_path: str = "/health"
    models_path: str = "/v1/models"
    canary: bool = True
    start_timeout: Seconds = Seconds(1800)  # a 400 GB model from a cold parallel file system takes 20 minutes
    restart: int = 0
    grace: Seconds = Seconds(8)  # TERM to KILL; with the drain it fits into Slurm's KillWait of 30 s

    def __post_init__(self) -> None:
        if self.port is not None and not 0 < self.port < 65_536:
            raise ValueError(f"port: {self.port} is none, they end at 65535")
        if self.restart < 0:
            raise ValueError(f"restart: {self.restart} is negative")


def _check_address(key: str, address: str, parse: Callable[[str], object]) -> None:
    try:
        parse(address)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that flags, environment and files may set."""

    name: str = ""
    listen: tuple[str, ...] = ()
    advertise: tuple[str, ...] = ()
    iface: tuple[str, ...] = ()
    exclude_cidr: tuple[str, ...] = ()
    http: str = "127.0.0.1:8080"
    allow_any: bool = False
    proxy: str = ""  # "": HTTPS_PROXY for dials to hubs; may hold a password
    drain: Seconds = Seconds(20)  # Slurm kills 30 s after TERM; the engine needs the rest to stop
    contact: str = ""
    price: float | None = None
    tier: str = ""
    labels: tuple[str, ...] = ()
    log_level: str = "info"
    engine: EngineSettings = EngineSettings()

    def __post_init__(self) -> None:
        for key, addresses in (("listen", self.listen), ("advertise", self.advertise)):
            for address in addresses:
                _check_address(key, address, parse_endpoint)
        _check_address("http", self.http, parse_host_port)
        for network in self.exclude_cidr:
            _check_address("exclude_cidr", network, ipaddress.ip_network)
        try:
            find_proxies(self.proxy, {})
        except ValueError as error:
            raise ValueError(f"proxy: {error}") from error
        _check_words(self)
        if self.log_level not in {"debug", "info", "warning", "error"}:
            raise ValueError(f"log_level: {self.log_level!r} is none of debug, info, warning, error")


def _check_words(settings: Settings) -> None:
    """What goes into the registry, where every member must be able to take it in."""
    if settings.price is not None and not 0 <= settings.price < math.inf:
        raise ValueError(f"price: {settings.price} is none")
    if len(settings.labels) > MAX_LABELS:
        raise ValueError(f"labels: {len(settings.labels)} are too many, at most {MAX_LABELS}")
    for key, text in (
        ("contact", settings.contact),
        ("tier", settings.tier),
        *(("labels", label) for label in settings.labels),
    ):
        if len(text.encode()) > MAX_WORDS_BYTES or not text.isprintable():
            raise ValueError(f"{key}: {text[:40]!r} is too long, or not printable; at most {MAX_WORDS_BYTES} bytes")
    for label in settings.labels:
        if not re.fullmatch(r"[A-Za-z0-9._/-]+=.*", label):
            raise ValueError(f"labels: {label!r} is none: write it as rack=12")


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], *, config_file: Path | None = None
) -> tuple[Settings, tuple[str, ...]]:
    """Merge the layers. Keys of ``flags`` are paths with ``__`` between the parts; None means not given.

    Returns:
        The settings, and warnings about variables that look like settings and are none.

    Raises:
        ConfigError: a layer holds an unknown key or a bad value; the message names both layer and key.
    """
    merged: dict[str, Any] = {}
    files = [(str(path), _read_toml(path)) for path in _config_files(environ, config_file)]
    variables, warnings = _from_environment(environ)
    given = _nest({key: value for key, value in flags.items() if value is not None})
    for source, layer in [*files, ("the environment", variables), ("the command line", given)]:
        _convert(layer, source)  # on its own first, so that an error names the layer it is in
        _merge(merged, layer)
    return _convert(merged, "the configuration"), warnings


def setting_keys(struct: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[str]:
    """Every setting as a path such as ``engine__port``."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from setting_keys(field.type, f"{prefix}{field.name}__")
        else:
            yield prefix + field.name


def variable_of(key: str) -> str:
    """The environment variable of a setting."""
    return f"TELA_{key.upper()}"


def _config_files(environ: Mapping[str, str], config_file: Path | None) -> list[Path]:
    named = config_file or (Path(environ["TELA_CONFIG"]) if environ.get("TELA_CONFIG") else None)
    if named:
        return [named]
    candidates = [user_config_file(environ), Path("tela.toml")]
    return [path for path in candidates if path is not None and path.is_file()]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is no configuration file: it is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        return msgspec.toml.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    known = {variable_of(key): key for key in setting_keys()}
    flat: dict[str, Any] = {}
    warnings = []
    for variable in sorted(name for name in environ if name.startswith("TELA_")):
        if variable in known:
            key = known[variable]
            is_list = isinstance(getattr(Settings(), key, None), tuple)
            flat[key] = environ[variable].split(",") if is_list else environ[variable]
        elif variable not in OTHER_VARIABLES:
            warnings.append(f"the environment variable {variable} is no setting of tela and is ignored")
    return _nest(flat), tuple(warnings)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *tables, last = key.split("__")
        table = nested
        for part in tables:
            table = table.setdefault(part, {})
        table[last] = value
    return nested


def _merge(target: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _convert(layer: dict[str, Any], source: str) -> Settings:
    try:
        return msgspec.convert(layer, Settings, strict=False, dec_hook=_decode_seconds)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def _decode_seconds(target: type, value: object) -> Seconds:
    assert target is Seconds
    return Seconds(parse_duration(str(value)))


# -- what one run gets ----------------------------------------------------------------------------------------------


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The wrapped engine: its command as the user wrote it, and how to watch it."""

    argv: tuple[str, ...]
    engine_port: int | None
    health_path: str
    models_path: str
    is_canary: bool
    start_timeout_s: float
    restart: int
    grace_s: float


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner wants others to know of a node."""

    contact: str = ""
    price: float | None = None
    tier: str = ""
    labels: tuple[str, ...] = ()


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that :func:`tela.node.run_node` needs to know."""

    name: str
    role: Role
    is_hub: bool
    invite: Invite
    paths: Paths
    listen: tuple[str, ...]  # HOST:PORT or ws://HOST:PORT; empty: outbound only
    choice: Choice  # of interfaces to be reached on
    advertise: tuple[str, ...]  # to announce instead of what is listened on; wss://HOST as well
    proxies: Proxies  # on the way out
    http: str  # HOST:PORT of the OpenAI API; used where the role is ingress
    is_open: bool  # serve clients of other users and hosts too
    engine: EngineOptions | None
    words: Words  # of the owner, for the registry
    drain_s: float
    log_level: str
    warnings: tuple[str, ...] = ()  # found before the start; status shows them


def engine_options(settings: EngineSettings, argv: tuple[str, ...]) -> EngineOptions:
    """Engine settings and the command after ``--``."""
    return EngineOptions(
        argv=argv,
        engine_port=settings.port,
        health_path=settings.health_path,
        models_path=settings.models_path,
        is_canary=settings.canary,
        start_timeout_s=settings.start_timeout,
        restart=settings.restart,
        grace_s=settings.grace,
    )
