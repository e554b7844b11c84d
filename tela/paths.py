"""Where a daemon keeps its state and its control socket, on login nodes, compute nodes and in containers.

tela needs one writable directory.  Homes may be unset, read-only or shared; TMPDIR may be long; the uid may have no
passwd entry (faults.md I04, I05).  So every path is found by trying, the environment is an argument, and whatever lies
under a world-writable directory must be ours and closed to others before it is used.
"""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tela.errors import ConfigError, UsageError

MAX_SOCKET_PATH_BYTES: Final = 100
"""sun_path holds 108 bytes on Linux and 104 elsewhere, with the final NUL; some are left for a debugger's suffix."""
MAX_NAME_BYTES: Final = 32
"""Longest name of a daemon, swarm or provider: with it the fallback socket path stays at 75 bytes."""
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_BYTES - 1}}}", re.ASCII)
_SOCKET_SUFFIX: Final = ".sock"
_LOCAL_DIRECTORIES: Final = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - only private subdirectories are used
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Paths:
    """Files of one daemon."""

    state_dir: Path
    socket: Path
    name: str

    @property
    def node_dir(self) -> Path:
        """Its key, certificate, known peers and token uses."""
        return self.state_dir / "nodes" / self.name


def check_name(name: str, what: str = "name") -> str:
    """``name``, where it can be a file name and part of a socket path.

    Raises:
        UsageError: empty, too long, or with other characters than letters, digits, dot, underscore and dash.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a {what}",
            hint=f"use up to {MAX_NAME_BYTES} letters, digits, dots, dashes or underscores, a letter or digit first",
        )
    return name


def default_name(role: str, environ: Mapping[str, str]) -> str:
    """The role, with the job's id under Slurm: jobs that share a home must not share a node key."""
    job = environ.get("SLURM_JOB_ID", "")
    return check_name(f"{role}-{job}" if job else role)


def daemon_paths(name: str, state_dir: Path, environ: Mapping[str, str]) -> Paths:
    """Paths of the daemon called ``name``; makes the socket's directory.

    Raises:
        ConfigError: no directory can hold the socket.
    """
    return Paths(state_dir=state_dir, socket=_socket(open_runtime_dir(environ), check_name(name)), name=name)


# -- state ----------------------------------------------------------------------------------------------------------


def open_state_dir(chosen: Path | None, environ: Mapping[str, str]) -> tuple[Path, str]:
    """The state directory, made if need be, and a warning where it will not outlive the job ("" otherwise).

    Order: ``chosen`` (--state-dir), TELA_STATE_DIR, XDG_STATE_HOME or HOME, SLURM_TMPDIR, TMPDIR, /tmp, /dev/shm.

    Raises:
        ConfigError: a directory that was asked for by name is not writable, or none is.
    """
    named = chosen or _path_in(environ, "TELA_STATE_DIR")
    if named:
        if not _is_usable(named):
            raise ConfigError(f"the state directory {named} is not writable", hint="choose another with --state-dir")
        return named, ""
    home = _home_directory(environ, "XDG_STATE_HOME", ".local/state")
    if home and _is_usable(home / "tela"):
        return home / "tela", ""
    for parent in _temporary_directories(environ):
        candidate = parent / f"tela-{os.geteuid()}"
        if _is_usable(candidate) and _is_private(candidate):
            return (
                candidate,
                f"no writable home: state is kept in {candidate}; set TELA_STATE_DIR to keep it for longer",
            )
    raise ConfigError("no writable directory for tela's state", hint="name one with --state-dir or TELA_STATE_DIR")


def user_config_file(environ: Mapping[str, str]) -> Path | None:
    """The user's tela.toml, whether it exists or not; None without a home."""
    home = _home_directory(environ, "XDG_CONFIG_HOME", ".config")
    return home / "tela" / "tela.toml" if home else None


def _home_directory(environ: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    named = _path_in(environ, variable)
    if named:
        return named
    home = _path_in(environ, "HOME")
    return home / below_home if home and home != Path("/") else None


def _temporary_directories(environ: Mapping[str, str]) -> Iterator[Path]:
    for variable in ("SLURM_TMPDIR", "TMPDIR"):
        named = _path_in(environ, variable)
        if named:
            yield named
    yield from _LOCAL_DIRECTORIES


def _path_in(environ: Mapping[str, str], variable: str) -> Path | None:
    """An absolute path; relative ones are ignored, as the XDG specification asks."""
    value = environ.get(variable, "")
    return Path(value) if value.startswith("/") else None


# -- the control socket ---------------------------------------------------------------------------------------------


def runtime_dirs(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Directories that may hold this user's sockets, best first; the same on both ends.

    TELA_RUNTIME_DIR, else XDG_RUNTIME_DIR/tela, each only where it keeps socket paths short enough; then
    ``/tmp/tela-<uid>-<8 hex of the host's name>``, so that a /tmp shared by hosts mixes up nothing.
    """
    named, session = _path_in(environ, "TELA_RUNTIME_DIR"), _path_in(environ, "XDG_RUNTIME_DIR")
    wanted = [named] if named else [session / "tela"] if session else []
    tag = f"{zlib.crc32(os.uname().nodename.encode()):08x}"
    fallbacks = [parent / f"tela-{os.geteuid()}-{tag}" for parent in _LOCAL_DIRECTORIES]
    return (*(path for path in wanted if _keeps_sockets_short(path)), *fallbacks)


def open_runtime_dir(environ: Mapping[str, str]) -> Path:
    """The first of :func:`runtime_dirs` that can be used, made if need be with mode 0700.

    Raises:
        ConfigError: every one is read-only, of another user, or writable by others.
    """
    candidates = runtime_dirs(environ)
    for candidate in candidates:
        if _is_usable(candidate) and _is_private(candidate):
            return candidate
    tried = ", ".join(map(str, candidates))
    raise ConfigError(
        f"no private directory for the control socket; tried {tried}",
        hint="set TELA_RUNTIME_DIR to a directory of yours with mode 0700",
    )


def find_sockets(environ: Mapping[str, str]) -> dict[str, Path]:
    """Control sockets of this user by daemon name, dead ones included; directories of other users are not trusted."""
    found: dict[str, Path] = {}
    for directory in runtime_dirs(environ):
        if directory.is_dir() and _is_private(directory):
            for path in sorted(directory.glob(f"*{_SOCKET_SUFFIX}")):
                found.setdefault(path.name.removesuffix(_SOCKET_SUFFIX), path)
    return found


def _socket(directory: Path, name: str) -> Path:
    return directory / f"{name}{_SOCKET_SUFFIX}"


def _keeps_sockets_short(directory: Path) -> bool:
    return len(os.fsencode(_socket(directory, "x" * MAX_NAME_BYTES))) <= MAX_SOCKET_PATH_BYTES


def _is_usable(directory: Path) -> bool:
    """Whether it exists or can be made, and can be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _is_private(directory: Path) -> bool:
    """Whether it is ours, no link, and nobody else can put files into it."""
    facts = directory.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & _WRITABLE_BY_OTHERS
