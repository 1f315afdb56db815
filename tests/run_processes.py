"""A command in several processes on this machine, for tests; as a script, one of the processes.

    python tests/run_processes.py DEVICES PROCESS KILL COMMAND --key value ...

DEVICES: of this process. PROCESS: its number, for what it does beside the command. KILL: the call of the reward `digits`
in which it is killed, 0 for never.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent


class Ended(NamedTuple):
    code: int
    output: str
    errors: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(commands, *, devices, kill=None, cache=None):
    """One running process for each command; `kill`: (process, call of the reward) at which it dies."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    if cache is not None:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    script, pipe = str(TESTS / "run_processes.py"), subprocess.PIPE
    return [
        subprocess.Popen(
            [sys.executable, script, str(devices), str(i), str(kill[1] if kill and kill[0] == i else 0), *command],
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for i, command in enumerate(commands)
    ]


def finish(processes, timeout=120):
    """How each process ended; all are gone afterwards."""
    try:
        ended = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def together(command, *, processes, port=None, **options):
    """One command in several processes that find each other by its options."""
    address = f"127.0.0.1:{port or free_port()}"
    found = ["--coordinator_address", address, "--num_processes", str(processes)]
    return finish(start([[*command, *found, "--process_id", str(i)] for i in range(processes)], **options))


def main(devices, kill, command):
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import tiny_run

    from jaxrl_lm import cli

    calls = []
    if kill:
        tiny_run.CALLS.append(lambda **_: calls.append(0) or (len(calls) == kill and os.kill(os.getpid(), signal.SIGKILL)))
    cli.main(command)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[3]), sys.argv[4:])
