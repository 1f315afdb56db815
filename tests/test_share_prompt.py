"""Packed rows give the numbers of padded ones: what each token sees, scores, values, gradients, runs, on meshes too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from test_sharding import assert_trees_close, host_params

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.distill import token_divergence
from jaxrl_lm.layout import Cut, bucket, check_layout, layout_metrics, pack_rows, with_layout
from jaxrl_lm.models import Model, build, layers
from jaxrl_lm.models.decoder import visible
from jaxrl_lm.rows import implicit_rows, in_parts, out_of_parts, score_rows, value_rows
from jaxrl_lm.score import by_columns, score_with_values
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.types import Rollout
from jaxrl_lm.update import cut

PROMPTS, GROUP, PROMPT, NEW = 8, 3, 6, 7
ROWS, COLUMNS = PROMPTS * GROUP, PROMPT + NEW
RNG = np.random.default_rng(3)
PULL = RNG.normal(size=(3, ROWS, COLUMNS)).astype(np.float32)
HEAD = {"kernel": RNG.normal(size=(32, 1)).astype(np.float32)}
TEMPERATURE = RNG.uniform(0.5, 2.0, ROWS).astype(np.float32)


def rollout(group=GROUP, seed=0):
    """tokens, segments, actions: ragged prompts and completions, rows that ran into their limit, one without a token, one
    whose first token and one whose later ones are not the policy's, and a group without anything."""
    rng = np.random.default_rng(seed)
    prompts = np.repeat(rng.integers(1, PROMPT + 1, ROWS // group), group)
    new = rng.integers(0, NEW + 1, ROWS)
    new[[1, 4]] = NEW
    new[2], new[group : 2 * group] = 0, np.maximum(new[group : 2 * group], 2)
    new[-group:] = 0
    prompts[-group:] = 0
    at = np.arange(COLUMNS)[None]
    real = (at >= PROMPT - prompts[:, None]) & (at < PROMPT + new[:, None])
    tokens = np.where(real, rng.integers(0, 48, (ROWS, COLUMNS)), 0)
    first = tokens[::group, :PROMPT]
    tokens[:, :PROMPT] = np.repeat(first, group, axis=0)
    actions = real & (at >= PROMPT)
    actions[group, PROMPT] = False
    actions[4, PROMPT + 2 : PROMPT + 4] = False
    return tokens.astype(np.int32), real.astype(np.int32), actions


def only(layouts):
    (layout,) = layouts
    return layout


def layout_of(group=GROUP, *, parts=1, ways=1, seed=0, **given):
    cuts = [Cut(0, ROWS, parts)]
    return only(pack_rows(*rollout(group, seed), start=PROMPT, cuts=cuts, ways=ways, group=group, **given))


# --- what the host makes ------------------------------------------------------------------------------------------------

LAYOUTS = [
    {"group": GROUP, "pack": False},
    {"group": GROUP, "pack": True},
    {"group": 1, "pack": True},
    {"group": 1, "pack": False},
    {"group": 1, "pack": True, "parts": 3, "ways": 4},
    {"group": GROUP, "pack": True, "parts": 2, "ways": 2},
    {"group": GROUP, "pack": False, "parts": 4, "ways": 2, "block": 2},
    {"group": GROUP, "pack": True, "block": 2},
]


@pytest.mark.parametrize("given", LAYOUTS, ids=str)
def test_the_state_before_each_action_has_read_its_row_and_nothing_else(given):
    """By loops over what the rule of attention lets it see."""
    parts, ways, group = given.get("parts", 1), given.get("ways", 1), given["group"]
    layout, (tokens, segments, actions) = layout_of(**given), rollout(group)
    order = in_parts(np.arange(ROWS), parts, group)
    found = np.zeros_like(actions)
    for part in range(parts):  # as `cut` and the devices take them
        one, rows = cut(layout, parts), cut(order, parts)[part]
        one = jax.tree.map(lambda x, part=part: x[part], one)
        until = None if one.until is None else jnp.asarray(one.until)
        sees = visible(*map(jnp.asarray, (one.positions, one.segment_ids) * 2), None, until)
        sees, width = np.asarray(sees), one.tokens.shape[1]
        height = len(one.tokens) // ways  # packed rows of a cell
        for place, row in enumerate(rows):
            cell, own = divmod(place, len(rows) // ways)
            for column in np.flatnonzero(one.places[place] >= 0):
                target = one.places[place, column]
                assert one.targets[cell, target] == tokens[row, column]
                assert one.rows[cell, target] == own
                at, state = divmod(int(one.before[cell, target]), width)
                seen = np.flatnonzero(sees[cell * height + at, state])
                seen = seen[np.argsort(one.positions[cell * height + at, seen], kind="stable")]
                if one.reads is not None:
                    block = width // one.reads.shape[1]
                    assert set(seen // block) <= set(one.reads[cell * height + at, state // block])
                expected = tokens[row, :column][segments[row, :column] > 0]
                np.testing.assert_array_equal(one.tokens[cell * height + at, seen], expected)
                np.testing.assert_array_equal(one.positions[cell * height + at, seen], np.arange(len(expected)))
                found[row, column] = True
    np.testing.assert_array_equal(found, actions)
    assert (layout.before >= 0).sum() == actions.sum()  # each once


def test_a_prompt_is_computed_once_for_its_group():
    segments = rollout()[1]
    prompt, new = (segments[:, :PROMPT] > 0).sum(), (segments[:, PROMPT:] > 0).sum()
    for pack in (False, True):
        assert (layout_of(pack=pack).segment_ids > 0).sum() == prompt / GROUP + new
    assert (layout_of(1, pack=True).segment_ids > 0).sum() == (rollout(1)[1] > 0).sum()
    metrics = layout_metrics([layout_of(pack=True)])
    columns = layout_of(pack=True).tokens.size
    assert metrics == {
        "packing/columns": columns,
        "packing/padded_columns": ROWS * COLUMNS,
        "packing/filled_share": (prompt / GROUP + new) / columns,
    }
    assert columns < ROWS * COLUMNS / 2


def test_rows_and_widths_come_in_few_sizes():
    """Of 40 rollouts, and every minibatch of one has the shape of the others."""
    shapes = {layout_of(pack=True, seed=seed).tokens.shape for seed in range(40)}
    assert {width for _, width in shapes} <= {16, 24, 27}  # 27: three completions of 7 after 6
    assert {rows for rows, _ in shapes} <= {3, 4, 5, 6, 7}
    alone = {layout_of(pack=False, seed=seed).tokens.shape for seed in range(40)}
    assert {rows for rows, _ in alone} == {PROMPTS}
    assert {width for _, width in alone} <= {14, 15, 16, 18, 20, 22, 24, 26, 27}
    cuts = [Cut(0, 6, 1), Cut(6, 18, 3), Cut(0, ROWS, 4)]
    several = pack_rows(*rollout(), start=PROMPT, cuts=cuts, group=GROUP, pack=True)
    assert [one.tokens.shape[0] // cut.parts for one, cut in zip(several, cuts, strict=True)] == [2, 2, 2]


def test_what_cannot_be_laid_out_is_refused():
    tokens, segments, actions = rollout()
    other = tokens.copy()
    other[4, PROMPT - 1] += 1
    given = {"start": PROMPT, "cuts": [Cut(0, ROWS, 1)]}
    with pytest.raises(ValueError, match="share_prompt: rows 3 and 4 are of one group and have different prompts"):
        pack_rows(other, segments, actions, group=GROUP, **given)
    two = segments + (np.arange(COLUMNS) > PROMPT) * (segments > 0)
    with pytest.raises(ValueError, match="row 1 is packed already: it has several segments"):
        pack_rows(tokens, two.astype(np.int32), actions, **given)
    with pytest.raises(
        ValueError, match="24 rows do not divide into 5 microbatches on 1 devices with whole groups of 3"
    ):
        pack_rows(tokens, segments, actions, start=PROMPT, cuts=[Cut(0, ROWS, 5)], group=GROUP)
    with pytest.raises(TypeError, match="tuple has no rows that are packed"):
        with_layout((), layout_of(pack=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share_prompt": True, "microbatch_completions": 6}, r"share_prompt keeps .* multiple of .* = 12"),
        ({"share_prompt": True, "num_generations": 1}, "share_prompt with num_generations=1"),
        ({"pack_completions": True, "reference_placement": "rollout_mesh"}, "pack_completions lays rows out"),
        ({"share_prompt": True, "mesh": {"data": 4, "sequence": 2}}, "share_prompt moves tokens .* sequence=2"),
        (
            {"share_prompt": True, "attention_implementation": "reference"},
            "share_prompt with attention_implementation='reference'.*take auto or xla",
        ),
        (
            {"pack_completions": True, "attention_implementation": "splash"},
            "pack_completions with attention_implementation='splash'.*take auto or xla",
        ),
    ],
)
def test_what_packed_rows_do_not_go_with_is_named(changes, message):
    sizes = {"mesh": {"data": 4, "tensor": 2}, "num_generations": 3, "prompts_per_step": 8}
    config = GRPOConfig(**{"model": "m", "dataset": "d", "output_dir": "o"} | sizes | changes)
    plan = Plan(make_mesh(config.mesh))
    with pytest.raises(ValueError, match=message):
        check_layout(config, plan)
    check_layout(dataclasses.replace(config, share_prompt=False, pack_completions=False), plan)


@pytest.mark.parametrize("steps", [2, 8])
def test_a_bucket_is_at_most_so_much_too_large(steps):
    sizes = np.arange(1, 5000)
    found = np.array([bucket(int(size), most=4500, steps=steps) for size in sizes])
    capped = np.minimum(sizes, 4500)
    assert (found >= capped).all()
    assert (found <= capped * (1 + 1 / steps)).all()
    assert len(set(found[512:1023])) == steps
    assert bucket(0, most=7) == 1


@pytest.mark.parametrize(("parts", "together"), [(1, 3), (4, 1), (4, 3), (2, 6)])
def test_groups_are_whole_in_their_microbatch_and_come_back_in_order(parts, together):
    rows = np.arange(ROWS)
    ordered = in_parts(rows, parts, together)
    np.testing.assert_array_equal(out_of_parts(ordered, parts, together), rows)
    for part in cut(ordered, parts):
        np.testing.assert_array_equal(part % together, np.tile(np.arange(together), len(part) // together))
        assert (np.diff(part.reshape(-1, together), axis=1) == 1).all()


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tiny_config):
    return dataclasses.replace(tiny_config, num_layers=2)


@pytest.fixture(scope="module")
def facts(config):
    """(rows, window, pulls) -> scores and values of the actions, and the gradients of their sum weighted by the pulls."""

    def loss(trees, tokens, segments, pulls, actions, model):
        options = {"model": model, "temperature": jnp.asarray(TEMPERATURE), "chunk": 16, "start": PROMPT}
        scores, found = score_with_values(*trees, tokens, segments, **options)
        every = tuple(jnp.where(actions, x, 0.0) for x in (*scores, found))
        return sum(jnp.sum(pull * x) for pull, x in zip(pulls, every, strict=True)), every

    run = jax.jit(jax.grad(loss, has_aux=True), static_argnums=5)

    def call(rows, window, pulls=PULL):
        model = build(dataclasses.replace(config, sliding_window=window))
        gradient, every = run((host_params(model), HEAD), *rows, pulls, rollout()[2], model)
        return jax.device_get((every, gradient))

    return call


@pytest.fixture(scope="module")
def padded(facts):
    return functools.cache(lambda window: facts(rollout()[:2], window))


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({"group": GROUP, "pack": False, "block": 2}, 4),
        ({"group": GROUP, "pack": True}, None),
        ({"group": 1, "pack": True}, None),
    ],
    ids=str,
)
def test_scores_values_and_gradients_are_those_of_padded_rows(facts, padded, given, window):
    """The rows of a group know nothing of each other where it is laid out as groups of 1."""
    layout = only(pack_rows(*rollout(), start=PROMPT, cuts=[Cut(0, ROWS, 1)], **given))
    assert (layout.reads is not None) == ("block" in given)
    found, expected = facts((layout, None), window), padded(window)
    for ours, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
        assert np.count_nonzero(theirs) == rollout()[2].sum()
    assert_trees_close(found[1], expected[1], 1e-5)


def test_microbatches_on_a_mesh_give_the_scores_and_gradients_of_one_device(config, facts):
    """Groups stay on their device and in their microbatch; temperatures and results go with them."""
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    model = build(config, plan=plan)
    layout = layout_of(pack=True, parts=2, ways=4, block=2)
    assert layout.reads is not None
    params = jax.device_put(host_params(model), plan.tree(model.specs))

    def loss(params, *given):
        options = {"model": model, "lora": None, "chunk": 16, "size": ROWS // 2, "together": GROUP}
        scores = score_rows(params, None, *given, PROMPT, **options)
        return sum(jnp.sum(pull * x) for pull, x in zip(PULL, scores, strict=False)), scores

    given = jax.device_put((layout, None, TEMPERATURE), plan.rows)
    gradient, scores = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(params, *given))
    expected = facts(rollout()[:2], None, PULL * np.array([1, 1, 0], np.float32)[:, None, None])
    for ours, theirs in zip(scores, expected[0], strict=False):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
    assert_trees_close(gradient, expected[1][0], 1e-5)


@pytest.mark.parametrize(
    ("prompt", "new", "width", "blocks"),
    [(39, 46, 416, False), (39, 120, 1024, True), (900, 20, 1092, False), (900, 140, 2048, True)],
)
def test_blocks_of_attention_lengthen_a_row_by_an_eighth_at_most(prompt, new, width, blocks):
    """A group of 8 on one prompt, of `new` tokens each where 4 more could be: 407 take 416 columns, not four blocks."""
    ids = np.random.default_rng(0).integers(10, 48, (8, prompt + new + 4)).astype(np.int32)
    ids[:, :prompt] = ids[0, :prompt]
    real = np.broadcast_to(np.arange(ids.shape[1]) < prompt + new, ids.shape)
    chosen = real & (np.arange(ids.shape[1]) >= prompt)
    given = {"start": prompt, "cuts": [Cut(0, 8, 1)], "group": 8, "pack": False}
    layout = only(pack_rows(ids, real.astype(np.int32), chosen, **given))
    assert (layout.tokens.shape, layout.reads is not None) == ((1, width), blocks)


@pytest.mark.parametrize("pairs", [1 << 22, 1, 60])  # all blocks at once, each alone, two
def test_attention_by_blocks_is_attention(monkeypatch, pairs):
    monkeypatch.setattr(layers, "PAIRS", pairs)
    layout = layout_of(pack=True, block=2)
    rows, columns = layout.tokens.shape
    rng = np.random.default_rng(1)
    q = rng.normal(size=(rows, columns, 4, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, rows, 2, columns, 8)).astype(np.float32)
    facts = tuple(map(jnp.asarray, (layout.positions, layout.segment_ids)))
    until, reads = jnp.asarray(layout.until), jnp.asarray(layout.reads)
    real = layout.segment_ids[..., None] > 0

    def blocks(*qkv):
        sees = lambda *given: visible(*given[:4], 5, given[4])
        return jnp.where(real, layers.block_attention(sees, facts, (*facts, until), reads)(*qkv), 0.0)

    whole = lambda *qkv: jnp.where(real, layers.attend(*qkv, visible(*facts, *facts, 5, until)), 0.0)
    of = lambda attention: jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(attention(*qkv))), argnums=(0, 1, 2))
    ours, theirs = (jax.jit(of(one))(*map(jnp.asarray, (q, k, v))) for one in (blocks, whole))
    assert_trees_close(ours, theirs, 1e-5)


class HeadOnly(Model):
    """The model without its layers: what packing adds to it compiles fast."""

    def hidden(self, params, tokens, positions, segment_ids, until=None, reads=None):
        return params["embed"]["table"][tokens]


def test_scoring_compiles_once_a_shape(config):
    """Nothing but the shape is static; and so many tokens to score make no other program."""
    model = HeadOnly(dataclasses.replace(config, tie_embeddings=True))
    params = jax.tree.map(jnp.asarray, host_params(model))
    run = jax.jit(lambda *given: score_rows(params, None, *given, PROMPT, model=model, lora=None, chunk=16, size=ROWS))
    layouts = [layout_of(pack=False, seed=seed) for seed in range(20)]
    counts = {(layout.before >= 0).sum() for layout in layouts}
    for layout in layouts:
        run(jax.tree.map(jnp.asarray, layout), None, jnp.asarray(TEMPERATURE))
    assert run._cache_size() == len({layout.tokens.shape for layout in layouts}) < len(counts)


def test_critics_process_models_and_teachers_read_packed_rows_too(config):
    """Values, an implicit process reward model's rewards, a distance from a teacher: of what the rows are, as padded."""
    model = HeadOnly(config)
    params = jax.tree.map(jnp.asarray, host_params(model))
    other = jax.tree.map(lambda x: x + 0.1, params)
    tokens, segments, actions = map(jnp.asarray, rollout())
    layout = jax.tree.map(jnp.asarray, layout_of(pack=True, parts=2))
    how = {"model": model, "size": ROWS // 2, "together": GROUP}

    @jax.jit
    def everything(tokens, segments):
        critic = {"critic": {"head": HEAD, "trunk": {name: x for name, x in params.items() if name != "lm_head"}}}
        given = Rollout(tokens, segments, actions, *[None] * 5)
        return (
            value_rows(critic, None, tokens, segments, PROMPT, lora=None, shared=False, **how),
            value_rows({"policy": params, **critic}, None, tokens, segments, PROMPT, lora=None, shared=True, **how),
            *implicit_rows(params, other, given, PROMPT, beta=0.1, chunk=16, **how),
        )

    apart = jax.jit(
        lambda *rows: token_divergence(params, other, *rows, model=model, teacher_model=model, chunk=16, start=PROMPT)
    )
    whole = jax.tree.map(jnp.asarray, layout_of(pack=True))
    pairs = [
        (everything(layout, None), everything(tokens, segments)),
        ((apart(whole, None),), (apart(tokens, segments),)),
    ]
    for ours, theirs in (pair for packed, padded in pairs for pair in zip(packed, padded, strict=True)):
        expected = np.where(actions, theirs, 0.0)
        np.testing.assert_allclose(np.where(actions, ours, 0.0), expected, atol=1e-5 * np.abs(expected).max())
        assert np.count_nonzero(expected) == actions.sum()


def test_long_groups_attend_to_a_part_of_their_row():
    """A prompt of 500 tokens is 4 blocks of 128, and where two completions of 200 meet both have 3 at most."""
    segments = np.zeros((16, 712), np.int32)
    segments[:, 12:] = 1
    tokens, actions = np.ones_like(segments), np.broadcast_to(np.arange(712) >= 512, segments.shape)
    (layout,) = pack_rows(tokens, segments, actions, start=512, cuts=[Cut(0, 16, 1)], group=16, pack=False)
    assert layout.tokens.shape == (1, 29 * 128)
    assert layout.reads.shape == (1, 29, 8)


def test_chunks_without_a_token_are_not_computed_and_give_zeros():
    real = np.zeros((2, 10), bool)
    real[1, 2] = real[0, 7] = True
    x = np.where(real, 3.0, np.nan).astype(np.float32)
    run = jax.jit(lambda x, real: by_columns(lambda x: 2 * x, x, chunk=4, real=real))
    out = np.asarray(run(x, real))
    np.testing.assert_array_equal(out[real], 6.0)
    assert np.isnan(out[:, [3, 6]]).all()  # beside a token in its chunk: computed
    assert (out[:, [0, 1, 4, 5, 8, 9]] == 0).all()


# --- whole runs ---------------------------------------------------------------------------------------------------------

MESH = {"mesh": {"data": 4, "tensor": 2}, "prompts_per_step": 16, "num_generations": 2}
BATCH = {"minibatch_completions": 32, "microbatch_completions": 16}
SHORT = {"max_steps": 2, "eval_steps": 0, "probe_prompts": 0, "save_steps": 0, "completions_steps": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory, cached):
    """(what differs) -> metrics of a run's steps: two updates a step from scored rows, in two microbatches, and a KL."""
    directory = tmp_path_factory.mktemp("runs")
    model, data = tiny_run.save_model(directory / "model"), tiny_run.write_data(directory)

    @functools.cache
    def make(*changes):
        options = tiny_run.options(
            model, data, directory / str(changes), **MESH, **BATCH, **SHORT, eval_dataset={}
        ) | dict(changes)
        return tiny_run.run(options)[0].metrics

    return make


@pytest.mark.parametrize("changes", [(("share_prompt", True), ("pack_completions", True))], ids=str)
def test_a_run_with_packed_rows_has_the_metrics_of_one_without(run, changes):
    packed, plain = run(*changes), run()
    assert len(packed) == len(plain) == 2
    for ours, theirs in zip(packed, plain, strict=True):
        names = [name for name in theirs if not name.startswith(("time/", "tokens_per_second/", "step_time"))]
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5, nan_ok=True), name
        assert ours["packing/columns"] < ours["packing/padded_columns"]
        assert ours["loss"] != 0
