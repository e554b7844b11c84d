"""What on this host would trouble a daemon: each check is a function of facts, and tells the reason and the fix."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from tela.config import Settings, load_settings
from tela.errors import TelaError
from tela.net.addresses import Interface, local_interfaces, unknown_names, why_left_out
from tela.net.endpoints import Choice
from tela.paths import MAX_NAME_BYTES, daemon_paths, open_state_dir

MIN_OPEN_FILES: Final = 1024
"""A worker with 100 requests needs about 300 descriptors."""
GOOD_OPEN_FILES: Final = 4096
"""An ingress or hub with 1,000 clients or peers needs two for each."""
MAX_TMPDIR_BYTES: Final = 60
"""Engines add socket names of up to 45 bytes to it; a socket path ends at 107 (faults.md I04)."""
_SHARED_FILE_SYSTEMS: Final = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs"})
_CLOCK_RANGE: Final = (datetime(2026, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
_PYTHON_RANGE: Final = ((3, 11), (3, 13))


class Check(msgspec.Struct, frozen=True):
    """One finding. ``verdict``: ok, warn (it runs, but), fail (it will not work), info."""

    name: str
    verdict: str
    why: str
    fix: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """What ``tela doctor --json`` prints."""

    version: str
    checks: tuple[Check, ...]
    schema_version: int = 1

    def to_json(self) -> bytes:
        """One object."""
        return msgspec.json.encode(self)


def run_checks(environment: Mapping[str, str]) -> Iterable[Check]:
    """Every check, in the order in which a start would meet them."""
    settings, finding = check_settings(environment)
    choice = Choice(settings.iface, settings.exclude_cidr)
    yield check_python(platform.python_version_tuple())
    yield from check_libp2p(_installed_version)
    yield finding
    yield from check_state(environment)
    yield check_socket(environment)
    yield check_tmpdir(environment.get("TMPDIR") or tempfile.gettempdir())
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from check_interfaces(local_interfaces(), choice)
    yield check_proxies(environment)
    yield check_clock(datetime.now(tz=UTC))


def check_python(version: tuple[str, ...]) -> Check:
    """Whether tela is tested with this Python."""
    text, (oldest, newest) = ".".join(version), _PYTHON_RANGE
    if oldest <= (int(version[0]), int(version[1])) <= newest:
        return Check("python", "ok", text)
    return Check("python", "warn", f"{text} is not tested", "use Python 3.11, 3.12 or 3.13")


def check_libp2p(installed_version: Callable[[str], str | None]) -> Iterable[Check]:
    """Whether the mesh can be loaded; if not, whether it can be built: one of its dependencies has no wheel."""
    found = installed_version("libp2p")
    if found:
        yield Check("libp2p", "ok", found)
        return
    yield Check("libp2p", "fail", "not installed", "pip install tela in a virtual environment")
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    yield Check("compiler", "info", compiler or "none found; fastecdsa needs one", "" if compiler else "install gcc")
    header = next((path for path in _include_dirs() if (path / "gmp.h").is_file()), None)
    yield Check(
        "gmp.h",
        "info",
        str(header) if header else "not found; fastecdsa needs it",
        "" if header else "install libgmp-dev",
    )


def check_state(environment: Mapping[str, str]) -> Iterable[Check]:
    """Whether there is a state directory that lasts and is this host's own."""
    try:
        directory, warning = open_state_dir(None, environment)
    except TelaError as error:
        yield Check("state", "fail", str(error), error.hint)
        return
    mounts = Path("/proc/self/mounts")
    kind = file_system_of(directory, mounts.read_text() if mounts.exists() else "")
    if warning:
        yield Check("state", "warn", warning)
    elif kind in _SHARED_FILE_SYSTEMS:
        why = f"{directory} is on {kind}: hosts that share it would share a node key"
        yield Check("state", "warn", why, "set TELA_STATE_DIR to a directory of this host")
    else:
        yield Check("state", "ok", f"{directory} ({kind})")


