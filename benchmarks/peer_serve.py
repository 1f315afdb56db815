"""A peer's end of its conversation with peers.py. Needs the standard library and nothing else."""

import importlib.metadata
import json
import os
import sys
import time
import traceback


def serve(tasks: dict, packages: tuple[str, ...]) -> None:
    """Answers one request a line of stdin until it ends, on the file descriptor in the script's second argument.

    A task is a function of the request's options that returns the function to measure: it is called once unmeasured
    (compilation, first touch) when its options are new, then once in each request, and returns what to report.
    """
    with os.fdopen(int(sys.argv[2]), "w", buffering=1) as replies:
        say = lambda reply: print(json.dumps(reply), file=replies)
        say({"versions": {name: importlib.metadata.version(name) for name in packages}})
        prepared = {}
        for line in sys.stdin:
            request = json.loads(line)
            try:
                say(_answer(tasks[request["task"]], request["options"], line, prepared))
            except Exception:
                say({"error": traceback.format_exc()})


def _answer(task, options: dict, line: str, prepared: dict) -> dict:
    start = time.perf_counter()
    if line not in prepared:
        call = task(**options)
        call()
        prepared[line] = call
    warm = time.perf_counter()
    facts = prepared[line]()
    return {"seconds": time.perf_counter() - warm, "warm_up": warm - start, **facts}
