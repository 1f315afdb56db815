"""Streams of given rows and a teacher in the updates of reinforcement learning; critics that start from reward models."""

import dataclasses
import functools
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from jaxrl_lm import GRPOConfig, PPOConfig, SFTConfig, loop
from jaxrl_lm.algos import token_weights
from jaxrl_lm.assemble import make_objective
from jaxrl_lm.clock import Clock
from jaxrl_lm.data import batch_indices
from jaxrl_lm.distill import DistillObjective
from jaxrl_lm.fit_batches import preference_batch, sft_batch
from jaxrl_lm.fit_objectives import PreferenceObjective
from jaxrl_lm.lab.task import demonstration_rows, make_problems, rows, solution
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.metrics import result
from jaxrl_lm.mix import MixedBatch, MixedObjective, check_mix, check_teacher
from jaxrl_lm.models import Model, ModelConfig, build, load, save, save_reward_model
from jaxrl_lm.models.heads import critic
from jaxrl_lm.objectives import PolicyObjective, SFTObjective
from jaxrl_lm.prepare import prepare, whole_objective
from jaxrl_lm.rollout import SolveRates
from jaxrl_lm.runs import NonFiniteError
from jaxrl_lm.score import score
from jaxrl_lm.sft import prepare_sft
from jaxrl_lm.types import Frozen, PolicyBatch, TrainState
from jaxrl_lm.update import gradients

pytestmark = pytest.mark.usefixtures("cached")