def file_system_of(path: Path, mounts: str) -> str:
    """Type of the file system that holds ``path``, out of the text of /proc/self/mounts."""
    best, kind = -1, "unknown"
    for fields in map(str.split, mounts.splitlines()):
        mount_point = Path(fields[1].encode().decode("unicode_escape"))  # a space is written \040
        if path.is_relative_to(mount_point) and len(mount_point.parts) >= best:
            best, kind = len(mount_point.parts), fields[2]
    return kind


def check_socket(environment: Mapping[str, str]) -> Check:
    """Whether a control socket can be made; its path is short by construction."""
    try:
        socket = daemon_paths("x" * MAX_NAME_BYTES, Path(), environment).socket
    except TelaError as error:
        return Check("socket", "fail", str(error), error.hint)
    return Check("socket", "ok", f"{socket.parent} (paths of at most {len(os.fsencode(socket))} bytes)")


def check_tmpdir(directory: str) -> Check:
    """Whether engines can make sockets in TMPDIR."""
    size_bytes = len(os.fsencode(directory))
    if size_bytes <= MAX_TMPDIR_BYTES:
        return Check("tmpdir", "ok", directory)
    why = f"{size_bytes} bytes long: sockets that engines make there may exceed 107"
    return Check("tmpdir", "warn", why, "export TMPDIR=/tmp before tela join")


def check_open_files(soft: int, hard: int) -> Check:
    """Whether enough files can be open at once."""
    if soft == resource.RLIM_INFINITY or soft >= GOOD_OPEN_FILES:
        return Check("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    can_raise = hard == resource.RLIM_INFINITY or hard > soft
    fix = f"ulimit -n {GOOD_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, GOOD_OPEN_FILES)}"
    verdict = "warn" if soft >= MIN_OPEN_FILES else "fail"
    return Check(
        "open files", verdict, f"{soft} is few for an ingress or hub", fix if can_raise else "ask the administrator"
    )


def check_settings(environment: Mapping[str, str]) -> tuple[Settings, Check]:
    """What the files and the environment say, and whether it can be read; the default settings where it cannot."""
    try:
        settings, warnings = load_settings({}, environment)
    except TelaError as error:
        return Settings(), Check("settings", "fail", str(error), error.hint or "correct it")
    if warnings:
        return settings, Check("settings", "warn", "; ".join(warnings))
    return settings, Check("settings", "ok", "files and environment can be read")


def check_interfaces(interfaces: Sequence[Interface], choice: Choice) -> Iterable[Check]:
    """Which addresses a node that listens everywhere would announce, and why not the others."""
    for name in unknown_names(choice, interfaces):
        yield Check(f"interface {name}", "fail", "is chosen and has no address here", "correct iface, or TELA_IFACE")
    for interface in interfaces:
        reason = why_left_out(interface, choice)
        yield Check(f"interface {interface.name}", "info", f"{interface.address}: {reason or 'would be announced'}")


def check_proxies(environment: Mapping[str, str]) -> Check:
    """Whether clients on this host would send loopback requests to a proxy. tela itself never does."""
    names = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
    proxies = sorted({name for name in names if environment.get(name)})
    if not proxies:
        return Check("proxies", "ok", "none set for plain HTTP")
    excepted = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    if {"*", "127.0.0.1"} & {part.strip() for part in excepted}:
        return Check("proxies", "ok", f"{', '.join(proxies)}, but not for 127.0.0.1")
    why = f"{', '.join(proxies)} is set: OpenAI clients here would send requests for 127.0.0.1 to it"
    return Check("proxies", "warn", why, "export no_proxy=127.0.0.1,localhost")


def check_clock(now: datetime) -> Check:
    """Whether the clock can be right: certificates and records carry times."""
    earliest, latest = _CLOCK_RANGE
    if earliest <= now < latest:
        return Check("clock", "ok", now.isoformat(timespec="seconds"))
    return Check(
        "clock", "fail", f"it shows {now:%Y-%m-%d}; every certificate would be refused", "set the clock, by NTP"
    )


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _include_dirs() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    return [Path("/usr/include"), Path("/usr/include") / multiarch, Path("/usr/local/include")]
