"""Runs whose threads have a device for themselves, for test_overlap.py: what came of them, as JSON.

    python tests/overlap_run.py DIRECTORY

A process of its own, because the session's 8 CPU devices take one program at a time.
"""

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

WAIT = 60.0  # seconds until something that should run beside is taken for missing
QUIET = ("time", "step_time", "tokens_per_second")


def options(model, data, output_dir, **changes):
    return {
        "model": model,
        "dataset": data["train"],
        "reward": ("tiny_run:digits", "tiny_run:shortness"),
        "output_dir": str(output_dir),
        "mesh": {"data": 1},
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "decode_slots": 4,
        "prompt_buckets": (16,),
        "learning_rate": 1e-2,
        "max_steps": 2,
        "eval_steps": 0,
        "probe_prompts": 0,
        "save_steps": 1,
        "save_total_limit": 9,
        "completions_steps": 1,
    } | changes


def facts(directory):
    """All that a run leaves but measured times: metrics, completions, and the last state, by its bytes."""
    import pyarrow.parquet as pq

    lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name.split("/")[0] not in QUIET} for row in lines]
    tables = sorted((Path(directory) / "completions").iterdir())
    return rows, [pq.read_table(path).to_pylist() for path in tables]


def same(one, other):
    """Whether two runs left the same. NaN equals itself here."""
    import tiny_run

    states = [tiny_run.bits(run.state) for run in (one, other)]
    return repr(facts(one.directory)) == repr(facts(other.directory)) and states[0] == states[1]


def with_steps(options, **changes):
    """A prepared run whose compiled functions are others: each is made of the one that it stands for."""
    from jaxrl_lm import GRPOConfig
    from jaxrl_lm.prepare import prepare

    setup = prepare(GRPOConfig(**options))
    steps = dataclasses.replace(
        setup.steps, **{name: make(getattr(setup.steps, name)) for name, make in changes.items()}
    )
    return setup._replace(steps=steps, sampler=dataclasses.replace(setup.sampler, steps=steps))


def in_chunks(options):
    """A run whose fourth chunk of each batch waits until a reward function has been called for the batch; how many chunks
    each batch had, and whether the wait had an end."""
    import tiny_run

    from jaxrl_lm import loop

    calls, batches, in_time = threading.Semaphore(0), [], []

    def made(chunks):
        def begin(*arguments):
            batches.append(0)
            while calls.acquire(blocking=False):
                pass
            return chunks.begin(*arguments)

        def advance(*arguments):
            batches[-1] += 1
            if batches[-1] == 4:
                in_time.append(calls.acquire(timeout=WAIT))
            return chunks.advance(*arguments)

        return chunks._replace(begin=begin, advance=advance)

    tiny_run.CALLS[:] = [lambda **_: calls.release()]
    run = loop.run(with_steps(options, chunks=made))
    tiny_run.CALLS.clear()
    return run, batches, in_time


def in_flight(options):
    """A run in which the rewards of the second batch wait until the first one is learned from."""
    import tiny_run

    from jaxrl_lm import loop

    updated, in_time = threading.Event(), []

    def made(update):
        def call(*arguments):
            updated.set()
            return update(*arguments)

        return call

    tiny_run.CALLS[:] = [at_call(2, lambda: in_time.append(updated.wait(WAIT)))]
    run = loop.run(with_steps(options, update=made))
    tiny_run.CALLS.clear()
    return run, in_time


def in_turns(options):
    """A run that samples each batch before the update, in one thread, and whether it said so."""
    import tiny_run

    from jaxrl_lm import flight

    apart, flight.one_at_a_time = flight.one_at_a_time, lambda: True
    try:
        run, printed = tiny_run.run(options)
    finally:
        flight.one_at_a_time = apart
    return run, "take turns here" in printed


