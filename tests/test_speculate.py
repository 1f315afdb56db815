"""Speculation: whatever is guessed, the samples are those of decoding one token at a time; guesses save passes alone.

References: the same requests decoded plainly, a search of n-grams by loops, the scorer.
"""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_run
from test_generate import PATHS, Chain, completions, greedy, stop_rows
from test_slots import GROUP, LIMITS, NEW, ROWS, SEGMENTS, TEMPERATURE, TOKENS
from tiny_engine import EOS, requests, same

from jaxrl_lm import speculate
from jaxrl_lm.checkpoint import Checkpoints
from jaxrl_lm.generate import decode, generate, prepare_decode, read_prompts
from jaxrl_lm.models import build, decode_specs
from jaxrl_lm.rollout import Earlier
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.slots import start

DRAFT = 3


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(dataclasses.replace(tiny_config, num_layers=1))


def sampling_of(source=None, eos=EOS, new=NEW, draft=DRAFT, **options):
    """None: without speculation."""
    more = {} if source is None else {"num_speculative_tokens": draft, "speculative_source": source}
    return SamplingConfig(max_new_tokens=new, eos_token_ids=eos, pad_token_id=0, **more, **options)


@pytest.fixture(scope="module")
def sampler(model, weights):
    """sampler(source, …) -> requests -> Rollout; one compilation each."""

    @functools.cache
    def make(source=None, **options):
        run = functools.partial(generate, model=model, sampling=sampling_of(source, **options))
        compiled = jax.jit(run)
        return lambda given: compiled(weights, given)

    return make


def asked(seed=0, drafts=None, **changes):
    given = {"max_new": LIMITS, "temperature": TEMPERATURE} | changes
    made = requests(TOKENS, SEGMENTS, keys=jax.random.split(jax.random.key(seed), ROWS), **given)
    return made._replace(drafts=None if drafts is None else jnp.asarray(drafts, jnp.int32))


def as_drafts(rollout):
    """A rollout's completions as the drafts of another one."""
    return np.where(rollout.action_mask, rollout.tokens, -1)[:, -NEW:]


