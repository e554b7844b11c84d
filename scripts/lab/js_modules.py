"""Installs, once per machine, the packages of tests/interop/package.json and prints the folder of their modules.

``make test-js`` runs it first. They lie in the user's cache folder under a hash of that file, installed under another
name and renamed at the end, so an installation that broke off is never taken for a good one. There is no lock file: it
would name addresses.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from scripts.lab.vllm_venv import cache_folder, one_builder, run

PACKAGES = Path(__file__).parents[2] / "tests" / "interop" / "package.json"


def ensure_modules() -> Path:
    """Install the packages unless they are there; the folder node_modules."""
    finished = cache_folder() / f"js-{hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:12]}"
    with one_builder(finished.with_name(f"{finished.name}.lock")):
        if not finished.exists():
            install(finished)
    return finished / "node_modules"


def install(finished: Path) -> None:
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            sys.exit(f"no {program} found: Debian and Ubuntu: apt-get install nodejs npm")
    unfinished = finished.with_name(f"{finished.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    shutil.copy(PACKAGES, unfinished)
    flags = ("--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error", "--ignore-scripts")
    run("npm", "install", "--prefix", str(unfinished), *flags)
    unfinished.rename(finished)


if __name__ == "__main__":
    print(ensure_modules())
