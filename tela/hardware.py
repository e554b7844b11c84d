"""What this host has: GPUs as declared or as nvidia-smi finds them, CPUs and memory. Never raises.

A declared inventory wins, because a container may hide what the host has: ``TELA_INVENTORY`` names a JSON file such as
``{"gpu": "H200", "n_gpus": 4, "vram_bytes": 150754820096}``.  Zero and "" mean unknown; ``origin`` says who said so.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec

from tela.record import Hardware, clipped

NVIDIA_SMI_TIMEOUT_S: Final = 5.0
"""It answers within 2 s even on 8 GPUs without persistence mode; a driver that hangs must not hold up the join."""
MAX_INVENTORY_BYTES: Final = 64 * 1024
_QUERY: Final = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_NO_DEVICES: Final = frozenset({"", "-1", "NoDevFiles"})  # values by which CUDA and Slurm hide every GPU

Command = Callable[[Sequence[str]], str]
"""Runs an argv and returns its stdout. Raises OSError or subprocess.SubprocessError."""


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Declared(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file that TELA_INVENTORY names."""

    gpu: str = ""
    n_gpus: Count = 0
    vram_bytes: Count = 0
    n_cpus: Count = 0
    ram_bytes: Count = 0


class Gpu(NamedTuple):
    """One line of nvidia-smi."""

    number: str
    uuid: str
    name: str
    vram_bytes: int


def run_command(argv: Sequence[str]) -> str:
    """Stdout of a command that ends within NVIDIA_SMI_TIMEOUT_S."""
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)  # noqa: S603
    return done.stdout


def find_hardware(environ: Mapping[str, str], run: Command = run_command) -> tuple[Hardware, str]:
    """The hardware, and a warning where a declared inventory cannot be used ("" otherwise)."""
    path = environ.get("TELA_INVENTORY", "")
    if not path:
        return _found(environ, run), ""
    try:
        return _declared(Path(path)), ""
    except (OSError, msgspec.DecodeError, ValueError) as error:
        return _found(environ, run), f"the inventory {path} is ignored: {error}"


def _declared(path: Path) -> Hardware:
    with path.open("rb") as file:
        content = file.read(MAX_INVENTORY_BYTES + 1)
    if len(content) > MAX_INVENTORY_BYTES:
        raise ValueError(f"longer than {MAX_INVENTORY_BYTES} bytes")
    declared = msgspec.json.decode(content, type=Declared, strict=False)
    return Hardware(
        gpu=clipped(declared.gpu),
        n_gpus=declared.n_gpus,
        vram_bytes=declared.vram_bytes,
        n_cpus=declared.n_cpus or _n_cpus(),
        ram_bytes=declared.ram_bytes or _ram_bytes(),
        origin="declared",
    )


def _found(environ: Mapping[str, str], run: Command) -> Hardware:
    try:
        gpus = visible_gpus(parse_nvidia_smi(run(_QUERY)), environ.get("CUDA_VISIBLE_DEVICES"))
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return Hardware(n_cpus=_n_cpus(), ram_bytes=_ram_bytes())
    return Hardware(
        gpu=clipped(gpus[0].name) if gpus else "",
        n_gpus=len(gpus),
        vram_bytes=min((gpu.vram_bytes for gpu in gpus), default=0),
        n_cpus=_n_cpus(),
        ram_bytes=_ram_bytes(),
        origin="nvidia-smi",
    )


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """GPUs in nvidia-smi's CSV; lines of another form, such as its error messages, are skipped.

    >>> parse_nvidia_smi("0, GPU-1a2b, NVIDIA H200, 143771")
    [Gpu(number='0', uuid='GPU-1a2b', name='NVIDIA H200', vram_bytes=150754820096)]
    """
    gpus = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 4 and parts[0].isdecimal():
            memory_mib = int(parts[3]) if parts[3].isdecimal() else 0  # "[N/A]" on unified memory
            gpus.append(Gpu(parts[0], parts[1], parts[2], memory_mib * 1024 * 1024))
    return gpus


def visible_gpus(gpus: Sequence[Gpu], visible: str | None) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES leaves: indices, GPU uuids or their beginnings, MIG slices (memory unknown), or none.

    Like CUDA, the list ends at the first entry that names nothing.
    """
    if visible is None:
        return list(gpus)
    if visible.strip() in _NO_DEVICES:
        return []
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in visible.split(",")):
        gpu = _gpu_called(entry, gpus)
        if gpu is None:
            break
        chosen.append(gpu)
    return chosen


def _gpu_called(entry: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if entry.startswith("MIG-") and gpus:
        return Gpu(entry, entry, f"{gpus[0].name} MIG", 0)
    matching = (gpu for gpu in gpus if gpu.number == entry or (entry.startswith("GPU-") and gpu.uuid.startswith(entry)))
    return next(matching, None)


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0))  # what Slurm and cpusets leave to us, not what the host has


def _ram_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
