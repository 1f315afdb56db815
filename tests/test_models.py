"""The decoder against itself: every way to compute the same hidden states gives the same hidden states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxrl_lm.models import ModelConfig, build, decode_specs, extend, fuse_layers, positions, prefill
from jaxrl_lm.models.decoder import visible

COLUMNS = 10
# Rows as an SFT batch or a rollout has them: whole, left-padded, right-padded, both, packed, nothing but padding.
SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 2, 2, 2, 3, 3, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ],
    np.int32,
)
TOKENS = np.random.default_rng(0).integers(0, 48, SEGMENTS.shape).astype(np.int32)


def inputs():
    """tokens, positions, segment_ids of the six rows, as the model takes them."""
    segments = jnp.asarray(SEGMENTS)
    return jnp.asarray(TOKENS), positions(segments), segments


def is_spec(leaf):
    return hasattr(leaf, "axes")


def random_params(model, seed=0):
    """Weights that all count: biases are not 0 and norms not 1. From numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    mean, std = {"normal": 0.0, "ones": 1.0, "zeros": 0.0}, {"normal": 0.3, "ones": 0.2, "zeros": 0.2}
    one = lambda spec: jnp.asarray(rng.normal(mean[spec.init], std[spec.init], spec.shape), jnp.float32)
    return jax.tree.map(one, model.specs, is_leaf=is_spec)


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(tiny_config)


@pytest.fixture(scope="module")
def params(model):
    return random_params(model)


@pytest.fixture(scope="module")
def run(model, params):
    """run(tokens, segment_ids) -> hidden; one compilation a shape."""
    compiled = jax.jit(lambda tokens, segments: model.hidden(params, tokens, positions(segments), segments))
    return lambda tokens, segments: np.asarray(compiled(np.asarray(tokens, np.int32), np.asarray(segments, np.int32)))


@pytest.fixture(scope="module")
def full(run):
    return run(TOKENS, SEGMENTS)


# --- positions and masks ----------------------------------------------------------------------------------------------


def test_positions_count_within_each_segment():
    segments = np.array([[0, 0, 1, 1, 1, 0], [1, 1, 2, 2, 2, 0], [3, 3, 3, 1, 1, 1], [0, 0, 0, 0, 0, 0]], np.int32)
    expected = [[0, 0, 0, 1, 2, 0], [0, 1, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2], [0, 0, 0, 0, 0, 0]]
    result = positions(jnp.asarray(segments))
    assert result.dtype == jnp.int32
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_token_sees_its_segment_up_to_itself_within_the_window(window):
    _, places, segments = inputs()
    seen = np.asarray(visible(places, segments, places, segments, window))
    for n in range(len(SEGMENTS)):
        for t in range(COLUMNS):
            for s in range(COLUMNS):
                expected = (
                    SEGMENTS[n, t] > 0
                    and SEGMENTS[n, t] == SEGMENTS[n, s]
                    and s <= t
                    and (window is None or t - s < window)
                )
                assert bool(seen[n, t, s]) == expected, (n, t, s)


def test_later_tokens_and_other_segments_change_nothing(run, full):
    changed = TOKENS.copy()
    changed[0, 6:] = (changed[0, 6:] + 7) % 48
    changed[4, :4] = (changed[4, :4] + 7) % 48
    hidden = run(changed, SEGMENTS)
    np.testing.assert_array_equal(hidden[0, :6], full[0, :6])
    np.testing.assert_array_equal(hidden[4, 4:9], full[4, 4:9])
    assert (np.abs(hidden[0, 6:] - full[0, 6:]).max(-1) > 1e-2).all()


def test_earlier_tokens_of_the_segment_count(run, full):
    changed = TOKENS.copy()
    changed[0, 0] = (changed[0, 0] + 7) % 48
    assert (np.abs(run(changed, SEGMENTS)[0] - full[0]).max(-1) > 1e-3).all()


@pytest.mark.parametrize("window", [1, 3])
def test_a_sliding_window_hides_what_lies_before_it(tiny_config, window):
    one_layer = build(dataclasses.replace(tiny_config, num_layers=1, sliding_window=window))
    params = random_params(one_layer)
    segments = jnp.ones((COLUMNS, COLUMNS), jnp.int32)
    tokens = np.repeat(TOKENS[:1], COLUMNS, axis=0)
    base = jax.jit(lambda t: one_layer.hidden(params, t, positions(segments), segments))
    changed = tokens.copy()
    changed[np.arange(COLUMNS), np.arange(COLUMNS)] = (tokens[0] + 7) % 48  # row n has another token in column n
    moved = np.abs(np.asarray(base(changed)) - np.asarray(base(tokens))).max(-1)
    gap = np.arange(COLUMNS)[None] - np.arange(COLUMNS)[:, None]  # column − changed column
    inside = (gap >= 0) & (gap < window)
    assert (moved[inside] > 1e-4).all()
    assert (moved[~inside] == 0).all()


# --- padding and packing ----------------------------------------------------------------------------------------------


