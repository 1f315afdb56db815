"""The cache of generation: rounded to int8, and read from the first block that a sliding window still sees.

References: attention in float64, the same without rounding, the full forward pass, every row with a slot of its own.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_engine import EOS, requests

from jaxrl_lm.generate import decode, generate, prepare_decode, read_prompts
from jaxrl_lm.models import build, kv_cache
from jaxrl_lm.models import decode as decoding
from jaxrl_lm.models.kv_cache import rounded, stored
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_estimate import cache_bytes, step_memory
from jaxrl_lm.plan_steps import blocks_read
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.slots import DecodeState, fork, start

PROMPTS, GROUP, COLUMNS, NEW = 4, 2, 6, 10
ROWS = PROMPTS * GROUP
LENGTHS = np.array([6, 1, 4, 3])
TOKENS = np.random.default_rng(0).integers(10, 48, (PROMPTS, COLUMNS)).astype(np.int32)
SEGMENTS = (np.arange(COLUMNS) >= COLUMNS - LENGTHS[:, None]).astype(np.int32)
LIMITS = np.array([10, 4, 7, 10, 1, 10, 5, 9])


def asked(**changes):
    keys = jax.random.split(jax.random.key(3), ROWS)
    return requests(TOKENS, SEGMENTS, **{"keys": keys, "max_new": LIMITS, "temperature": 1.0} | changes)


def options(**changes):
    given = {"max_new_tokens": NEW, "eos_token_ids": EOS, "pad_token_id": 0, "kv_cache_dtype": "int8"}
    return SamplingConfig(**given | changes)


def read(x, axis):
    """The float64 numbers that int8 ones stand for, and their scales."""
    scale = np.asarray(x.scale, np.float64)
    scale = scale if axis == 2 else scale.swapaxes(2, 3)
    return np.asarray(x.numbers, np.float64) * scale, scale


# --- rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_number_is_off_by_half_a_scale_at_most(axis, dtype):
    x = np.random.default_rng(0).standard_t(2, (3, 2, 8, 8)) * 10.0 ** np.arange(-12, 12).reshape(3, 1, 1, 8)
    x = jnp.asarray(x if axis == 2 else x.swapaxes(2, 3), dtype)
    found, (back, scale) = rounded(x, axis), read(rounded(x, axis), axis)
    assert (found.numbers.dtype, found.scale.dtype, found.scale.shape) == (jnp.int8, jnp.float32, (3, 2, 1, 8))
    exact = np.asarray(x, np.float64)
    assert (np.abs(back - exact) <= 0.5 * scale * (1 + 1e-6)).all()
    np.testing.assert_allclose(scale, np.abs(exact).max(axis, keepdims=True) / 127, rtol=1e-6)
    assert (np.abs(np.asarray(found.numbers)).max(axis) == 127).all()  # symmetric, and all of it used


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden():
    x = jnp.ones((1, 1, 4, 5)).at[..., 0].set(0.0).at[0, 0, 1, 1].set(jnp.nan).at[0, 0, 2, 2].set(jnp.inf)
    with np.errstate(invalid="ignore"):
        back, scale = read(rounded(x, 2), 2)
    assert (back[..., 0] == 0).all()
    assert scale[0, 0, 0, 0] == 0.0
    assert (np.isfinite(back).all((0, 1, 2)) == [True, False, False, True, True]).all()


def test_a_large_channel_does_not_drown_the_others():
    """Keys are rotated: what one channel had is spread over all, and no product with a query changes."""
    rng = np.random.default_rng(4)
    k, q = rng.normal(size=(2, 2, 64, 50)), rng.normal(size=(2, 2, 1, 3, 64))
    k[:, :, 7] += 40.0
    exact = np.einsum("wcgtk,wcks->wcgts", q, k)
    errors = []
    for spread in (True, False):
        x = jnp.asarray(k, jnp.float32)
        keys = stored(x, x.swapaxes(2, 3), "int8")[0] if spread else rounded(x, 2)
        asked = jnp.asarray(q, jnp.float32)
        found = kv_cache.dot_keys(kv_cache.queries_for(asked, keys) if spread else asked, keys)
        errors.append(np.abs(np.asarray(found) - exact).mean())
    assert errors[0] < 0.3 * errors[1]


# --- attention --------------------------------------------------------------------------------------------------------


def exact_attention(q, k, v, places, window):
    """Float64, [W T h K], of q [W T h K], k [W c K S] and v [W c S K]; and which columns are seen [W T S]."""
    group = q.shape[2] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    gap = places[:, :, None] - np.arange(k.shape[3])
    sees = (gap >= 0) & (gap < (window or 1000))
    logits = np.einsum("wthk,whks->whts", q, k) * q.shape[3] ** -0.5
    weights = np.where(sees[:, None], np.exp(logits - logits.max(-1, keepdims=True)), 0.0)
    return np.einsum("whts,whsk->wthk", weights / weights.sum(-1, keepdims=True), v), sees


@pytest.mark.parametrize(("block", "window"), [(128, None), (4, None), (4, 6)])
def test_attention_reads_the_rounded_numbers_and_stays_within_what_rounding_allows(monkeypatch, block, window):
    """Half a scale moves a logit by δ = Σ|q| · scale / 2√K at most, q rotated, so a weight by a factor of e^2δ, and a value
    by half its scale: together no more than scale/2 + (e^2δ − 1) · max |v|."""
    monkeypatch.setattr(decoding, "BLOCK", block)
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(3, 2, 4, 16)), rng.normal(size=(3, 2, 16, 20))
    v, places = rng.normal(size=(3, 2, 20, 16)), np.array([[17, 18], [4, 5], [9, 10]], np.int32)
    small = stored(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32), "int8")
    run = jax.jit(functools.partial(decoding.attend_filled, window=window))
    found = run(jnp.asarray(q, jnp.float32), *small, jnp.asarray(places), jnp.int32(19)).reshape(q.shape)
    (k8, k_scale), (v8, v_scale) = read(small[0], 2), read(small[1], 3)
    turn = kv_cache.rotation(16).astype(np.float64)
    np.testing.assert_allclose(turn @ turn.T, np.eye(16), atol=1e-6)
    np.testing.assert_allclose(found, exact_attention(q @ turn.T, k8, v8, places, window)[0], atol=2e-6)
    exact, sees = exact_attention(q, k, v, places, window)
    seen = np.where(sees, k_scale.repeat(2, 1)[:, :, 0].transpose(1, 0, 2)[:, :, None], 0.0).max(-1)  # [h W T]
    delta = 0.5 * seen.transpose(1, 2, 0) * np.abs(q @ turn.T).sum(-1) * 16**-0.5
    bound = 0.5 * v_scale.max() + (np.exp(2 * delta) - 1) * np.abs(v).max()
    error = np.abs(np.asarray(found) - exact).max(-1)
    assert (error <= bound).all()
    assert 1e-4 < error.max() < 0.03  # of values around 1


# --- a cache through its life -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampler(model, weights):
    @functools.cache
    def make(slots=None, dtype="int8"):
        sampling = options(slots=slots, kv_cache_dtype=dtype)
        compiled = jax.jit(functools.partial(generate, model=model, sampling=sampling))
        return lambda given: compiled(weights, given)

    return make


@pytest.fixture(scope="module")
def rollout(sampler):
    return sampler()(asked())


def assert_close(found, wanted, atol):
    for name in ("tokens", "action_mask", "segment_ids", "truncated", "turn_ids"):
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=atol)


def test_columns_that_are_prefilled_and_columns_that_are_added_are_the_same(model, params, weights):
    tokens = np.random.default_rng(5).integers(10, 48, (3, 12)).astype(np.int32)
    lengths = np.array([5, 2, 3], np.int32)
    make = jax.jit(functools.partial(decoding.prefill, model=model, kv_cache_dtype="int8"))
    go_on = jax.jit(functools.partial(decoding.extend, model=model))
    whole = make(weights, jnp.asarray(tokens), jnp.full((3,), 12))
    cache = make(weights, jnp.asarray(tokens[:, :5]), jnp.asarray(lengths))
    cache = cache._replace(layers=tuple(kv_cache.wider(*layer, 11) for layer in cache.layers))
    assert (whole.dtype, cache.dtype, cache.columns) == ("int8", "int8", 16)
    full = jax.jit(model.hidden)(
        params, jnp.asarray(tokens), jnp.broadcast_to(jnp.arange(12), (3, 12)), jnp.ones((3, 12), jnp.int32)
    )
    done = lengths.copy()
    for width, count in ((4, [4, 3, 4]), (4, [3, 3, 0]), (4, [0, 4, 4])):
        part = np.stack([np.resize(row[at : at + width], width) for row, at in zip(tokens, done, strict=True)])
        hidden, cache = go_on(weights, jnp.asarray(part), cache, count=jnp.asarray(count))
        for row, (at, number) in enumerate(zip(done, count, strict=True)):
            np.testing.assert_allclose(hidden[:, row, :number].T, full[row, at : at + number], atol=0.05)
        done += count
    np.testing.assert_array_equal(cache.lengths, [12, 12, 11])
    for number, (here, there) in enumerate(zip(cache.layers, whole.layers, strict=True)):
        for axis, one, other in zip((2, 3), here, there, strict=True):
            (one, scale), (other, _) = read(one, axis), read(other, axis)
            part = lambda x, axis=axis: x[..., :11] if axis == 2 else x[:, :, :11]
            gap = np.abs(part(one) - part(other)) / part(scale)
            assert gap.max() <= (1.01, 8)[number]  # a layer reads what rounding did to those below it
            assert (gap < 0.01).mean() > (0.99, 0.3)[number]


def test_a_sample_is_drawn_from_the_distribution_that_its_logprobs_say(model, weights, rollout, sampler, params):
    """The log-probs are those of the rounded cache, which `score` gives up to the rounding."""
    go_on = jax.jit(functools.partial(decoding.extend, model=model))
    layers = decoding.prefill(
        weights, jnp.asarray(TOKENS[:1]), jnp.array([5]), model=model, kv_cache_dtype="int8"
    ).layers
    cache = kv_cache.Cache(tuple(kv_cache.wider(*layer, NEW) for layer in layers), jnp.array([5]))
    row = np.asarray(rollout.tokens)[0, 5:]
    count = int(np.asarray(rollout.action_mask)[0].sum())
    for number in range(count):
        hidden, cache = go_on(weights, jnp.asarray(row[number][None, None]), cache)
        logprobs = jax.nn.log_softmax(decoding.next_logits(weights, hidden[:, :, 0], model=model)[0])
        np.testing.assert_allclose(logprobs[row[number + 1]], rollout.logprobs[0, COLUMNS + number], atol=1e-3)
    scores = jax.jit(functools.partial(score, model=model))(
        params, rollout.tokens, rollout.segment_ids, temperature=jnp.ones((ROWS,))
    )
    gap = np.abs(np.asarray(rollout.logprobs - scores.logprobs))[np.asarray(rollout.action_mask)]
    assert 1e-4 < gap.max() < 0.1


def test_few_slots_give_the_rows_of_a_slot_each(sampler, rollout):
    assert 0 < int(rollout.action_mask.sum()) < LIMITS.sum()
    assert_close(sampler(2)(asked()), rollout, 2e-3)


def test_order_changes_no_bit(sampler):
    """A refilled slot has nothing of the row before it."""
    base, order = sampler(2)(asked()), np.array([2, 0, 3, 1])
    rows = (order[:, None] * GROUP + np.arange(GROUP)).reshape(-1)
    keys = jax.random.split(jax.random.key(3), ROWS)[rows]
    moved = sampler(2)(requests(TOKENS[order], SEGMENTS[order], keys=keys, max_new=LIMITS[rows], temperature=1.0))
    for name, one, other in zip(base._fields, base, moved, strict=True):
        if one is not None:
            np.testing.assert_array_equal(np.asarray(one)[rows], other, err_msg=name)


def test_a_fork_shares_the_cache_and_goes_on_as_the_row_itself(model, weights):
    """Its columns are the row's, numbers and scales."""
    given, sampling = asked(max_new=NEW, temperature=0.0), options(eos_token_ids=())
    run = jax.jit(functools.partial(decode, model=model, sampling=sampling))
    read = functools.partial(read_prompts, model=model, kv_cache_dtype="int8")
    begin = jax.jit(lambda w, given: start(read(w, given), given, model=model, sampling=sampling))
    done = run(weights, given, begin(weights, given), None, np.int32(NEW))
    rows, counts = np.arange(ROWS), np.arange(ROWS) % 5
    forked = jax.jit(fork)(done, rows, counts)
    for one, other in zip(jax.tree.leaves(forked.cache.layers), jax.tree.leaves(done.cache.layers), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    again = requests(
        np.zeros((ROWS, 1)), np.ones((ROWS, 1)), keys=jax.random.split(jax.random.key(9), ROWS), temperature=0.0
    )
    fewer = dataclasses.replace(sampling, max_new_tokens=4)
    begin = functools.partial(start, model=model, sampling=fewer)
    more = jax.jit(lambda w, forked: decode(w, again, begin(forked, again), model=model, sampling=fewer).results)
    found = more(weights, forked)
    wanted = [
        np.stack([buffer[row, c : c + 4] for row, c in zip(rows, counts, strict=True)])
        for buffer in (done.results.tokens, done.results.logprobs)
    ]
    np.testing.assert_array_equal(found.tokens, wanted[0])
    np.testing.assert_allclose(found.logprobs, wanted[1], atol=2e-3)


@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 2}])
def test_a_mesh_samples_as_one_device(tiny_config, params, rollout, mesh):
    size = int(np.prod(list(mesh.values())))
    plan = Plan(make_mesh(mesh, devices=jax.devices()[:size])).for_decode()
    model = build(dataclasses.replace(tiny_config, num_layers=2), plan=plan)
    weights = jax.device_put(prepare_decode(params, model=model), plan.tree(decoding.decode_specs(model.config)))
    placed = jax.tree.map(lambda x: jax.device_put(x, plan.rows if x.ndim else plan.replicated), asked())
    sampling = options(slots=4)
    run = jax.jit(functools.partial(generate, model=model, sampling=sampling), out_shardings=plan.rows)
    assert_close(run(weights, placed), rollout, 2e-3)
    prefixes = jax.eval_shape(functools.partial(read_prompts, model=model, kv_cache_dtype="int8"), weights, placed)
    state = jax.jit(lambda w, given: start(read_prompts(w, given, model=model, kv_cache_dtype="int8"), given, model=model,
                                           sampling=sampling))(weights, placed)  # fmt: skip
    assert prefixes.cache.columns == COLUMNS
    for leaf in jax.tree.leaves(state.cache.layers):
        assert leaf.sharding.spec[:2] == ("data", "tensor")  # scales lie with their numbers


