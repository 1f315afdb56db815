"""What runs beside what: rewards beside decoding, and sampling of the next batch beside the update of this one.

Whatever overlaps, a run's numbers are those of its parts one after the other, bit for bit.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import overlap_run
import pytest
import tiny_run
from test_generate import EOS, random_params, requests, same
from test_slots import COLUMNS, LIMITS, NEW, ROWS, SEGMENTS, TEMPERATURE, TOKENS

from jaxrl_lm import GRPOConfig, chunks, flight, loop
from jaxrl_lm.checks import check, old_logprobs_of, resolve_algorithm
from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.generate import PAUSED, begin, collect, generate, prepare_decode
from jaxrl_lm.models import build
from jaxrl_lm.prepare import prepare
from jaxrl_lm.rewards import Everywhere, RewardFunction

# --- decoding in chunks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(dataclasses.replace(tiny_config, num_layers=1))


@pytest.fixture(scope="module")
def weights(model):
    return prepare_decode(random_params(model), model=model)


def test_chunks_give_the_bits_of_one_run_and_show_each_row_once_it_has_ended(model, weights):
    """A slot a row and a pass a chunk; fewer slots in the runs below."""
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0)
    asked = requests(
        TOKENS, SEGMENTS, keys=jax.random.split(jax.random.key(0), ROWS), max_new=LIMITS, temperature=TEMPERATURE
    )
    parts = {"model": model, "sampling": sampling}
    whole = jax.jit(functools.partial(generate, **parts))(weights, asked)
    compiled = chunks.Chunks(
        jax.jit(functools.partial(chunks.begin, **parts)),
        jax.jit(functools.partial(chunks.advance, passes=1, **parts), donate_argnums=2),
        functools.partial(collect, sampling=sampling),
    )
    seen = []
    same(whole, chunks.sample_in_chunks(compiled, weights, asked, watch=lambda *one: seen.append(one)))
    mask = np.asarray(whole.action_mask)[:, COLUMNS:]
    done = [mask.sum(1) <= number for number in range(1, NEW + 1)]  # a row of n tokens ends in pass n
    later = [n for n in range(NEW) if n == 0 or done[n].sum() > done[n - 1].sum()]
    assert [ended.tolist() for ended, _, _ in seen] == [done[n].tolist() for n in later]
    kept = np.where(mask, np.asarray(whole.tokens)[:, COLUMNS:], 0)
    for ended, tokens, action_mask in seen:  # what has been shown of an ended row is whole
        np.testing.assert_array_equal(action_mask[ended], mask[ended])
        np.testing.assert_array_equal(np.where(action_mask, tokens, 0)[ended], kept[ended])


def test_a_row_that_waits_between_turns_has_not_ended(model, weights):
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0, slots=8, observation_columns=2)
    asked = requests(TOKENS, SEGMENTS, keys=jax.random.split(jax.random.key(0), ROWS), max_new=np.full(ROWS, NEW))
    state = jax.jit(functools.partial(begin, model=model, sampling=sampling))(weights, asked)
    state = state._replace(next=state.total)  # the queue is empty: rows have a slot, or have ended
    held = np.isin(np.arange(ROWS), np.asarray(state.request))
    for waits in (np.zeros(8, bool), np.arange(8) % 2 == 0, np.ones(8, bool)):
        now = state._replace(request=jnp.where(waits, PAUSED - state.request, state.request))
        np.testing.assert_array_equal(chunks.ended_rows(now), ~held)


# --- a process with one device: threads run beside the programs ---------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of the runs of overlap_run.py."""
    paths = [str(tiny_run.REPOSITORY), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, overlap_run.__file__, str(tmp_path_factory.mktemp("overlap"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_rewards_run_beside_decoding_and_change_no_bit(found):
    """A chunk of the batch was held back until a reward function had been called."""
    assert found["chunks"]["same"]
    assert found["chunks"]["in_time"] == [True, True]
    assert min(found["chunks"]["batches"]) > 4
    assert "time/reward_beside" in found["chunks"]["times"]


def test_the_next_batch_is_sampled_beside_the_update_by_the_weights_before_it(found):
    assert found["beside_update"] == [True]
    assert found["lag"] == [0.0, 1.0, 1.0]
    assert found["policy_step"] == [0, 0, 1]
    assert found["on_policy"] == [0, 1]
    assert found["first_step_as_ever"]
    assert {"time/generate", "time/generate_beside", "time/reward_beside"} < set(found["times"])
    # The ratio is to the log-probs of the older weights, which those of now have left.
    assert found["ratio"][0] == pytest.approx(1.0, abs=1e-4)
    assert min(found["ratio"][1:]) > 1.01


def test_a_run_with_a_batch_in_flight_resumes_to_the_same_bits(found):
    """Stopped by a signal after a step, then longer by one step, and by another."""
    assert found["stopped"] == [1, True, True]


def test_a_reward_that_raises_in_a_thread_stops_the_run_as_ever(found):
    for name, rows, steps in (("chunk_fails", "4 to 7", [1]), ("flight_fails", "0 to 15", [1, 2])):
        assert f"reward 'digits' raised KeyError: 'no ground truth' on a call with rows {rows}" in found[name]["error"]
        assert (found[name]["saved"], found[name]["logged"]) == (steps, len(steps))
    assert found["after_failure"] == [0.0]  # the batch that failed is sampled anew, by the newest weights


# --- several CPU devices: programs take turns ---------------------------------------------------------------------------


def test_on_a_mesh_chunks_and_a_batch_in_flight_change_no_bit_either(tmp_path):
    model, data = tiny_run.save_model(tmp_path / "model", num_layers=1), tiny_run.write_data(tmp_path)
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    given = lambda name, **changes: overlap_run.options(
        model, data, tmp_path / name, mesh=mesh, decode_slots=8, max_off_policy_steps=1, **changes
    )
    held = []

    def made(compiled):
        def advance(params, asked, state, stops):
            later, seen = compiled.advance(params, asked, state, stops)
            layouts = [[leaf.sharding for leaf in jax.tree.leaves(one)] for one in (state, later)]
            kept = [leaf for leaf in jax.tree.leaves(state.cache) if not leaf.is_deleted()]
            held.append((layouts[0] == layouts[1], len(kept)))
            return later, seen

        return compiled._replace(advance=advance)

    with tiny_run.compile_cache(tmp_path / "xla"):
        straight, printed = tiny_run.run(given("straight"))
        chunked = loop.run(overlap_run.with_steps(given("chunks", decode_chunk=5), chunks=made))
    assert "sampling and updates take turns here" in printed
    assert overlap_run.same(straight, chunked)
    assert [row["sampling/off_policy_steps"] for row in straight.metrics] == [0.0, 1.0]
    assert set(held) == {(True, 0)}  # a chunk takes the cache over in place


def test_a_thread_samples_only_where_it_has_the_devices_for_itself(tmp_path, monkeypatch):
    """As on accelerators, where programs queue on each device: two threads' programs must not meet there."""
    monkeypatch.setattr(flight, "one_at_a_time", lambda: False)
    model, data = tiny_run.save_model(tmp_path / "model", num_layers=1), tiny_run.write_data(tmp_path)
    given = overlap_run.options(
        model, data, tmp_path / "run", mesh={"data": 4}, rollout_mesh={"data": 4}, max_off_policy_steps=1
    )
    setup = prepare(GRPOConfig(**given))
    place = setup.steps.placement
    judge = RewardFunction("judge", type("Judge", (Everywhere,), {})())
    cases = [
        ({}, {}, False),
        ({"rollout": place.train}, {}, True),
        ({"reference": "rollout_mesh"}, {}, True),
        ({}, {"rewards": (*setup.rewards, judge)}, True),
        ({}, {"step_reward": judge}, True),
        ({"reward": "host"}, {"step_reward": judge}, True),
        ({"reward": "rollout_mesh"}, {"step_reward": judge}, False),
    ]
    for there, other, turns in cases:
        steps = dataclasses.replace(setup.steps, placement=dataclasses.replace(place, **there))
        with flight.Flight(setup._replace(steps=steps, **other)) as made:
            assert made.takes_turns == turns, (there, other)


# --- options ------------------------------------------------------------------------------------------------------------


def config(**changes):
    return GRPOConfig(model="m", dataset="d", output_dir="o", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_chunk": 0}, "decode_chunk=0: must be at least 1"),
        ({"max_off_policy_steps": 2}, "max_off_policy_steps=2: must be 0 .* or 1"),
        ({"max_off_policy_steps": -1}, "max_off_policy_steps=-1: must be 0 .* or 1"),
        (
            {"max_off_policy_steps": 1, "surrogate": "policy-gradient", "sampler_correction": "none"},
            "max_off_policy_steps=1 with surrogate='policy-gradient' needs a sampler_correction",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(config(**changes), 1)


def test_older_weights_ask_for_a_ratio():
    assert old_logprobs_of(config()) == "sampler"
    assert resolve_algorithm(config()).sampler_correction == "none"
    ahead = config(max_off_policy_steps=1)
    check(ahead, 1)
    assert old_logprobs_of(ahead) == "recompute"
    assert resolve_algorithm(ahead).sampler_correction == "token_truncate"