def test_left_and_right_padding_change_nothing(run, full):
    # The same tokens whole, one segment a row, moved to the first column.
    tokens, segments = np.zeros_like(TOKENS), np.zeros_like(SEGMENTS)
    for n in (1, 2, 3):
        inside = SEGMENTS[n] > 0
        tokens[n, : inside.sum()], segments[n, : inside.sum()] = TOKENS[n, inside], 1
    moved = run(tokens, segments)
    for n in (1, 2, 3):
        inside = SEGMENTS[n] > 0
        np.testing.assert_allclose(moved[n, : inside.sum()], full[n, inside], atol=2e-6)


def test_the_ids_in_padding_do_not_matter(run, full):
    hidden = run(np.where(SEGMENTS > 0, TOKENS, (TOKENS + 13) % 48), SEGMENTS)
    np.testing.assert_array_equal(hidden[SEGMENTS > 0], full[SEGMENTS > 0])


def test_packed_segments_equal_separate_rows(run, full):
    tokens, segments = np.zeros_like(TOKENS), np.zeros_like(SEGMENTS)
    for segment in (1, 2, 3):
        inside = SEGMENTS[4] == segment
        tokens[segment, : inside.sum()], segments[segment, : inside.sum()] = TOKENS[4, inside], 1
    separate = run(tokens, segments)
    for segment in (1, 2, 3):
        inside = SEGMENTS[4] == segment
        np.testing.assert_allclose(separate[segment, : inside.sum()], full[4, inside], atol=2e-6)


def test_rows_of_padding_are_finite(full):
    assert np.isfinite(full).all()


# --- with a cache, recomputed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_gives_the_full_forward(tiny_config, params, window):
    """Right-padded prompts of several lengths, then 1, 1, 3 and 1 columns at each row's own place."""
    model = build(dataclasses.replace(tiny_config, sliding_window=window))
    weights, lengths = fuse_layers(params, model=model), np.array([4, 1, 3, 2], np.int32)
    tokens = TOKENS[: len(lengths)]
    places = jnp.broadcast_to(jnp.arange(COLUMNS, dtype=jnp.int32), tokens.shape)
    full = np.asarray(jax.jit(model.hidden)(params, tokens, places, jnp.ones_like(tokens)))
    cache = jax.jit(functools.partial(prefill, model=model))(weights, tokens[:, :4], lengths)
    more = lambda x, axis: jnp.pad(x, [(0, COLUMNS - 4 if a == axis else 0) for a in range(4)])
    cache = cache._replace(layers=tuple((more(k, 3), more(v, 2)) for k, v in cache.layers))
    call = jax.jit(functools.partial(extend, model=model))
    for width in (1, 1, 3, 1):
        part = np.stack([row[at : at + width] for row, at in zip(tokens, np.asarray(cache.lengths), strict=True)])
        hidden, longer = call(weights, part, cache)
        for row, at in enumerate(np.asarray(cache.lengths)):
            np.testing.assert_allclose(np.asarray(hidden)[:, row].T, full[row, at : at + width], atol=5e-6)
        cache = longer
    np.testing.assert_array_equal(cache.lengths, lengths + 6)