def close(found, plain):
    """The same tokens, and log-probs within rounding."""
    for name in ("tokens", "action_mask", "segment_ids", "truncated", "turn_ids", "policy_step"):
        np.testing.assert_array_equal(getattr(found, name), getattr(plain, name), err_msg=name)
    np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=1e-5)
    if plain.behaviour_logprobs is not None:
        np.testing.assert_allclose(found.behaviour_logprobs, plain.behaviour_logprobs, atol=1e-5)
    drawn, passes = np.asarray(plain.action_mask).sum(1), np.asarray(found.passes)
    assert (passes <= drawn).all()
    assert (passes >= -(-drawn // (1 + DRAFT))).all()
    return passes.sum(), drawn.sum()


# --- the samples ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "truncation"), [(4, {}), (None, {"top_k": 6, "top_p": 0.9})], ids=str)
def test_samples_are_those_without(sampler, slots, truncation):
    """Of rows with limits and temperatures of their own, 0 among them; both sources, drafts of every quality."""
    plain, found = sampler(**truncation), sampler("last_epoch", slots=slots, **truncation)
    for seed in range(2):
        wanted = plain(asked(seed))
        good = as_drafts(wanted)
        wrong = np.where(np.random.default_rng(seed).random(good.shape) < 0.3, 7, good)
        other = as_drafts(plain(asked(seed + 5, max_new=NEW)))
        other[::3] = -1  # rows without an earlier completion take their own text
        passes = []
        for drafts in (good, wrong, other):
            few, drawn = close(found(asked(seed, drafts=drafts)), wanted)
            passes.append(few)
        assert passes[0] < passes[1] < passes[2] <= drawn


def test_prompt_lookup_in_three_slots_gives_the_same_rows(sampler):
    """Greedy ones, that repeat themselves, and others."""
    plain, found = sampler(), sampler("prompt_lookup", slots=3)
    few, drawn = close(found(asked(temperature=0.0, max_new=NEW)), plain(asked(temperature=0.0, max_new=NEW)))
    assert few < drawn
    close(found(asked()), plain(asked()))


def test_the_samplers_logprobs_are_the_scorers(sampler, model, params):
    rollout = sampler("last_epoch", slots=4)(asked(drafts=as_drafts(sampler()(asked()))))
    scores = jax.jit(functools.partial(score, model=model))(
        params, rollout.tokens, rollout.segment_ids, temperature=jnp.asarray(TEMPERATURE)
    )
    mask = np.asarray(rollout.action_mask)
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[mask], np.asarray(scores.logprobs)[mask], atol=1e-5)


def test_order_of_rows_changes_no_bit(sampler):
    """With drafts: which slot a row has and beside whom, so how far the others go in a pass, changes none of it."""
    drafts = as_drafts(sampler()(asked(3, max_new=NEW)))
    base = sampler("last_epoch", slots=4)(asked(drafts=drafts))
    keys = jax.random.split(jax.random.key(0), ROWS)
    prompts = np.random.default_rng(1).permutation(len(TOKENS))
    rows = (prompts[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    moved = requests(
        TOKENS[prompts],
        SEGMENTS[prompts],
        keys=jax.random.clone(keys)[rows],
        max_new=LIMITS[rows],
        temperature=TEMPERATURE[rows],
    )
    same(base, sampler("last_epoch", slots=4)(moved._replace(drafts=jnp.asarray(drafts[rows]))), rows_of_a=rows)


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}])
def test_each_part_of_a_mesh_speculates_alone(tiny_config, sampler, params, mesh):
    plan = Plan(make_mesh(mesh, devices=jax.devices()[:4])).for_decode()
    model = build(dataclasses.replace(tiny_config, num_layers=1), plan=plan)
    weights = jax.device_put(prepare_decode(params, model=model), plan.tree(decode_specs(model.config)))
    wanted = sampler()(asked())
    given = asked(drafts=as_drafts(sampler()(asked(5, max_new=NEW))))
    placed = jax.tree.map(lambda x: jax.device_put(x, plan.rows if x.ndim else plan.replicated), given)
    run = functools.partial(generate, model=model, sampling=sampling_of("last_epoch", slots=8))
    close(jax.jit(run, out_shardings=plan.rows)(weights, placed), wanted)


# --- the passes -------------------------------------------------------------------------------------------------------


