"""A command in several processes on this machine, for tests; as a script, one of the processes.

    python tests/run_processes.py DEVICES KILL COMMAND --key value ...

DEVICES: of this process. KILL: the call of the reward `digits` in which it gets a signal, and which, as 2:SIGKILL; as
2:SIGKILL:PATH when PATH is there.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent


class Ended(NamedTuple):
    code: int | None  # None: it was still there after the timeout
    output: str
    errors: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(commands, *, devices, kill=None, cache=None):
    """One running process for each command of the CLI; `kill`: (process, call of the reward, signal) that it gets, and
    a path that it waits for."""
    at = lambda number: ":".join(map(str, kill[1:])) if kill is not None and kill[0] == number else "0:SIGKILL"
    lines = [[str(devices), at(number), *command] for number, command in enumerate(commands)]
    return start_script("run_processes.py", lines, cache=cache)


def start_script(name, lines, *, cache=None):
    """One running process of a script of the tests for each line of arguments, with the files that it prints to."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    if cache is not None:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
        environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    started = []
    for line in lines:
        files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 (read and closed in finish)
        command = [sys.executable, str(TESTS / name), *line]
        started.append((subprocess.Popen(command, env=environment, stdout=files[0], stderr=files[1]), files))
    return started


def finish(started, timeout=120):
    """How each process ended; all are gone afterwards."""
    until = time.monotonic() + timeout
    for process, _ in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(until - time.monotonic(), 0.01))
    ended = []
    for process, files in started:
        code = process.poll()
        process.kill()
        process.wait()
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        ended.append(Ended(code, *texts))
    return ended


def together(command, *, processes, timeout=120, **options):
    """One command in several processes that find each other by its options."""
    found = ["--coordinator_address", f"127.0.0.1:{free_port()}", "--num_processes", str(processes)]
    commands = [[*command, *found, "--process_id", str(number)] for number in range(processes)]
    return finish(start(commands, **options), timeout)


def main(devices, kill, command):
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import tiny_run

    from jaxrl_lm import cli

    calls, (call, name, *waits) = [], kill.split(":", 2)

    def judged(completions, **_):
        print(f"judged {len(completions)}", file=sys.stderr, flush=True)
        calls.append(0)
        if len(calls) == int(call):
            until = time.monotonic() + 60
            while not all(Path(path).exists() for path in waits) and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getpid(), getattr(signal, name))

    tiny_run.CALLS.append(judged)
    cli.main(command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
