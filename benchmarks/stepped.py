"""A run of GRPO that goes on by one step a call: its own reward function holds it up."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from peer_work import letters

import jaxrl_lm
from jaxrl_lm.config import GRPOConfig


class SteppedRun:
    """`train` in a thread of its own; each call lets it go on from one reward hand-over to the next.

    From hand-over to hand-over a run does a whole step's work: the update of a batch, and the sampling of the next.
    """

    def __init__(self, config: GRPOConfig, questions: list[str], reward: Callable[..., list[float]] = letters):
        self.arrived, self.go, self.ended = threading.Semaphore(0), threading.Semaphore(0), None
        self.lengths: list[int] = []
        self.run: Any = None
        config = dataclasses.replace(config, eval_steps=0, probe_prompts=0, completions_steps=0)

        def held(*, completions, completion_ids, **rest):
            self.lengths = [len(ids) for ids in completion_ids]
            self.arrived.release()
            self.go.acquire()
            return reward(completions=completions, **rest)

        def work():
            try:
                rows = [{"prompt": text} for text in questions]
                self.run = jaxrl_lm.train(config, reward_functions=[held], dataset=rows)
            except BaseException as error:
                self.ended = error
            self.arrived.release()

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        self._wait()

    def _wait(self) -> None:
        self.arrived.acquire()
        if self.ended is not None:
            raise RuntimeError("the run failed") from self.ended

    def step(self) -> None:
        """One step's work; after the config's last hand-over the run ends."""
        self.go.release()
        self._wait()

    def finish(self) -> None:
        """Lets the run take its last step; its result is then in `run`."""
        self.step()
        self.thread.join()