def test_a_perfect_draft_takes_as_few_passes_as_there_can_be(sampler):
    wanted = sampler()(asked(max_new=NEW))
    found = sampler("last_epoch", slots=4)(asked(max_new=NEW, drafts=as_drafts(wanted)))
    close(found, wanted)
    drawn = np.asarray(wanted.action_mask).sum(1)
    np.testing.assert_array_equal(found.passes, -(-drawn // (1 + DRAFT)))


def test_a_useless_draft_takes_the_passes_of_none(sampler):
    """Earlier completions of a token that is neither in a prompt nor ever drawn."""
    wanted = sampler()(asked())
    unused = np.setdiff1d(np.arange(48), np.concatenate([TOKENS.reshape(-1), np.reshape(wanted.tokens, -1)]))
    found = sampler("last_epoch", slots=4)(asked(drafts=np.full((ROWS, NEW), unused[0])))
    close(found, wanted)
    np.testing.assert_array_equal(found.passes, np.asarray(wanted.action_mask).sum(1))


def test_passes_of_chunks_are_those_of_one_run(model, weights):
    """`decode` stops after a pass and goes on; slots work as long as rows wait."""
    sampling = sampling_of("last_epoch", eos=(), slots=4)
    begin = jax.jit(
        lambda given: start(read_prompts(weights, given, model=model), given, model=model, sampling=sampling)
    )
    go_on = jax.jit(functools.partial(decode, model=model, sampling=sampling))
    given = asked(drafts=np.full((ROWS, NEW), -1))
    whole = go_on(weights, given, begin(given), None, np.int32(1000))
    state = begin(given)
    while bool((state.request >= 0).any()):
        state = go_on(weights, given, state, None, state.step + 3)
    jax.tree.map(np.testing.assert_array_equal, whole.results, state.results)
    np.testing.assert_array_equal(whole.passes, state.passes)
    assert int(whole.passes.sum()) == int(whole.busy)
    assert int(whole.step) < np.asarray(whole.results.action_mask).sum() / 4 + NEW


# --- ends, by the chain -----------------------------------------------------------------------------------------------


def test_rows_end_where_they_would_without():
    """By an eos, a stop string that spans tokens, a limit, in the middle of a draft; what was drawn after it is gone."""
    chain, sampling = Chain(PATHS), sampling_of("prompt_lookup", eos=(14,), new=7)
    compiled = jax.jit(functools.partial(generate, model=chain.model, sampling=sampling))
    sample = lambda given, stops: compiled(chain.params, given, stops)
    pieces = ["?", "1", "<a", "3", "nsw", "er> ", "6</", "answer>7", "the </an", "swer>", *map(str, range(10, 16))]
    table = stop_rows(pieces, ("</answer>",))
    prompts = [[2], [9], [8], [11], [10], [3]]
    whole = [[4, 5, 6, 7], [8, 9], [9, 8, 9], [12, 14], [3] * 7, [3] * 7]
    rollout = greedy(sample, prompts, stops=table)
    assert completions(rollout) == whole
    np.testing.assert_array_equal(rollout.truncated, [False] * 4 + [True] * 2)
    # 3 3 3 …: two passes without a guess, as 3 is not known before, then 4 and 1; after a prompt of 3 one pass without.
    np.testing.assert_array_equal(rollout.passes, [4, 2, 3, 2, 4, 3])
    limits = [7, 7, 2, 1, 5, 0]
    rollout = greedy(sample, prompts, stops=table, max_new=limits)
    assert completions(rollout) == [tokens[:limit] for tokens, limit in zip(whole, limits, strict=True)]
    np.testing.assert_array_equal(rollout.truncated, [False, False, True, True, True, False])
    mask = np.asarray(rollout.action_mask)
    assert (np.asarray(rollout.tokens)[:, 2:][~mask[:, 2:]] == 0).all()
    assert (np.asarray(rollout.logprobs)[~mask] == 0).all()
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[mask], -np.log1p(15 * np.exp(-9)), atol=1e-6)


# --- drafts -----------------------------------------------------------------------------------------------------------


def looked_up(text, own, *, same_text, draft, longest):
    """The draft by loops: the place with the most matching tokens before it, then the nearest."""
    best = None
    for place in range(len(text) - 1):
        matched = 0
        while matched < min(longest, place + 1, len(own)) and text[place - matched] == own[-1 - matched]:
            matched += 1
        rank = (matched, -abs(place - (len(own) - 1)))
        if matched and (best is None or rank > best[0]):
            best = rank, place
    if best is None:
        return [-1] * draft
    rest = text[best[1] + 1 :]
    return [rest[i % len(rest)] for i in range(draft)]


def test_drafts_are_those_of_a_search_by_loops():
    rng, size, rows = np.random.default_rng(0), 14, 400
    first, end = rng.integers(0, 5, rows), rng.integers(6, size + 1, rows)
    own, other = rng.integers(0, 4, (2, rows, size))
    known = rng.integers(5, size + 1, rows)
    for text, upto in ((own, end), (other, known)):
        arrays = (jnp.asarray(x, jnp.int32) for x in (text, upto, own, end, first))
        found = jax.jit(functools.partial(speculate.look_up, draft=4, longest=3))(*arrays)
        for row in range(rows):
            a, b = text[row, first[row] : upto[row]].tolist(), own[row, first[row] : end[row]].tolist()
            wanted = looked_up(a, b, same_text=text is own, draft=4, longest=3)
            assert found[row].tolist() == wanted, (row, a, b)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": -1}, "num_speculative_tokens=-1: must be at least 1"),
        ({"draft": NEW}, "num_speculative_tokens=12: must be below the 12 new tokens that a row has room"),
        ({"source": "last_step"}, "speculative_source='last_step' is unknown: use prompt_lookup or last_epoch"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max=0: at least 1 token must match"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        sampling_of(**{"source": "prompt_lookup"} | options)


def test_drafts_that_do_not_fit(model, weights):
    sample = lambda given, source: jax.eval_shape(
        functools.partial(generate, model=model, sampling=sampling_of(source)), weights, given
    )
    with pytest.raises(ValueError, match="drafts are given, but not read: set num_speculative_tokens and"):
        sample(asked(drafts=np.zeros((ROWS, NEW))), "prompt_lookup")
    with pytest.raises(
        ValueError, match=r"drafts of shape \(24, 3\): must be a row a request and a column a token, \(24"
    ):
        sample(asked(drafts=np.zeros((ROWS, 3))), "last_epoch")


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_guesses_from_its_last_epoch_and_goes_on_bit_for_bit(cached, tmp_path):
    """Every step samples all prompts; what they were completed with is part of a checkpoint."""
    rows = tiny_run.write_rows(tmp_path / "train.jsonl", tiny_run.problems("train", 8))
    model, data, found = (
        tiny_run.save_model(tmp_path / "model", num_layers=1),
        {"train": rows, "test": rows, "ood": rows},
        {},
    )
    own = {"eval_dataset": {}, "reward": ("tiny_run:digits",), "reward_weights": (), "true_reward": None, "beta": 0.0}
    own |= {"mesh": {"data": 8}, "num_iterations": 1, "minibatch_completions": None, "eval_steps": 0, "max_steps": 2}
    own |= {"probe_prompts": 0, "prompt_buckets": (), "prompts_per_step": 8, "num_generations": 2, "temperature": 0.1}
    own |= {"num_speculative_tokens": DRAFT, "speculative_source": "last_epoch", "learning_rate": 1e-4}
    for name in ("straight", "resumed"):
        run, printed = tiny_run.run(tiny_run.options(model, data, tmp_path / name, **own))
        assert ("resumed from step 1" in printed) == (name == "resumed")
        metrics = run.metrics[-1]
        passes = {key: value for key, value in metrics.items() if key.startswith("speculation/")}
        with Checkpoints(run.directory / "checkpoints", read_only=True) as checkpoints:
            kept = checkpoints.restore_host()["host"]["earlier"]
        completions = pq.read_table(run.directory / "completions" / "step_000002.parquet").to_pylist()
        found[name] = tiny_run.bits(run.state), completions, passes, kept
        if name == "straight":
            shutil.copytree(run.directory, tmp_path / "resumed")
            shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "2")
    assert found["straight"] == found["resumed"]
    assert sorted(kept["indices"]) == list(range(8))
    assert kept["counts"] == [2] * 8
    drawn = 16 * metrics["completions/mean_length"]
    assert drawn / metrics["speculation/passes"] == pytest.approx(metrics["speculation/tokens_per_pass"])
    assert metrics["speculation/tokens_per_pass"] > 1.3


def test_earlier_completions_come_back():
    earlier = Earlier()
    earlier.put([4, 2], [[1, 2, 3], [], [5], [6, 7]])
    earlier.put([2], [[8, 9], [5]])
    again = Earlier()
    again.load(json.loads(json.dumps(earlier.state())))
    for one in (earlier, again):
        assert [ids.tolist() for ids in one.of([2, 7, 4], 3)] == [[8, 9], [5], [], [], [], [], [1, 2, 3], [], []]
        assert len(one) == 2
    empty = Earlier()
    empty.load(json.loads(json.dumps(Earlier().state())))
    assert len(empty) == 0
    with pytest.raises(ValueError, match="3 completions are not a multiple of 2 prompts"):
        earlier.put([0, 1], [[1]] * 3)
