import os
import socket
import tempfile
from pathlib import Path

import pytest

from tela import paths
from tela.errors import ConfigError, UsageError
from tela.paths import (
    MAX_SOCKET_PATH_BYTES,
    check_name,
    daemon_paths,
    default_name,
    find_sockets,
    open_runtime_dir,
    open_state_dir,
    runtime_dirs,
    user_config_file,
)


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A directory that stands for /tmp."""
    directory = tmp_path / "t"
    directory.mkdir()
    monkeypatch.setattr(paths, "_LOCAL_DIRECTORIES", (directory,))
    return directory


@pytest.fixture
def short_dir():
    """pytest's own directories are too long for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("name", ["worker", "a", "job-1.2_x", "9", "x" * 32])
def test_check_name_takes_what_can_be_a_file_name(name):
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-x", "x" * 33, "a b", "ü", "a\n"])
def test_check_name_refuses_the_rest(name):
    with pytest.raises(UsageError):
        check_name(name)


def test_default_name_under_slurm_is_of_the_job():
    assert default_name("worker", {}) == "worker"
    assert default_name("worker", {"SLURM_JOB_ID": "4711"}) == "worker-4711"


def test_open_state_dir_takes_the_first_place_in_order(tmp_path, local):
    environ = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    steps = [
        ({}, tmp_path / "home/.local/state/tela"),
        ({"XDG_STATE_HOME": str(tmp_path / "xdg")}, tmp_path / "xdg/tela"),
        ({"TELA_STATE_DIR": str(tmp_path / "named")}, tmp_path / "named"),
    ]
    for more, expected in steps:
        environ |= more
        assert open_state_dir(None, environ) == (expected, "")
        assert expected.is_dir()
    assert open_state_dir(tmp_path / "flag", environ) == (tmp_path / "flag", "")


@pytest.mark.parametrize("home", [None, "/", "relative", "/proc/nothing"])
def test_open_state_dir_without_a_home_falls_back_with_one_warning(tmp_path, local, home):
    environ = {} if home is None else {"HOME": home}
    directory, warning = open_state_dir(None, environ)
    assert directory == local / f"tela-{os.geteuid()}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert "TELA_STATE_DIR" in warning
    for variable in ("TMPDIR", "SLURM_TMPDIR"):
        environ[variable] = str(tmp_path / variable)
        assert open_state_dir(None, environ)[0].parent == tmp_path / variable


def test_open_state_dir_that_was_named_and_is_no_directory_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not writable"):
        open_state_dir(tmp_path / "file", {})


def test_open_state_dir_avoids_a_directory_that_others_can_write(local, monkeypatch, tmp_path):
    squatted = local / f"tela-{os.geteuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    with pytest.raises(ConfigError, match="no writable directory"):
        open_state_dir(None, {})


@pytest.mark.parametrize("length", [1, 60, 150, 4000])
def test_socket_paths_stay_short_whatever_the_environment(local, length, monkeypatch):
    monkeypatch.setattr(paths, "_LOCAL_DIRECTORIES", (Path("/tmp"), Path("/dev/shm")))
    long = "/tmp/" + "a" * length
    environ = {"TELA_RUNTIME_DIR": long, "XDG_RUNTIME_DIR": long, "TMPDIR": long, "HOME": long}
    for directory in runtime_dirs(environ):
        assert len(os.fsencode(directory / ("x" * 32 + ".sock"))) <= MAX_SOCKET_PATH_BYTES


def test_runtime_dirs_prefers_the_one_named_then_the_session(local):
    assert runtime_dirs({"XDG_RUNTIME_DIR": "/run/user/7"})[0] == Path("/run/user/7/tela")
    assert runtime_dirs({"XDG_RUNTIME_DIR": "/run/user/7", "TELA_RUNTIME_DIR": "/r"})[0] == Path("/r")
    (fallback,) = runtime_dirs({})
    assert fallback.parent == local
    assert fallback.name.startswith(f"tela-{os.geteuid()}-")


def test_open_runtime_dir_makes_a_private_directory(local):
    directory = open_runtime_dir({"XDG_RUNTIME_DIR": "/proc/nothing"})
    assert directory.parent == local
    assert directory.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["writable by others", "a link", "a file"])
def test_open_runtime_dir_refuses_a_trap(local, tmp_path, trap):
    (path,) = runtime_dirs({})
    if trap == "writable by others":
        path.mkdir()
        path.chmod(0o777)
    elif trap == "a link":
        path.symlink_to(tmp_path)
    else:
        path.touch()
    with pytest.raises(ConfigError, match="no private directory"):
        open_runtime_dir({})
    assert find_sockets({}) == {}


def test_open_runtime_dir_of_another_user_is_not_trusted(local, monkeypatch):
    (path,) = runtime_dirs({})
    path.mkdir(mode=0o700)
    uid, real_lstat = os.geteuid(), Path.lstat

    def lstat(self):
        facts = real_lstat(self)
        return os.stat_result((*facts[:4], uid + 1, *facts[5:])) if self == path else facts

    monkeypatch.setattr(Path, "lstat", lstat)
    with pytest.raises(ConfigError, match="no private directory"):
        open_runtime_dir({})


def test_find_sockets_sees_daemons_of_both_places(tmp_path, local, short_dir):
    session = {"XDG_RUNTIME_DIR": str(short_dir)}
    one = daemon_paths("one", tmp_path, session)
    two = daemon_paths("two", tmp_path, {})
    for daemon in (one, two):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(daemon.socket))
    assert find_sockets(session) == {"one": one.socket, "two": two.socket}
    assert find_sockets({}) == {"two": two.socket}


def test_daemon_paths_keep_daemons_apart(tmp_path, local):
    first, second = (daemon_paths(name, tmp_path, {}) for name in ("a", "b"))
    assert first.socket != second.socket
    assert first.node_dir == tmp_path / "nodes" / "a"


def test_user_config_file_without_home_is_none(tmp_path):
    assert user_config_file({}) is None
    assert user_config_file({"HOME": str(tmp_path)}) == tmp_path / ".config/tela/tela.toml"