# --- memory -----------------------------------------------------------------------------------------------------------


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_the_cache_takes_a_quarter_of_float32_and_its_scales(model, weights):
    def state(dtype) -> DecodeState:
        read = functools.partial(read_prompts, model=model, kv_cache_dtype=dtype)
        sampling = options(kv_cache_dtype=dtype, slots=4)
        return jax.eval_shape(lambda w, r: start(read(w, r), r, model=model, sampling=sampling), weights, asked())

    small, full = state("int8"), state(None)
    for cache, other in ((small.cache, full.cache), (small.prefixes.cache, full.prefixes.cache)):
        numbers = sum(bytes_of(one.numbers) for layer in cache.layers for one in layer)
        scales = sum(bytes_of(one.scale) for layer in cache.layers for one in layer)
        assert numbers == bytes_of(other.layers) / 4
        assert scales == numbers * 4 / model.config.head_dim
        assert bytes_of(cache.layers) == numbers + scales


def test_a_plan_counts_it():
    model = open_model_config("qwen2.5-0.5b")
    plan = lambda **changed: PlanConfig(
        model="qwen2.5-0.5b", topology="gpu:H100x8", prompts_per_step=8, max_completion_length=1024, **changed
    )
    assert cache_bytes(plan(dtype="float32"), model) == 2 * 24 * 2 * 64 * 4
    assert cache_bytes(plan(kv_cache_dtype="int8"), model) == 2 * 24 * 2 * (64 + 4)
    full, small = (step_memory(config, model, {"fsdp": 8}) for config in (plan(), plan(kv_cache_dtype="int8")))
    token = 2 * 24 * 2 * (2 * 64 - 68)
    assert full["generate"][1] - small["generate"][1] == token * (8 * 1536 + 512)  # 8 slots and a prompt a device
    assert {name: full[name] == small[name] for name in full} == {name: name != "generate" for name in full}