def test_recomputation_changes_no_gradient(tiny_config, params):
    goal = np.random.default_rng(2).normal(size=(*TOKENS.shape, tiny_config.hidden_size)).astype(np.float32)

    def gradient(remat):
        model = build(dataclasses.replace(tiny_config, remat=remat))
        loss = lambda p: jnp.sum(goal * model.hidden(p, *inputs()) ** 2)
        assert ("remat" in str(jax.make_jaxpr(loss)(params))) == (remat != "none")
        return jax.jit(jax.grad(loss))(params)

    plain = gradient("none")
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(plain))  # the row of padding too
    for remat in ("full", "dots"):
        for ours, theirs in zip(jax.tree.leaves(gradient(remat)), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def products_with_kernels(jaxpr) -> int:
    """Products of a matrix [rows, inputs] with a kernel, counted through scans and recomputation."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left, right = (variable.aval.ndim for variable in equation.invars)
            count += (left, right) == (2, 2)
        for inner in jaxprs_in_params(equation.params):
            count += products_with_kernels(inner)
    return count


def test_dots_recomputes_no_product_with_a_kernel_and_full_all_but_the_last(tiny_config):
    def count(remat):
        model = build(dataclasses.replace(tiny_config, remat=remat))
        loss = lambda params: jnp.sum(model.hidden(params, *inputs()))
        return products_with_kernels(jax.make_jaxpr(jax.grad(loss))(random_params(model)).jaxpr)

    # q, k, v, o, gate, up, down, forward and two of the gradient each; the last one's result no gradient reads.
    assert count("none") == count("dots") == 3 * 7
    assert count("full") == 3 * 7 + 6


def test_bfloat16_computes_in_bfloat16_and_gives_float32_logits(tiny_config, model, params, full):
    half = build(dataclasses.replace(tiny_config, dtype="bfloat16"))

    @jax.jit
    def both(params):
        hidden = half.hidden(params, *inputs())
        return hidden, half.unembed(params, hidden), model.unembed(params, jnp.asarray(full))

    hidden, logits, exact = both(params)
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == exact.dtype == jnp.float32
    inside = SEGMENTS > 0
    spread = np.asarray(exact)[inside].std()
    error = np.abs(np.asarray(logits) - np.asarray(exact))[inside] / spread
    # bfloat16 keeps 8 bits (0.4 %); the errors of three layers with these large weights add up to a few times that.
    assert error.mean() < 0.03
    assert error.max() < 0.25


# --- the declaration --------------------------------------------------------------------------------------------------


def test_parameters_have_the_declared_shapes(tiny_config, model, params):
    shapes = lambda tree: jax.tree.map(lambda leaf: tuple(leaf.shape), tree, is_leaf=is_spec)
    assert shapes(model.specs) == shapes(params)
    assert shapes(decode_specs(tiny_config)) == shapes(fuse_layers(params, model=model))
    for spec in jax.tree.leaves(model.specs, is_leaf=is_spec):
        assert len(spec.axes) == len(spec.shape)
    assert model.specs["layers"]["attn"]["k_proj"]["kernel"].shape == (3, 32, 16)
    assert model.specs["layers"]["attn"]["k_proj"]["kernel"].axes == ("layers", "embed", "kv_heads")


def test_the_tree_holds_exactly_what_the_config_asks_for():
    config = ModelConfig(
        vocab_size=8, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2
    )
    names = lambda **options: {
        ".".join(part.key for part in path)
        for path, _ in jax.tree.leaves_with_path(build(dataclasses.replace(config, **options)).specs, is_leaf=is_spec)
    }
    attn, mlp = "layers.attn", "layers.mlp"
    bare = {"embed.table", "lm_head.table", "final_norm.scale", "layers.input_norm.scale", "layers.post_norm.scale"}
    bare |= {f"{attn}.{part}_proj.kernel" for part in "qkvo"} | {
        f"{mlp}.{part}_proj.kernel" for part in ("gate", "up", "down")
    }
    assert names() == bare
    assert names(tie_embeddings=True) == bare - {"lm_head.table"}
    assert names(qkv_bias=True) == bare | {f"{attn}.{part}_proj.bias" for part in "qkv"}
    assert names(output_bias=True) == bare | {f"{attn}.o_proj.bias"}
    assert names(mlp_bias=True) == bare | {f"{mlp}.{part}_proj.bias" for part in ("gate", "up", "down")}
    assert names(qk_norm=True) == bare | {f"{attn}.q_norm.scale", f"{attn}.k_norm.scale"}


def test_initial_values(tiny_config, model):
    draw = jax.jit(model.init)
    first, second, other = (draw(jax.random.key(seed)) for seed in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    half = jax.eval_shape(lambda key: model.init(key, "bfloat16"), jax.random.key(3))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    kernels = [leaf for path, leaf in jax.tree.leaves_with_path(first) if path[-1].key in ("kernel", "table")]
    assert len({float(leaf.ravel()[0]) for leaf in kernels}) == len(kernels) == 9  # each path its own numbers
    for leaf in kernels:
        assert float(leaf.std()) == pytest.approx(tiny_config.initializer_range, rel=0.1)
        assert abs(float(leaf.mean())) < 0.05
    gate = first["layers"]["mlp"]["gate_proj"]["kernel"]
    assert float(jnp.abs(gate[0] - gate[1]).max()) > 0.1  # each layer its own
    assert float(jnp.abs(gate - other["layers"]["mlp"]["gate_proj"]["kernel"]).max()) > 0.1
    attn = first["layers"]["attn"]
    assert (np.asarray(attn["q_norm"]["scale"]) == 1).all()
    assert (np.asarray(attn["q_proj"]["bias"]) == 0).all()


def test_tied_embeddings_read_the_table_backwards(tiny_config):
    tied = build(dataclasses.replace(tiny_config, tie_embeddings=True))
    table = np.random.default_rng(5).normal(size=(48, 32)).astype(np.float32)
    hidden = np.random.default_rng(6).normal(size=(2, 3, 32)).astype(np.float32)
    logits = tied.unembed(
        {"embed": {"table": table}, "final_norm": {"scale": np.ones(32, np.float32)}}, jnp.asarray(hidden)
    )
    np.testing.assert_allclose(logits, hidden @ table.T, atol=1e-4)


def test_equal_configs_are_one_model_for_the_compiler(tiny_config):
    same = build(dataclasses.replace(tiny_config))
    assert same == build(tiny_config)
    assert hash(same) == hash(build(tiny_config))
    assert same != build(dataclasses.replace(tiny_config, remat="full"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"remat": "half"}, "remat='half' is unknown: use none, full, dots or offload"),
    ],
)
def test_impossible_configs_are_refused(tiny_config, options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_config, **options)
