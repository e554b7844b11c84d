"""``make demo``: the main job on real parts, on this host.

A swarm, one hub that is also the ingress, and two workers, each wrapping a real llama.cpp server with a real small
model. One question through the real OpenAI SDK, streamed and not; then a worker is killed and the question asked again.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path

import openai
import psutil

from scripts.demo.fetch_model import fetch_model
from scripts.demo.local_swarm import Daemon, LocalSwarm, poll

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France? Answer in one short sentence."
MAX_TOKENS = 24
FOLLOW_TIMEOUT_S = 10.0
"""Within this time everything below a killed daemon is gone (design/engine.md)."""


def say(text: str = "") -> None:
    print(text, flush=True)


def engine_command(weights: Path) -> list[str]:
    server = Path(__file__).with_name("llama_server.py")
    return [sys.executable, str(server), "--model", str(weights), "--alias", MODEL, "--threads", "1"]


def ask(client: openai.OpenAI, *, is_streamed: bool) -> str:
    """Ask, print the answer as it comes, and return which node gave it."""
    started = time.monotonic()
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=is_streamed,
    )
    if is_streamed:
        for chunk in answer.parse():
            print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
        say()
    else:
        say(answer.parse().choices[0].message.content or "")
    node, attempts = answer.headers["x-tela-node"], answer.headers["x-tela-attempts"]
    say(f"  <- node {node}, attempts {attempts}, {time.monotonic() - started:.2f} s")
    return node


def start(swarm: LocalSwarm, weights: Path) -> dict[str, Daemon]:
    """Bring the swarm up; the workers by the node id that answers show."""
    say("$ tela swarm init")
    swarm.init()
    say("$ tela ingress --hub --name hub")
    swarm.start_hub()
    say("$ tela invite create --roles worker,ingress")
    workers = []
    for name in ("worker-1", "worker-2"):
        say(f"$ tela join --name {name} -- python llama_server.py --model {weights.name} --alias {MODEL}")
        workers.append(swarm.start_worker(name, engine_command(weights)))
    say(f"$ tela wait --for serving --model {MODEL}")
    swarm.wait_serving(MODEL, replicas=2)
    return {swarm.status(worker.name)["node"]: worker for worker in workers}


def show(swarm: LocalSwarm) -> None:
    say("\n$ tela status --name hub")
    say(swarm.call("status", "--name", "hub").stdout.rstrip())


def lose_a_worker(swarm: LocalSwarm, client: openai.OpenAI, workers: dict[str, Daemon]) -> None:
    """Kill the worker that answers now; the next answer must come from the other one."""
    say("\nstreamed:")
    victim = ask(client, is_streamed=True)
    say(f"\n$ kill -9 {workers[victim].pid}    # node {victim}")
    family = swarm.kill(workers[victim])
    for is_streamed in (True, False):
        say()
        survivor = ask(client, is_streamed=is_streamed)
        if survivor == victim or survivor not in workers:
            raise RuntimeError(f"the answer came from {survivor}, not from the surviving worker")
    say(f"\nthe answer came from {workers[survivor].name}, node {survivor}")
    _, alive = psutil.wait_procs(family, timeout=FOLLOW_TIMEOUT_S)
    if alive:
        raise RuntimeError(f"processes outlived the killed worker: {alive}")


def keep(swarm: LocalSwarm, workers: dict[str, Daemon]) -> None:
    body = f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    pids = [str(daemon.pid) for daemon in swarm.daemons]
    say(f"\nleft up: {len(workers)} workers and a hub")
    say(f"  base URL  {swarm.base_url}")
    say(
        f"  try       curl {swarm.base_url}/chat/completions -H 'content-type: application/json' -d {shlex.quote(body)}"
    )
    folder = swarm.folder
    say(f"  status    TELA_RUNTIME_DIR={folder}/run .venv/bin/tela status")
    say(f"  stop      kill {' '.join(pids)} && rm -r {folder}")


def run(is_kept: bool) -> None:
    weights = fetch_model()
    swarm = LocalSwarm()
    is_finished = False
    try:
        workers = start(swarm, weights)
        client = openai.OpenAI(base_url=swarm.base_url, api_key="none", max_retries=0)
        say(f"\n>>> openai.OpenAI(base_url={swarm.base_url!r}).chat.completions.create(...)")
        say(f"{QUESTION}\n\nnot streamed:")
        ask(client, is_streamed=False)
        if is_kept:
            ask(client, is_streamed=True)
            show(swarm)
            keep(swarm, workers)
            is_finished = True
            return
        show(swarm)
        lose_a_worker(swarm, client, workers)
        is_finished = True
    finally:
        if not (is_kept and is_finished):
            stop(swarm, is_failed=not is_finished)


def stop(swarm: LocalSwarm, *, is_failed: bool) -> None:
    if is_failed:
        for daemon in swarm.daemons:
            say(f"--- last lines of {daemon.name}\n{daemon.text()[-1500:]}")
    family = [process for daemon in swarm.daemons for process in daemon.family()]
    swarm.__exit__(None, None, None)
    for _ in poll(FOLLOW_TIMEOUT_S, "every process to end"):
        if not any(process.is_running() for process in family):
            break
    say("stopped; no process is left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the swarm up and say how to use and stop it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    run(parser.parse_args().keep)
    say(f"done in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
