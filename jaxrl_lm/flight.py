"""The next batch, sampled by the weights before the update while this batch is learned from (max_off_policy_steps=1).

    step t    batch t is there | batch t+1 is sampled by the weights after update t−1, in a thread
                               | update t, in the loop

Both have ended before the step ends, so that which weights sample is never a race: batch t of a run is sampled by the
weights after update t−2, the first one by those it starts from. The batch that waits is a part of the checkpoint. What
the ratio of its tokens is to: `checks.old_logprobs_of`. Next to read: `loop.py`.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_lm.clock import Clock
from jaxrl_lm.collect import Collected, Judged, draw, settle
from jaxrl_lm.distributed import gather, one_at_a_time, place, several
from jaxrl_lm.host import Host
from jaxrl_lm.prepare import Setup
from jaxrl_lm.rollout import Sampled, last_tokens, pack_array, unpack_array
from jaxrl_lm.step_rewards import StepRewards
from jaxrl_lm.types import Rollout

DRAWN = ("prompts", "calls", "replay")  # what of the host sampling moves


class Ahead(NamedTuple):
    """A batch that waits for the step that learns from it."""

    collected: Collected
    after: int  # the step whose update made the weights that sampled it
    seconds: float  # of its generation


class Flight:
    """At most one batch. In each step, once: `take`, `launch`, `land`. To be used as a context manager, which ends with
    the thread.

    Where programs must be given to the devices one at a time, or in one order, there is no thread: the batch is sampled at
    `launch`, before the update, by the same weights. One order is asked for by several processes, and by several devices
    that both sides use: of two programs that two threads give to them, one device may get the one first and another device
    the other, and the collectives of each then wait for participants that stand in a queue behind the other's.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        # Typed keys outlive no donation; this one has the bits of the state's.
        self._key = place(jax.random.key(setup.config.seed), setup.steps.plan.replicated)
        turns = several() or one_at_a_time() or (jax.device_count() > 1 and shares_devices(setup))
        self._pool = None if turns else ThreadPoolExecutor(1, "flight")
        self._call: Future | None = None
        self._step, self._clock, self._before = 0, Clock(), dict
        self._batch: Ahead | None = None
        self._error: Exception | None = None

    def __enter__(self) -> "Flight":
        return self

    def __exit__(self, *error) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    @property
    def takes_turns(self) -> bool:
        """Whether there is no thread."""
        return self._pool is None

    def take(self) -> Ahead | None:
        """The batch that waits; None where there is none. Raises what its sampling or its rewards raised."""
        batch, error = self._batch, self._error
        self._batch = self._error = None
        if error is not None:
            raise error
        return batch

    def launch(self, host: Host, decode_params: Any, *, step: int, policy_step: int) -> None:
        """Begins with the batch of the next step, by the weights after `step`. Until it lands the thread alone moves what
        of the host is `DRAWN`."""
        self._step, self._clock = step, Clock()
        self._before = host.snapshot(DRAWN)
        options = {"step": step + 2, "policy_step": policy_step, "clock": self._clock}
        given = (self._setup, host, decode_params, self._key)
        if self._pool is not None:
            self._call = self._pool.submit(draw, *given, **options)
            return
        self._call = Future()
        try:
            self._call.set_result(draw(*given, **options))
        except Exception as error:
            self._call.set_exception(error)

    def land(self, host: Host, clock: Clock) -> None:
        """Waits for the batch; the host remembers its outcomes. Where it failed the host is as before its launch, and the
        next `take` raises."""
        try:
            with clock("generate"):
                drawn = self._call.result()
        except Exception as error:
            self._error = error
            host.load(host.state() | self._before(), rows=self._setup.prompts.rows)
            return
        finally:
            self._call = None
        beside = clock.seconds if self.takes_turns else clock.beside
        for found, where in ((self._clock.seconds, beside), (self._clock.beside, clock.beside)):
            for name, seconds in found.items():
                where[name] += seconds
        self._batch = Ahead(settle(self._setup, host, drawn), self._step, self._clock.seconds["generate"])

    # --- in a checkpoint --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """The batch that waits as JSON, bit for bit; None where there is none."""
        if self._batch is None:
            return None
        found = self._batch.collected
        judged, sampled = found.judged, found.judged.sampled
        rollout, temperature = gather((sampled.rollout, sampled.temperature))
        arrays = {
            **rollout._asdict(),
            "temperature": temperature,
            "logprob_sums": sampled.logprob_sums,
            **{name: getattr(judged, name) for name in ("values", "returns", "valid", "plain")},
            "greedy_returns": found.greedy_returns,
            "metrics": np.array(list(found.metrics.values()), np.float64),  # NaN is no JSON
        }
        if found.steps is not None:
            arrays |= {"step_rewards": found.steps.rewards, "step_ends": found.steps.ends}
        return {
            "after": self._batch.after,
            "seconds": self._batch.seconds,
            "count": sampled.count,
            "indices": [int(index) for index in judged.indices],
            "texts": list(sampled.texts),
            "lengths": list(map(len, sampled.completion_ids)),
            "metrics": list(found.metrics),
            "generated": found.generated,
            "prompt_tokens": found.prompt_tokens,
            "steps": None if found.steps is None else {"steps": found.steps.steps, "merged": found.steps.merged},
            "arrays": {name: pack_array(np.asarray(x)) for name, x in arrays.items() if x is not None},
        }

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Goes on from a saved batch, if there was one. Raises ValueError where it is of another dataset."""
        if saved is None:
            return
        setup, group = self._setup, self._setup.config.num_generations
        arrays = {name: unpack_array(packed) for name, packed in saved["arrays"].items()}
        rollout = Rollout(*(arrays.get(name) for name in Rollout._fields))
        count, known = saved["count"], setup.prompts.rows
        if any(not 0 <= index < len(known) for index in saved["indices"]):
            raise ValueError(
                f"max_off_policy_steps: the batch that waits has prompts that are not among the {len(known)} of the "
                "dataset: restore it"
            )
        rows = [known[index] for index in saved["indices"] for _ in range(group)]
        sampled = Sampled(
            rollout=setup.steps.place(rollout),
            temperature=setup.steps.place(arrays["temperature"]),
            count=count,
            rows=rows,
            prompts=[row["prompt"] for row in rows],
            texts=list(saved["texts"]),
            completion_ids=last_tokens(jax.tree.map(lambda x: x[:count], rollout), saved["lengths"]),
            logprob_sums=arrays["logprob_sums"],
            truncated=rollout.truncated[:count],
        )
        judged = (arrays[name] for name in ("values", "returns", "valid", "plain"))
        found = Collected(
            judged=Judged(sampled, list(saved["indices"]), *judged),
            greedy_returns=arrays.get("greedy_returns"),
            metrics=dict(zip(saved["metrics"], arrays["metrics"].tolist(), strict=True)),
            generated=saved["generated"],
            prompt_tokens=saved["prompt_tokens"],
            steps=_steps(saved["steps"], arrays),
            fresh=[],
        )
        self._batch = Ahead(found, saved["after"], saved["seconds"])


def shares_devices(setup: Setup) -> bool:
    """Whether drawing a batch gives programs to devices that a step has programs for too: sampling by those of training,
    scores of a reference by those of sampling, reward models by those of training."""
    place, judges = setup.steps.placement, (*setup.rewards, *filter(None, [setup.step_reward]))
    judged_there = place.reward != "rollout_mesh" and any(judge.everywhere for judge in judges)
    return not place.apart or place.reference == "rollout_mesh" or judged_there


def _steps(saved: Mapping[str, Any] | None, arrays: Mapping[str, np.ndarray]) -> StepRewards | None:
    if saved is None:
        return None
    steps = [None if row is None else [(end, value) for end, value in row] for row in saved["steps"]]
    return StepRewards(steps, arrays["step_rewards"], arrays["step_ends"], saved["merged"])