PROBLEMS = make_problems(24, seed=0, digits=2)
SUMS = [{**row, "solution": solution(one)} for row, one in zip(rows(PROBLEMS[:16]), PROBLEMS, strict=False)]
DEMONSTRATIONS = demonstration_rows(PROBLEMS[16:], seed=0)
PAIRS = [{"prompt": r["prompt"], "chosen": r["solution"], "rejected": f"{r['solution']}0"} for r in SUMS[:12]]
TOLD = [{**row, "loss": "rl"} for row in SUMS] + [{**row, "loss": "sft"} for row in DEMONSTRATIONS]
SMALL = {
    "dataset": "rows",
    "reward": ("tiny_run:digits",),
    "reward_weights": (),
    "true_reward": None,
    "eval_dataset": {},
    "eval_steps": 0,
    "probe_prompts": 0,
    "completions_steps": 0,
    "save_steps": 0,
    "beta": None,
    "num_iterations": 1,
    "prompt_buckets": (16,),
    "max_steps": 2,
}
NO_STATE = TrainState(jnp.zeros((), jnp.int32), {}, None, jax.random.key(0), {})  # demonstrations need none
WEIGHTS = {"sft": 0.1, "dpo": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return tiny_run.save_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return tiny_run.write_rows(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", PAIRS)


@pytest.fixture(scope="module")
def options(model, tmp_path_factory):
    """Options of a run of two steps of two updates, in a directory of its own."""
    fresh = functools.partial(tmp_path_factory.mktemp, "run")
    return lambda **changes: tiny_run.options(model, {"train": "", "test": "", "ood": ""}, fresh(), **SMALL | changes)


@pytest.fixture(scope="module")
def mixed(options, pairs):
    """Options of a run with both streams, whose demonstrations stand in its dataset."""
    return lambda **changes: options(mix=WEIGHTS, mix_dataset={"dpo": pairs}, mix_rows=8, save_steps=1, **changes)


class Played(NamedTuple):
    run: loop.Run
    batches: list  # of the updates, in order
    metrics: list  # each update's own


def play(options, dataset, config=GRPOConfig, raises=None, **given):
    """A run, and what each of its updates was given and found. `raises`: an error that ends it, which stands for the run."""
    setup, batches, metrics = prepare(config(**options), dataset=dataset, **given), [], []

    def update(state, frozen, batch):
        state, found = setup.steps.update(state, frozen, batch)
        batches.append(jax.device_get(batch))
        metrics.append(result(found))
        return state, found

    watched = setup._replace(steps=dataclasses.replace(setup.steps, update=update))
    if raises is None:
        return Played(loop.run(watched), batches, metrics)
    with pytest.raises(raises) as error:
        loop.run(watched)
    return Played(error.value, batches, metrics)


@pytest.fixture(scope="module")
def plain(options):
    return play(options(), SUMS)


@pytest.fixture(scope="module")
def both(mixed):
    return play(mixed(), TOLD)


def texts(batch, side=slice(None)):
    """The rows of a stream's batch as text."""
    tokens, segments = np.asarray(batch.tokens)[:, side], np.asarray(batch.segment_ids)[:, side]
    tokens, segments = (x.reshape(len(x), -1) for x in (tokens, segments))
    return [lab_tokenizer().decode(row[real > 0]) for row, real in zip(tokens, segments, strict=True)]


def prompts_of(batch):
    return [text.split("=")[0] + "=" for text in texts(batch)]


@functools.partial(jax.jit, static_argnames=("model", "start"))
def logprobs(params, tokens, segment_ids, **options):
    return score(params, tokens, segment_ids, **options).logprobs


def assert_reference(pairs, model, params):
    """The pairs' reference log-probs are those of a model, each row on one device."""
    flat = [np.asarray(x).reshape(-1, x.shape[-1]) for x in (pairs.tokens, pairs.segment_ids)]
    expected = np.asarray(logprobs(params, *flat, model=model)).reshape(pairs.tokens.shape)
    np.testing.assert_allclose(pairs.ref_logprobs[pairs.action_mask], expected[pairs.action_mask], atol=1e-5)


# --- the loss ---------------------------------------------------------------------------------------------------------


class HeadOnly(Model):
    """A model without its layers."""

    def hidden(self, params, tokens, positions, segment_ids):
        return params["embed"]["table"][tokens]


RNG = np.random.default_rng(0)
TABLES = {
    "embed": {"table": jnp.asarray(RNG.normal(size=(48, 32)) * 0.4, jnp.float32)},
    "final_norm": {"scale": jnp.ones(32)},
    "lm_head": {"table": jnp.asarray(RNG.normal(size=(48, 32)) * 0.4, jnp.float32)},
}
DRAWN = jnp.asarray(RNG.integers(0, 48, (4, 2, 9)), jnp.int32)
ADVANTAGES = jnp.asarray(RNG.normal(size=(4, 9)) + 1.0, jnp.float32)
ENDS = np.array([9, 6, 8, 9])
MARKED = jnp.asarray((np.arange(9) >= 3) & (np.arange(9) < ENDS[:, None]))
REAL = jnp.asarray(np.arange(9) < ENDS[:, None], jnp.int32)


def main_batch():
    return PolicyBatch(
        tokens=DRAWN[:, 0],
        segment_ids=REAL,
        action_mask=MARKED,
        weights=token_weights(MARKED),
        temperature=jnp.ones(4),
        old_logprobs=None,
        sampler_logprobs=jnp.zeros(MARKED.shape),
        advantages=ADVANTAGES,
        ref_logprobs=None,
        truncated=jnp.zeros(4, bool),
        valid=jnp.ones(4, bool),
    )


def stream_batches():
    sides = lambda x: jnp.stack([x, x], axis=1)
    ref = jnp.asarray(RNG.normal(size=(4, 2, 9)), jnp.float32)
    valid = jnp.asarray([True, True, False, True])
    return (
        sft_batch(DRAWN[:, 1], REAL, MARKED & valid[:, None]),
        preference_batch(DRAWN, sides(REAL), sides(MARKED), valid, ref),
    )


MAIN, SFT = PolicyObjective(completion_columns=6), SFTObjective(start=3)
DPO = PreferenceObjective(beta=0.3, start=3)
MIXED = MixedObjective(main=MAIN, streams=(("sft", 0.1, SFT), ("dpo", 0.5, DPO)))


@functools.partial(jax.jit, static_argnames=("objective", "model", "microbatches"))
def learn(batch, *, objective, model, microbatches=1):
    """Gradient and metrics."""
    options = {"objective": objective, "model": model, "microbatches": microbatches}
    return gradients({"policy": TABLES}, Frozen(), batch, **options)


@pytest.fixture(scope="module")
def head_only(tiny_config):
    return HeadOnly(tiny_config)


def assert_close(tree, expected, rtol):
    for ours, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=rtol * np.abs(theirs).max(), rtol=0)


def test_loss_and_gradient_are_the_weighted_sum(head_only):
    streams = stream_batches()
    grads, found = learn(MixedBatch(main_batch(), streams), objective=MIXED, model=head_only)
    parts = [learn(main_batch(), objective=MAIN, model=head_only)]
    parts += [learn(batch, objective=one, model=head_only) for batch, one in zip(streams, (SFT, DPO), strict=True)]
    losses = [result(one)["loss"] for _, one in parts]
    assert all(abs(loss) > 0.05 for loss in losses)
    assert result(found)["loss"] == pytest.approx(losses[0] + 0.1 * losses[1] + 0.5 * losses[2], rel=1e-6)
    total = jax.tree.map(lambda a, b, c: a + 0.1 * b + 0.5 * c, *(one for one, _ in parts))
    assert_close(grads, total, rtol=1e-6)
    expected = {key: value for key, value in result(parts[0][1]).items() if key != "loss"}
    for name, (_, one) in zip(("sft", "dpo"), parts[1:], strict=True):
        expected |= {f"{name}/{key}": value for key, value in result(one).items()}  # its own loss before the weight
    got = result(found)
    del got["loss"]
    assert got == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_streams_without_rows_teach_nothing(head_only):
    none, (sft, dpo) = jnp.zeros(4, bool), stream_batches()
    empty = (
        sft_batch(sft.tokens, sft.segment_ids, MARKED & none[:, None]),
        preference_batch(dpo.tokens, dpo.segment_ids, dpo.action_mask, none, jnp.full(dpo.tokens.shape, jnp.nan)),
    )
    grads, found = learn(MixedBatch(main_batch(), empty), objective=MIXED, model=head_only)
    alone, expected = learn(main_batch(), objective=MAIN, model=head_only)
    assert result(found)["loss"] == pytest.approx(result(expected)["loss"], rel=1e-6)
    assert_close(grads, alone, rtol=1e-6)


def test_microbatches_do_not_change_the_sum(head_only):
    batch = MixedBatch(main_batch(), stream_batches())
    whole, found = learn(batch, objective=MIXED, model=head_only)
    cut, parts = learn(batch, objective=MIXED, model=head_only, microbatches=2)
    assert result(parts) == pytest.approx(result(found), rel=1e-5, abs=1e-6)
    assert_close(cut, whole, rtol=1e-5)


def test_a_stream_is_a_mean_over_its_own_rows(options):
    """Twice as many rows of the policy leave the stream's batch, and with it its part of the sum, as they were."""
    given = {"mix": {"sft": 0.1}, "mix_rows": 8}
    batches = []
    for changes in ({}, {"prompts_per_step": 8, "minibatch_completions": 32, "microbatch_completions": 16}):
        setup = prepare(GRPOConfig(**options(**given, **changes)), dataset=TOLD)
        (batch,) = setup.mix.batches(3, setup.stream_steps, NO_STATE, Frozen(), SolveRates(16), seed=0)
        batches.append(jax.device_get(batch))
    jax.tree.map(np.testing.assert_array_equal, *batches)
    assert batches[0].weights.sum() == pytest.approx(1.0, rel=1e-6)


# --- runs with streams ------------------------------------------------------------------------------------------------


def test_the_first_update_adds_sft_and_ln_2_for_pairs(options, plain, both, pairs, model):
    """The loss and the batch of `jaxrl-lm sft` on the same rows; a policy that is its reference loses ln 2 a pair."""
    sft = prepare_sft(
        SFTConfig(
            model=model,
            dataset="rows",
            output_dir=options()["output_dir"],
            mesh=options()["mesh"],
            rows_per_step=8,
            max_length=520,
        ),
        dataset=DEMONSTRATIONS,
    )
    state = sft.steps.init(sft.params, jax.random.key(0))
    batch, _ = sft.source.take(1, state, sft.frozen, Clock())
    jax.tree.map(np.testing.assert_array_equal, both.batches[0].streams[0], jax.device_get(batch))
    loss = result(sft.steps.measure(state.params, sft.frozen, batch))["loss"]
    assert loss > 1.0
    first = both.metrics[0]
    assert first["loss"] == pytest.approx(plain.metrics[0]["loss"] + 0.1 * loss + 0.5 * math.log(2), rel=1e-5)
    assert first["dpo/rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert first["sft/trained_tokens"] == (batch.weights > 0).sum()
    assert first["entropy"] == pytest.approx(plain.metrics[0]["entropy"], rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, both.batches[0].main.tokens, plain.batches[0].tokens)


def test_the_streams_go_through_their_rows_beside_the_steps(both, model):
    """Update n has the rows 8 n … of the stream's order; pairs are compared with the model as it started."""
    assert len(both.batches) == 4
    for number, batch in enumerate(both.batches):
        order = lambda count, number=number: batch_indices(count, seed=0, position=8 * number, count=8)
        sft, dpo = batch.streams
        assert texts(sft) == [f"{DEMONSTRATIONS[i]['prompt']}{DEMONSTRATIONS[i]['completion']}<eos>" for i in order(8)]
        for side, name in enumerate(("chosen", "rejected")):
            assert texts(dpo, side) == [f"{PAIRS[i]['prompt']}{PAIRS[i][name]}<eos>" for i in order(12)]
    start, params, _ = load(model)
    assert_reference(both.batches[3].streams[1], start, params)
    assert both.metrics[3]["dpo/rewards/margins"] > 0.1
    logged = both.run.metrics[-1]
    assert logged["sft/trained_tokens"] == np.mean([both.metrics[n]["sft/trained_tokens"] for n in (2, 3)])
    assert {"sft/entropy", "dpo/rewards/chosen", "dpo/logps/rejected", "dpo/entropy", "kl"} < logged.keys()
    kernel = lambda tree: np.asarray(tree["embed"]["table"])
    assert np.abs(kernel(both.run.state.params["policy"]) - kernel(params)).max() > 1e-3


def test_a_mixed_run_is_resumed_bit_for_bit(mixed, both):
    """From the first of its two steps; the streams go on where they were."""
    given = mixed()
    shutil.copytree(both.run.directory, given["output_dir"], dirs_exist_ok=True)
    shutil.rmtree(Path(given["output_dir"]) / "checkpoints" / "2")
    again = play(given, TOLD)
    assert [row["step"] for row in again.run.metrics] == [2]
    for ours, theirs in zip(again.batches, both.batches[2:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert tiny_run.bits(again.run.state) == tiny_run.bits(both.run.state)
    with pytest.raises(ValueError, match="the training rows are not those that this run was started with"):
        play(given, [*TOLD[:-1], {**TOLD[-1], "completion": "7"}])


def test_the_batch_that_is_kept_is_the_one_that_was_not_finite(mixed):
    """To the last bit, streams too, though the updates after it have moved the weights before it is written."""

    def half(*, completions, **_):
        return [3e38 if n % 2 and n < 8 else float(n % 4) for n in range(len(completions))]

    found = play(mixed(reward=()), TOLD, raises=NonFiniteError, reward_functions=[half])
    assert [row["nonfinite"] for row in found.metrics] == [1, 0]
    assert found.metrics[1]["grad_norm"] > 0
    assert str(found.run).startswith(
        "step 1, update 1: the loss or its gradient is not finite; the updates after it were"
    )
    leaves = jax.tree_util.tree_leaves_with_path(found.batches[0])
    given = {jax.tree_util.keystr(where, simple=True, separator="."): leaf for where, leaf in leaves}
    path = Path(str(found.run).split("the batch is in ")[1].split(". ")[0])
    with np.load(path) as kept:
        assert set(kept) == set(given)
        for name, leaf in given.items():
            assert kept[name].tobytes() == np.asarray(leaf).tobytes(), name


def test_pairs_are_compared_with_the_reference_that_there_is(mixed, model, other):
    """Under an adapter, which has moved here, with the weights below it; else with a reference that moves, or the start."""
    (start, first, _), (_, second, _) = load(model), load(other)
    adapted = prepare(GRPOConfig(**mixed(lora_rank=4)), dataset=TOLD)
    moved = jax.tree.map(jnp.ones_like, adapted.params["policy"])
    moving = prepare(GRPOConfig(**mixed(reference_ema=0.9)), dataset=TOLD)
    below = NO_STATE._replace(params={"policy": moved})
    beside = NO_STATE._replace(extra={"reference": jax.device_put(second, moving.steps.plan.tree(start.specs))})
    cases = (
        (adapted, below, Frozen(reference=moved, base=adapted.base), first),
        (moving, beside, Frozen(), second),
        (moving, NO_STATE, Frozen(reference=moving.params["policy"]), first),
    )
    for setup, state, frozen, expected in cases:
        _, dpo = setup.mix.batches(0, setup.stream_steps, state, frozen, SolveRates(16), seed=0)
        assert_reference(jax.device_get(dpo), start, expected)


# --- rows that say what they are for ----------------------------------------------------------------------------------


def test_rows_that_say_sft_are_never_sampled(both):
    told = {row["prompt"] for row in DEMONSTRATIONS}
    sampled = {prompt for batch in both.batches for prompt in prompts_of(batch.main)}
    assert len(sampled) == 8
    assert sampled <= {row["prompt"] for row in SUMS}
    assert {prompt for batch in both.batches for prompt in prompts_of(batch.streams[0])} == told


@pytest.mark.parametrize(
    ("dataset", "mix", "message"),
    [
        ([*TOLD[:3], {**TOLD[3], "loss": "dpo"}], {"sft": 0.1}, "dataset: row 3 has loss='dpo': use rl or sft"),
        (TOLD, {}, r"dataset: 8 rows say loss=sft: give mix\.sft, their weight"),
        (TOLD[16:], {"sft": 0.1}, "dataset: every row says loss=sft, nothing is left to sample: `jaxrl-lm sft`"),
        (SUMS, {"sft": 0.1}, r"mix\.sft: give mix_dataset\.sft, rows with loss=sft in the dataset, or mix_unsolved"),
    ],
    ids=["word", "weight", "nothing", "rows"],
)
def test_rows_that_do_not_fit(dataset, mix, message, options):
    with pytest.raises(ValueError, match=message):
        prepare(GRPOConfig(**options(mix=mix)), dataset=dataset)


def test_a_stream_has_one_source(options, tmp_path):
    path = tiny_run.write_rows(tmp_path / "demonstrations.jsonl", DEMONSTRATIONS)
    for changes in ({"mix_dataset": {"sft": path}}, {"mix_unsolved": "solution"}):
        with pytest.raises(ValueError, match="rows of the dataset with loss=sft: give the stream one source"):
            prepare(GRPOConfig(**options(mix={"sft": 0.1}, mix_rows=8, **changes)), dataset=TOLD)


def test_a_bad_row_of_a_stream_is_named(options, tmp_path):
    path = tiny_run.write_rows(tmp_path / "pairs.jsonl", [*PAIRS[:2], {"prompt": "1+1=", "chosen": "2"}])
    with pytest.raises(ValueError, match=r"mix\.dpo: row 2 has no 'rejected'"):
        prepare(GRPOConfig(**options(mix={"dpo": 0.1}, mix_dataset={"dpo": path}, mix_rows=8)), dataset=SUMS)


def test_a_prompt_of_an_evaluation_set_is_not_a_streams(options, tmp_path):
    path = tiny_run.write_rows(tmp_path / "held.jsonl", [*tiny_run.problems("test", 2), rows(PROBLEMS[18:19])[0]])
    given = {"mix": {"sft": 0.1}, "mix_rows": 8, "eval_dataset": {"held": path}}
    with pytest.raises(
        ValueError, match=r"eval_dataset 'held': 1 of its prompts are trained on by mix\.sft .* row 2\)"
    ):
        prepare(GRPOConfig(**options(**given)), dataset=TOLD)


# --- prompts that were never solved -----------------------------------------------------------------------------------

UNSOLVED = {"mix": {"sft": 1.0}, "mix_unsolved": "solution", "mix_rows": 8}


def test_only_prompts_that_were_sampled_and_never_solved_have_rows(options):
    """Index 2 has no solution and index 5 has one that is too long: places in the stream are not those of the prompts."""
    dataset = [dict(row) for row in SUMS]
    dataset[2]["solution"], dataset[5]["solution"] = None, "1" * 600
    setup = prepare(GRPOConfig(**options(**UNSOLVED)), dataset=dataset)
    rates = SolveRates(16)
    draw = lambda **flag: setup.mix.batches(0, setup.stream_steps, NO_STATE, Frozen(), rates, seed=0, **flag)[0]
    assert not draw().weights.any()
    assert not setup.mix.teaches(rates)
    rates.observe([1, 2, 5, 7, 9, 11], np.array([0.0, 0.0, 0.0, 0.25, np.nan, 0.0]))
    batch = draw()
    assert set(texts(batch)) == {f"{dataset[i]['prompt']}{dataset[i]['solution']}<eos>" for i in (1, 11)}
    assert float(batch.weights.sum()) == pytest.approx(1.0, rel=1e-6)
    assert not draw(learns=False).weights.any()  # while only a critic learns
    assert setup.mix.teaches(rates)
    assert not setup.mix._replace(streams=(setup.mix.streams[0]._replace(weight=0.0),)).teaches(rates)
    rates.observe([1], np.array([0.5]))
    rates.observe([1], np.array([0.0]))
    assert set(prompts_of(draw())) == {dataset[11]["prompt"]}
    rates.observe([11], np.array([1.0]))
    assert not setup.mix.teaches(rates)


def judge():
    """A reward that solves all of step 1's prompts, none of step 2's and one of step 3's, and what it has kept book of."""
    solved, never = [], set()

    def right(*, prompts, completions):
        step, seen = len(solved) + 1, list(dict.fromkeys(prompts))
        now = {1: set(seen), 2: set(), 3: {next((p for p in seen if p in never), "")}}[step]
        solved.append(now)
        never.difference_update(now)
        never.update(set(seen) - now if step < 3 else ())
        return [1.0 if prompt in now else 0.3 * (n % 2) for n, prompt in enumerate(prompts)]

    return right, solved, never


@pytest.fixture(scope="module")
def watched(options):
    """Three steps of eight prompts of which some are never solved; the stream has weight 0, which hides nothing of it."""
    right, *book = judge()
    given = options(max_steps=3, reward=(), **UNSOLVED | {"mix": {"sft": 0.0}})
    return play(given, SUMS[:8], reward_functions=[right]), *book


def test_solutions_come_and_go_with_what_a_run_has_solved(watched):
    found, solved, never = watched
    assert len(found.batches) == 6  # two a step
    rows, sizes = [batch.streams[0] for batch in found.batches], [row["sft/trained_tokens"] for row in found.metrics]
    for row, batch in zip(found.metrics[:2], rows[:2], strict=True):
        # Nothing is unsolved and all groups are equal: no gradient at all.
        assert (row["loss"], row["grad_norm"], row["sft/trained_tokens"]) == (0.0, 0.0, 0.0)
        assert not batch.weights.any()
    assert math.isnan(found.metrics[0]["sft/entropy"])  # nothing was measured
    middle, last = ([set(prompts_of(batch)) for batch in part] for part in (rows[2:4], rows[4:]))
    assert middle[0] == middle[1] == last[0] | solved[2]
    assert last[0] == last[1] == never
    assert (len(middle[0]), len(last[0])) == (4, 3)
    assert min(sizes[2:]) > 8
    assert all(np.isfinite([row["loss"], row["grad_norm"]]).all() for row in found.metrics)


def test_a_weight_of_0_leaves_the_run_as_it_was(options, watched):
    """It adds zeros, but in another program, whose products XLA may round otherwise."""
    alone = play(options(max_steps=3, reward=()), SUMS[:8], reward_functions=[judge()[0]])
    assert alone.metrics[4]["grad_norm"] > 0
    mixed, state = watched[0].run.state, alone.run.state
    assert tiny_run.bits((mixed.step, mixed.key)) == tiny_run.bits((state.step, state.key))
    for ours, theirs in zip(*(jax.tree.leaves((x.params, x.opt_state)) for x in (mixed, state)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max(), rtol=0)


def test_a_column_that_no_row_has(options):
    with pytest.raises(ValueError, match="mix_unsolved='answers': no row of the dataset has that column"):
        prepare(GRPOConfig(**options(**UNSOLVED | {"mix_unsolved": "answers"})), dataset=SUMS)


# --- a teacher --------------------------------------------------------------------------------------------------------

ALONE = {"teacher_only": True, "minibatch_completions": None}


def test_a_policy_that_is_its_teacher_does_not_move(options, model):
    found = play(options(teacher=model, **ALONE), SUMS)
    for row in found.metrics:
        assert (row["loss"], row["distill/kl"]) == (0.0, 0.0)
        assert row["grad_norm"] < 1e-7
    _, params, _ = load(model)
    for ours, theirs in zip(jax.tree.leaves(found.run.state.params["policy"]), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-7, rtol=0)


def test_the_divergence_from_a_teacher_falls(options, other):
    found = play(options(teacher=other, max_steps=10, **ALONE), SUMS)
    kl = [row["distill/kl"] for row in found.metrics]
    assert kl[0] > 0.2
    assert kl[-1] < 0.6 * kl[0], kl
    assert found.metrics[0]["loss"] == pytest.approx(kl[0], rel=1e-5)  # token-mean, teacher_coef 1
    assert {"reward", "rewards/digits/mean"} < found.run.metrics[0].keys()  # measured, and not learned from


@pytest.mark.parametrize("alone", [False, True], ids=["beside", "alone"])
def test_a_teacher_stands_beside_the_policy_and_the_streams(alone, mixed):
    given = {"teacher": "dir", "teacher_coef": 0.5, "teacher_divergence": "jsd", "teacher_beta": 0.3, "mix_beta": 0.2}
    config = GRPOConfig(**mixed(temperature=0.7, score_chunk=64, teacher_only=alone, **given))
    setup = prepare(dataclasses.replace(config, teacher=None, teacher_coef=1.0, teacher_divergence="reverse",
        teacher_beta=0.5, teacher_only=False), dataset=TOLD)  # fmt: skip
    policy, (sft, dpo) = make_objective(config, setup.algorithm), setup.mix.streams
    expected = MixedObjective(
        main=DistillObjective(
            teacher_model=setup.model,
            completion_columns=8,
            coef=0.5,
            direction="jsd",
            temperature=0.7,
            beta=0.3,
            score_chunk=64,
            policy=None if alone else policy,
        ),
        streams=(
            ("sft", 0.1, SFTObjective(score_chunk=64, start=sft.table.start)),
            ("dpo", 0.5, PreferenceObjective(beta=0.2, score_chunk=64, start=dpo.table.start)),
        ),
    )
    assert whole_objective(config, setup.algorithm, None, setup.model, setup.mix) == expected


def test_a_teacher_of_another_vocabulary_is_refused(options, tmp_path):
    tokenizer = lab_tokenizer()
    tokenizer.add_tokens(["teach", "er", "s", "words"])  # a table that divides over the mesh
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    config = ModelConfig(vocab_size=len(tokenizer), head_dim=16, tie_embeddings=True, **shape)
    network = build(config)
    save(tmp_path / "teacher", network, network.init(jax.random.key(0)), tokenizer)
    message = r"teacher='.*teacher': token 24 is None to the policy's tokenizer and 'teach' to this model's"
    with pytest.raises(ValueError, match=message):
        prepare(GRPOConfig(**options(teacher=str(tmp_path / "teacher"), **ALONE)), dataset=SUMS)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (PPOConfig, {"teacher": "dir"}, "teacher goes with methods that train the policy alone: leave critic and"),
        (GRPOConfig, {"teacher": "dir", "implicit_prm": 0.05}, "leave critic and implicit_prm out"),
        (GRPOConfig, {"teacher_coef": 0.5}, r"teacher_coef=0\.5 has no effect without teacher: give one"),
        (GRPOConfig, {"teacher_divergence": "jsd"}, "teacher_divergence='jsd' has no effect without teacher"),
        (GRPOConfig, {"teacher_beta": 0.1}, r"teacher_beta=0\.1 has no effect without teacher"),
        (GRPOConfig, {"teacher": "dir", "teacher_beta": 0.1}, r"has no effect without teacher_divergence='jsd'"),
        (GRPOConfig, {"teacher_only": True}, "teacher_only=True has no effect without teacher"),
        (
            GRPOConfig,
            {"teacher": "dir", "teacher_only": True, "beta": 0.1},
            r"beta=0\.1 has no effect with teacher_only",
        ),
        (
            GRPOConfig,
            {"teacher": "dir", "teacher_only": True, "entropy_coef": 0.1},
            "entropy_coef=0.1 has no effect with",
        ),
    ],
)
def test_teachers_that_do_not_fit(config, changes, message):
    with pytest.raises(ValueError, match=message):
        check_teacher(config(model="dir", dataset="rows", output_dir="run", **changes))


# --- a critic that is a reward model ----------------------------------------------------------------------------------


@pytest.fixture
def reward_model(model, tmp_path):
    """A reward model's directory, and its weights: with a head, from another start, or of another width."""

    def saved(**changes):
        source = tiny_run.save_model(tmp_path / "start", seed=2, **changes)
        start, params, tokenizer = load(source)
        trunk, found = critic(start, params)
        head = jax.random.normal(jax.random.key(3), found["head"]["kernel"].shape)
        found["head"] = {"kernel": head}
        save_reward_model(tmp_path / "reward", trunk, found, tokenizer)
        return str(tmp_path / "reward"), jax.device_get(found)

    return saved


PPO = {"num_generations": 4, "minibatch_completions": None}


def test_a_critic_starts_with_the_trunk_and_the_head_of_a_reward_model(options, reward_model):
    directory, saved = reward_model()
    setup = prepare(PPOConfig(**options(critic_model=directory, **PPO)), dataset=SUMS)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(setup.params["critic"]), saved)


def test_a_critic_that_is_a_language_model_has_a_fresh_head(options, other):
    setup = prepare(PPOConfig(**options(critic_model=other, **PPO)), dataset=SUMS)
    _, params, _ = load(other)
    found = jax.device_get(setup.params["critic"])
    jax.tree.map(np.testing.assert_array_equal, found["trunk"], jax.device_get(params))  # tied: no unembedding to lose
    assert not found["head"]["kernel"].any()


def test_a_critic_of_another_shape_is_refused(options, reward_model):
    directory, _ = reward_model(intermediate_size=32)
    with pytest.raises(ValueError, match=r"critic_model='.*reward' has another shape than the policy; give one of it"):
        prepare(PPOConfig(**options(critic_model=directory, **PPO)), dataset=SUMS)


# --- options ----------------------------------------------------------------------------------------------------------

SOURCE = {"mix_dataset": {"sft": "rows"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix": {"ppo": 1.0}}, r"mix\.ppo: there is no such stream; use sft or dpo"),
        ({"mix_dataset": {"kto": "rows"}}, r"mix\.kto: there is no such stream"),
        ({"mix": {"sft": -0.1}, **SOURCE}, r"mix\.sft=-0\.1: must be at least 0"),
        (SOURCE, r"mix_dataset\.sft is given, and mix\.sft, its weight in the update, is not"),
        ({"mix": {"dpo": 0.5}}, r"mix\.dpo: give mix_dataset\.dpo, rows with prompt, chosen and rejected"),
        ({"mix_unsolved": "solution"}, r"mix_unsolved makes the rows of the stream sft: give mix\.sft"),
        ({"mix": {"sft": 0.1}, "mix_unsolved": "solution", **SOURCE}, r"give mix\.sft, and no mix_dataset\.sft"),
        ({"mix": {"sft": 0.1}, "mix_beta": 0.3}, r"mix_beta=0\.3 has no effect on the streams that are chosen"),
        ({"mix_rows": 8}, "mix_rows=8 has no effect on the streams that are chosen: leave it out"),
        ({"mix": {"sft": 0.1}, "mix_rows": 12}, "mix_rows=12 does not divide into 2 microbatches over 4 devices"),
        ({"mix": {"sft": 0.1}, "mix_rows": 0}, "mix_rows=0 does not divide into 2 microbatches over 4 devices"),
    ],
)
def test_streams_that_do_not_fit(changes, message):
    config = GRPOConfig(model="dir", dataset="rows", output_dir="run", **changes)
    with pytest.raises(ValueError, match=message):
        check_mix(config, 4, 2)


def test_streams_that_fit():
    given = {"mix": {"sft": 0.0, "dpo": 0.5}, "mix_dataset": {"sft": "rows", "dpo": "pairs"}, "mix_rows": 16}
    check_mix(GRPOConfig(model="dir", dataset="rows", output_dir="run", **given), 4, 2)
    check_mix(GRPOConfig(model="dir", dataset="rows", output_dir="run"), 3, 5)  # without streams no size matters