def test_a_run_measures_the_gap_and_weights_its_loss_from_then_on(tmp_path):
    data = {"train": tiny_run.write_rows(tmp_path / "train.jsonl", tiny_run.problems("train", 8))}
    small = {
        "mesh": {"data": 4, "tensor": 2},
        "num_iterations": 1,
        "minibatch_completions": None,
        "prompt_buckets": (16,),
    }
    small |= {
        "eval_dataset": {},
        "reward": ("tiny_run:digits",),
        "reward_weights": (),
        "true_reward": None,
        "beta": None,
    }
    small |= {"probe_prompts": 0, "max_steps": 2, "eval_steps": 0, "save_steps": 0, "decode_slots": 8}
    small |= {"kv_cache_dtype": "int8", "max_sampler_gap": 1e-5, "learning_rate": 1e-3}
    found, printed = tiny_run.run(
        tiny_run.options(
            tiny_run.save_model(tmp_path / "model"), data | {"test": "", "ood": ""}, tmp_path / "run", **small
        )
    )
    first, second = found.metrics
    assert 1e-5 < first["sampling/logp_difference/mean"] < 0.02
    assert "sampler_correction=token_truncate" in printed
    assert second["sampling/importance_ratio/min"] < 1 < second["sampling/importance_ratio/max"]


