"""A machine that lacks something is told so in one line, with the remedy (README: two commands)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDED = ("sh", "sed", "grep", "tail", "touch", "mkdir", "cat")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH of its own: the shell's tools, and nothing that compiles."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in NEEDED:
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


def set_up(programs: Path, venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(ROOT / "scripts" / "setup.sh"), str(venv), "demo"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(programs), "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def add_program(programs: Path, name: str, script: str) -> None:
    path = programs / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def assert_told(done: subprocess.CompletedProcess[str], error: str, hint: str) -> None:
    assert done.returncode == 1
    first, second = done.stderr.splitlines()[-2:]
    assert first.startswith("tela: error: ")
    assert error in first
    assert hint in second


def test_missing_python_is_told(programs: Path, tmp_path: Path) -> None:
    assert_told(set_up(programs, tmp_path / "venv", PYTHON="python9"), "no python9 found", "PYTHON=")


def test_old_python_is_told(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "python3", '[ "$1" = --version ] && echo Python 3.9.1 && exit 0; exit 1')
    assert_told(set_up(programs, tmp_path / "venv", PYTHON="python3"), "too old", "3.11")


def test_missing_compiler_is_told(programs: Path, tmp_path: Path) -> None:
    assert_told(set_up(programs, tmp_path / "venv"), "no C compiler", "apt-get install gcc")


def test_missing_gmp_is_told(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "cc", "echo 'gmp.h: No such file or directory' >&2; exit 1")
    assert_told(set_up(programs, tmp_path / "venv"), "no gmp.h", "libgmp-dev")


@pytest.mark.timeout(60)
def test_missing_network_is_told(programs: Path, tmp_path: Path) -> None:
    add_program(programs, "cc", "exit 0")
    nowhere = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
    }
    assert_told(set_up(programs, tmp_path / "venv", **nowhere), "could not download", "network")
