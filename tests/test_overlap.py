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
import test_replay
import tiny_run
from test_slots import COLUMNS, LIMITS, NEW, ROWS, SEGMENTS, TEMPERATURE, TOKENS
from tiny_engine import EOS, requests, same

from jaxrl_lm import GRPOConfig, chunks, loop
from jaxrl_lm.assemble import make_batch_rules
from jaxrl_lm.checks import check, old_logprobs_of, resolve_algorithm
from jaxrl_lm.generate import begin, collect, generate
from jaxrl_lm.host import make_host
from jaxrl_lm.models import build
from jaxrl_lm.placement import Placement
from jaxrl_lm.rollout import earlier, replay
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import build_plan
from jaxrl_lm.slots import PAUSED

# --- decoding in chunks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(dataclasses.replace(tiny_config, num_layers=1))


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


def test_the_logprobs_of_a_batch_that_waits_are_those_that_the_weights_before_the_update_give(found):
    own, later = found["waiting"]
    assert own < 1e-5
    assert later > 1e-2


def test_a_run_with_a_batch_in_flight_resumes_to_the_same_bits(found):
    """Stopped by a signal after a step, then longer by one step, and by another."""
    assert found["stopped"] == [1, True, True]


def test_a_thread_changes_no_bit(found):
    assert found["turns"] == [True, True]


def test_a_batch_that_waits_keeps_all_that_a_batch_can_have(found):
    """Resumed from the checkpoint before the last one, to the same bits."""
    steps, greedy = found["steps"], found["greedy"]
    assert {"step_rewards", "step_ends", "behaviour_logprobs", "logprobs"} < set(steps["arrays"])
    assert steps["replayed"] == 1.0
    assert "greedy_returns" in greedy["arrays"]
    for one in (steps, greedy):
        assert (one["steps"], one["same"]) == (1, True)


def test_the_kl_of_a_completion_is_that_of_the_tokens_that_the_policy_chose(found):
    kl, root, length, actions = found["steps"]["kl"]
    assert actions == length - 1  # the first one is forced
    assert kl > 1e-4
    assert root == pytest.approx((kl * actions) ** 0.5)
    assert found["greedy"]["kl"][-1] is None


def test_a_reward_that_raises_in_a_thread_stops_the_run_as_ever(found):
    for name, rows, steps in (("chunk_fails", "4 to 7", [1]), ("flight_fails", "0 to 15", [1, 2])):
        assert f"reward 'digits' raised KeyError: 'no ground truth' on a call with rows {rows}" in found[name]["error"]
        assert (found[name]["saved"], found[name]["logged"]) == (steps, len(steps))
    assert found["after_failure"] == [0.0]  # the batch that failed is sampled anew, by the newest weights


# --- what a step remembers ----------------------------------------------------------------------------------------------


def test_a_snapshot_is_of_its_time_and_packs_nothing_before_it_is_read(monkeypatch):
    packed = []
    for module in (earlier, replay):
        monkeypatch.setattr(module, "pack_array", lambda x, pack=module.pack_array: packed.append(0) or pack(x))
    given = config(replay_groups=1, num_speculative_tokens=2, speculative_source="last_epoch")
    host = make_host(given, test_replay.DATASET, 0.0)
    test_replay.put(host.replay, *test_replay.step_of(0, [1, 2]))
    host.earlier.put([3, 4], [[1, 2], [3]])
    before = host.snapshot()
    host.calls, host.kl_coef = 5, 0.5
    host.prompts.draw(1, 4)
    host.rates.observe([3], np.array([0.5]))
    host.replay.take(1, policy_step=10)
    test_replay.put(host.replay, *test_replay.step_of(1, [3]))
    host.earlier.put([4], [[5, 6]])
    assert packed == []
    now, after = before(), host.state()
    assert packed
    other = make_host(given, test_replay.DATASET, 0.0)
    other.load(json.loads(json.dumps(now)), rows=test_replay.DATASET)
    assert other.state() == now
    for name in ("calls", "kl_coef", "prompts", "rates", "replay", "earlier"):
        assert now[name] != after[name], name
    assert [group["solve_rate"] for group in now["replay"]["groups"]] == [0.25, 0.5]
    assert [ids.tolist() for ids in other.earlier.of([3, 4], 1)] == [[1, 2], [3]]


# --- several CPU devices: programs take turns ---------------------------------------------------------------------------


def test_on_a_mesh_chunks_change_no_bit_either_and_a_batch_is_sampled_before_the_update(tmp_path):
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


@pytest.mark.parametrize(
    ("train", "rollout", "places", "rewards", "crosses"),
    [
        (8, 0, {}, False, True),  # one mesh: decoding and updates are on the same devices
        (1, 0, {}, True, False),  # one device: its programs queue
        (4, 4, {}, False, False),
        (4, 4, {"reference": "rollout_mesh"}, False, True),  # scoring meets decoding
        (7, 1, {"reference": "rollout_mesh"}, False, False),
        (4, 4, {}, True, True),  # rewards meet the update
        (4, 4, {"reward": "host"}, True, True),
        (4, 4, {"reward": "rollout_mesh"}, True, False),
        (1, 7, {}, True, False),
    ],
)
def test_two_threads_never_share_several_devices(train, rollout, places, rewards, crosses):
    devices = jax.devices()
    plan = build_plan({"data": train}, devices=devices[:train])
    other = build_plan({"data": rollout}, devices=devices[-rollout:]) if rollout else plan
    assert Placement(plan, other, **places).crosses(rewards=rewards) == crosses


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
        (
            {"max_off_policy_steps": 1, "surrogate": "policy-gradient", "old_logprobs": "sampler"},
            "max_off_policy_steps=1 with surrogate='policy-gradient' needs a sampler_correction",
        ),
        (
            {"max_off_policy_steps": 1, "sampler_correction": "none"},
            "max_off_policy_steps=1 with sampler_correction='none' and old_logprobs='recompute': .* give a ",
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
    check(config(max_off_policy_steps=1, old_logprobs="sampler"), 1)


@pytest.mark.parametrize(
    "reads", [{}, {"token_scale": "entropy"}, {"entropy_clip": "clip_cov"}, {"top_entropy_share": 0.5}]
)
def test_the_ratio_is_to_the_sampler_or_a_correction_weighs_it_whatever_else_reads_scores(reads):
    lagged = lambda **changes: rules(max_off_policy_steps=1, **reads, **changes)[0]
    to_sampler, corrected = (
        lagged(old_logprobs="sampler"),
        lagged(old_logprobs="sampler", sampler_correction="token_mask"),
    )
    assert to_sampler.keep_old
    assert to_sampler.sampler_ratio
    assert to_sampler.needs_old == bool(reads)
    for rule in (corrected, lagged()):  # the gap is weighed once
        assert rule.keep_old
        assert not rule.sampler_ratio
        assert rule.sampler_correction != "none"
    # Where the sampler was too far from the scorer, the ratio is to the scored policy.
    plain, scored = rules(**reads, num_iterations=2, old_logprobs="sampler")
    assert (plain.sampler_ratio, scored.sampler_ratio) == (True, False)


def rules(**changes):
    given = config(**changes)
    return make_batch_rules(given, resolve_algorithm(given), None)  # no planning_tokens: nothing is encoded