def test_options_that_there_are_not(model, weights):
    with pytest.raises(ValueError, match="kv_cache_dtype='int4' is unknown: use int8"):
        options(kv_cache_dtype="int4")
    with pytest.raises(ValueError, match="kv_cache_dtype='int4' is unknown: use int8"):
        read_prompts(weights, asked(), model=model, kv_cache_dtype="int4")
    plain = jax.eval_shape(functools.partial(read_prompts, model=model), weights, asked())
    with pytest.raises(ValueError, match="kv_cache_dtype='int8', but the prefixes' caches were made with None"):
        jax.eval_shape(functools.partial(start, model=model, sampling=options()), plain, asked())


# --- sliding windows --------------------------------------------------------------------------------------------------


def test_the_columns_that_any_row_sees():
    seen = lambda *given: tuple(map(int, decoding.columns_seen(*given)))
    lengths = jnp.array([30, 9, 25], jnp.int32)
    assert seen(lengths, 1, None) == (0, 31)
    assert seen(lengths, 3, 5) == (5, 33)  # the token at 9 sees 5 to 9
    assert seen(lengths, 1, 40) == (0, 31)
    assert seen(lengths, 1, 5, jnp.array([1, 0, 1])) == (21, 31)  # the second row has ended
    assert seen(lengths, 1, 5, jnp.array([0, 1, 0])) == (5, 10)
    assert seen(lengths, 1, None, jnp.array([0, 1, 0])) == (0, 10)
    assert seen(lengths, 1, 5, jnp.array([0, 0, 0])) == (0, 1)  # one block is read in any case


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_blocks_before_the_windows_are_not_read_and_no_bit_differs(monkeypatch, tiny_config, weights, dtype):
    monkeypatch.setattr(decoding, "BLOCK", 4)
    model = build(dataclasses.replace(tiny_config, num_layers=2, sliding_window=5))
    reads, real = [], decoding.dot_keys

    def counting(q, k):
        jax.debug.callback(lambda: reads.append(k.shape[3]))
        return real(q, k)

    monkeypatch.setattr(decoding, "dot_keys", counting)
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(10, 48, (3, 32)), jnp.int32)
    cache = decoding.prefill(weights, tokens, jnp.array([30, 9, 25]), model=model, kv_cache_dtype=dtype)

    def step(count):
        run = jax.jit(functools.partial(decoding.extend, model=model))
        reads.clear()
        hidden, _ = run(weights, tokens[:, :1], cache, count=jnp.asarray(count))
        jax.effects_barrier()
        return np.asarray(hidden)[:, :, 0], len(reads)

    every, blocks = step([1, 1, 1])
    assert blocks == 2 * 7  # two layers; of the 8 blocks of which a row fills some, the first is before all windows
    living, blocks = step([1, 0, 1])
    assert blocks == 2 * 3
    assert np.isfinite(living).all()
    monkeypatch.setattr(decoding, "columns_seen", lambda *given: (0, jnp.int32(31)))
    whole, blocks = step([1, 1, 1])
    assert blocks == 2 * 8
    np.testing.assert_array_equal(every, whole)
    np.testing.assert_array_equal(living[:, [0, 2]], whole[:, [0, 2]])


def test_a_plan_counts_the_blocks_that_windows_touch():
    config = PlanConfig(model="qwen3-0.6b", topology="gpu:H100x8", max_prompt_length=300, max_completion_length=200)
    for window in (None, 64, 200, 4096):
        read = [
            len({column // 128 for column in range(max(0, filled - (window or filled)), filled)})
            for filled in range(300, 500)
        ]
        assert blocks_read(config, window) == pytest.approx(np.mean(read), rel=1e-12)
