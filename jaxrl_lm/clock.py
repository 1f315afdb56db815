"""Seconds of each part of a step."""

import collections
import contextlib
import time
from collections.abc import Iterator


class Clock:
    """`with clock("generate"):` adds to that part."""

    def __init__(self):
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.beside: dict[str, float] = collections.defaultdict(float)  # seconds that passed beside the parts
        self.part = "between its parts"  # under way; after an error the one that it ended

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, before, self.part = time.perf_counter(), self.part, name
        yield
        self.part = before
        self.seconds[name] += time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`time/<part>` and their sum, `step_time`; `time/<name>_beside` of what ran beside them."""
        beside = {f"time/{name}_beside": value for name, value in self.beside.items()}
        parts = {f"time/{name}": value for name, value in self.seconds.items()}
        return parts | beside | {"step_time": sum(self.seconds.values())}
