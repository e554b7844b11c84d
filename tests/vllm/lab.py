"""How the tests start real vLLM: a tiny random model, one core, nothing from the network."""

from __future__ import annotations

import hashlib
import subprocess
import urllib.request
from pathlib import Path

from scripts.demo.local_swarm import Daemon
from scripts.lab import vllm_venv

MODEL = "tiny"
CONTEXT_TOKENS = 1024
CHECKPOINT_SCRIPT = Path(vllm_venv.__file__).with_name("tiny_checkpoint.py")
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, whole ones; 0 leaves it to vLLM
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two threads on two busy cores wait for each other
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def checkpoint() -> Path:
    """The tiny checkpoint in the user's cache, named by the script that makes it, which a change makes anew."""
    version = hashlib.sha256(CHECKPOINT_SCRIPT.read_bytes()).hexdigest()[:8]
    folder = vllm_venv.cache_folder() / f"tiny-qwen3-{version}"
    if not folder.exists():
        python = vllm_venv.ensure_venv() / "bin" / "python"
        subprocess.run([python, CHECKPOINT_SCRIPT, folder], check=True, capture_output=True)
    return folder


def engine_command() -> list[str]:
    """``vllm serve`` as a user would write it behind ``tela join --``: without host and port."""
    return [
        *(str(vllm_venv.vllm_program()), "serve", str(checkpoint())),
        *("--served-model-name", MODEL, "--max-model-len", str(CONTEXT_TOKENS)),
        *("--enforce-eager", "--dtype", "bfloat16"),
    ]


def engine_metric(worker: Daemon, name: str) -> float:
    """What vLLM itself says, asked at its own port, which tela put into its command line."""
    command = next(line for process in worker.family() if (line := process.cmdline()) and "--port" in line)
    port = command[command.index("--port") + 1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
