"""A real llama.cpp OpenAI server out of the wheel ``xllamacpp``, with the flags that llama-server has.

One thread by default: on a busy machine two threads spin against each other and are several times slower.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading

import xllamacpp

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def server_parameters(options: argparse.Namespace) -> xllamacpp.CommonParams:
    """The options as llama.cpp wants them."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.model_alias = type(parameters.model_alias)([options.alias or options.model])
    parameters.hostnames = [options.host]
    parameters.port = options.port
    parameters.n_parallel = options.parallel
    parameters.n_ctx = options.ctx
    parameters.cpuparams.n_threads = options.threads
    parameters.cpuparams_batch.n_threads = options.threads
    parameters.endpoint_metrics = True
    if options.api_key:
        parameters.api_keys = [options.api_key]
    return parameters


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--alias", help="name to serve the model under")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ctx", type=int, default=4096, help="tokens, divided among the parallel slots")
    parser.add_argument("--parallel", type=int, default=2, help="slots")
    parser.add_argument("--api-key", default=os.environ.get("LLAMA_API_KEY"), help="default: LLAMA_API_KEY")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    stop = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    server = xllamacpp.Server(server_parameters(options))
    print(f"llama_server: {server.listening_address}", file=sys.stderr, flush=True)
    stop.wait()
    del server


if __name__ == "__main__":
    main()
