"""The allocation that this process runs in, as its batch system says. Never raises; what is not said stays empty.

Slurm sets these in every job (sbatch(1), OUTPUT ENVIRONMENT VARIABLES); start and end since 22.05.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tela.record import Job, clipped


class Allocation(NamedTuple):
    """What a node tells of its job, and when that ends; 0: unknown, or none."""

    job: Job
    end_unix_s: int


def find_job(environ: Mapping[str, str]) -> Allocation:
    """The Slurm job around us; empty outside of one.

    >>> find_job({"SLURM_JOB_ID": "17", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_END_TIME": "1700000000"}).end_unix_s
    1700000000
    """
    job = Job(
        cluster=clipped(environ.get("SLURM_CLUSTER_NAME", "")),
        job_id=clipped(environ.get("SLURM_JOB_ID", "")),
        partition=clipped(environ.get("SLURM_JOB_PARTITION", "")),
        start_unix_s=_unix_s(environ, "SLURM_JOB_START_TIME"),
    )
    return Allocation(job, _unix_s(environ, "SLURM_JOB_END_TIME"))


def _unix_s(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else 0