def endings(*, completions):
    """A completion's first half is a step, rows that end with a digit have none."""
    return [None if text[-1:].isdigit() or len(text) < 2 else [(len(text) // 2, 0.5)] for text in completions]


def waiting(directory, step):
    """Of the batch that waits in a checkpoint the largest difference between its log-probs and the scorer's, by the weights
    of the step before and by the checkpoint's own."""
    import jax
    import numpy as np

    from jaxrl_lm.checkpoint import Checkpoints
    from jaxrl_lm.inference import restore_policy
    from jaxrl_lm.rollout import unpack_array
    from jaxrl_lm.score import score
    from jaxrl_lm.sharding import build_plan

    with Checkpoints(directory / "checkpoints", read_only=True) as checkpoints:
        saved = checkpoints.restore_host(step=step)["flight"]["arrays"]
    names = ("tokens", "segment_ids", "temperature", "logprobs", "action_mask")
    tokens, segments, heat, logprobs, mask = (unpack_array(saved[name]) for name in names)
    found = []
    for number in (step - 1, step):
        policy = restore_policy(directory, build_plan({"data": 1}), step=number)
        run = jax.jit(lambda *rows, model=policy.model: score(*rows[:3], model=model, temperature=rows[3]).logprobs)
        scores = np.asarray(run(policy.params, tokens, segments, heat))
        found.append(float(np.abs(scores - logprobs)[mask].max()))
    return found


# Batches with all that a batch can have: rewards of steps, log-probs before truncation and after, tokens that the policy
# did not choose, groups of earlier steps; greedy answers, beside which there are no rewards of steps.
AHEAD = {"max_off_policy_steps": 1, "reward_weights": (2.0, 0.01)}
RICH = {
    "steps": AHEAD
    | {"step_reward": "overlap_run:endings", "step_credit": "last", "top_p": 0.9, "forced_tokens": (17,)}
    | {"replay_groups": 1, "max_steps": 4, "beta": 0.05},
    "greedy": AHEAD | {"preset": "remax"},
}


def at_call(number, function):
    calls = []
    return lambda **_: calls.append(0) or (len(calls) == number and function())


def main(directory):
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_debug_key_reuse", True)
    import tiny_run

    from jaxrl_lm.checkpoint import Checkpoints
    from jaxrl_lm.rewards import RewardError

    directory, found = Path(directory), {}
    model, data = tiny_run.save_model(directory / "model", num_layers=1), tiny_run.write_data(directory)
    given = lambda name, **changes: options(model, data, directory / name, **changes)
    go = lambda name, **changes: tiny_run.run(given(name, **changes))[0]

    def failing(name, call, **changes):
        def bad():
            raise KeyError("no ground truth")

        tiny_run.CALLS[:] = [at_call(call, bad)]
        try:
            go(name, **changes)
        except RewardError as error:
            with Checkpoints(directory / name / "checkpoints", read_only=True) as checkpoints:
                return {"error": str(error), "saved": checkpoints.steps(), "logged": len(facts(directory / name)[0])}
        finally:
            tiny_run.CALLS.clear()

    with tiny_run.compile_cache(directory / "xla"):
        plain = go("plain")
        chunked, batches, in_time = in_chunks(given("chunked", decode_chunk=6))
        found["chunks"] = {"same": same(plain, chunked), "batches": batches, "in_time": in_time}
        found["chunks"]["times"] = sorted(name for name in chunked.metrics[0] if name.startswith("time/"))
        found["chunk_fails"] = failing("chunk_fails", 6, decode_chunk=6)

        ahead = {"max_off_policy_steps": 1, "max_steps": 3}
        straight, found["beside_update"] = in_flight(given("straight", **ahead))
        found["waiting"] = waiting(directory / "straight", 2)
        found["lag"] = [row["sampling/off_policy_steps"] for row in straight.metrics]
        found["policy_step"] = [table[0]["policy_step"][0] for table in facts(straight.directory)[1]]
        found["ratio"] = [row["sampling/importance_ratio/max"] for row in straight.metrics]
        found["times"] = sorted(name for name in straight.metrics[1] if name.startswith("time/"))
        found["on_policy"] = [table[0]["policy_step"][0] for table in facts(plain.directory)[1]]
        found["first_step_as_ever"] = facts(plain.directory)[1][0] == facts(straight.directory)[1][0]

        tiny_run.CALLS[:] = [at_call(2, lambda: os.kill(os.getpid(), signal.SIGTERM))]  # while batch 2 is in flight
        stopped = go("stopped", **ahead)
        tiny_run.CALLS.clear()
        go("stopped", **ahead | {"max_steps": 2})
        found["stopped"] = [stopped.step, stopped.interrupted, same(straight, go("stopped", **ahead))]
        found["flight_fails"] = failing("flight_fails", 3, **ahead)
        turns, told = in_turns(given("turns", **ahead))
        found["turns"] = [told, same(straight, turns)]
        for name, changes in RICH.items():
            whole, last = go(name, **changes), changes.get("max_steps", 2)
            with Checkpoints(directory / name / "checkpoints", read_only=True) as checkpoints:
                waits = checkpoints.restore_host(step=last - 1)["flight"]
            shutil.copytree(directory / name, directory / f"{name}_resumed")
            shutil.rmtree(directory / f"{name}_resumed" / "checkpoints" / str(last))
            resumed = go(f"{name}_resumed", **changes)
            found[name] = {
                "arrays": sorted(waits["arrays"]),
                "steps": len(resumed.metrics),
                "same": same(whole, resumed),
            }
            names = ("kl", "sqrt_kl", "completions/mean_length", "completions/mean_actions")
            found[name]["kl"] = [whole.metrics[-1].get(each) for each in names]
            found[name]["replayed"] = whole.metrics[-1].get("replay/groups", 0.0)
        after = go("flight_fails", **ahead)
        found["after_failure"] = [row["sampling/off_policy_steps"] for row in after.metrics]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
