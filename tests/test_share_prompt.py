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
from jaxrl_lm.layout import Cut, check_layout, layout_metrics, pack_rows, with_layout
from jaxrl_lm.models import build
from jaxrl_lm.models.decoder import visible
from jaxrl_lm.rows import in_parts, out_of_parts, score_rows
from jaxrl_lm.score import by_columns, score, score_with_values, values
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.types import Layout
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


def layout_of(group=GROUP, *, pack, parts=1, ways=1, **given):
    return only(
        pack_rows(*rollout(group, **given), start=PROMPT, cuts=[Cut(0, ROWS, parts)], ways=ways, group=group, pack=pack)
    )


# --- what the host makes ------------------------------------------------------------------------------------------------

LAYOUTS = [
    {"group": GROUP, "pack": False},
    {"group": GROUP, "pack": True},
    {"group": 1, "pack": True},
    {"group": 1, "pack": False},
    {"group": 1, "pack": True, "parts": 3, "ways": 4},
    {"group": GROUP, "pack": True, "parts": 2, "ways": 2},
    {"group": GROUP, "pack": False, "parts": 4, "ways": 2},
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
        sees = visible(*map(jnp.asarray, (one.positions, one.segment_ids) * 2), None, jnp.asarray(one.until))
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
    assert len(shapes) <= 4
    alone = {layout_of(pack=False, seed=seed).tokens.shape for seed in range(40)}
    assert len(alone) <= 4
    assert all(rows <= PROMPTS for rows, _ in alone)
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
    with pytest.raises(ValueError, match="row 0 is packed already"):
        pack_rows(tokens, two.astype(np.int32), actions, **given)
    with pytest.raises(
        ValueError, match="24 rows do not divide into 5 microbatches on 1 devices with groups of 3 whole"
    ):
        pack_rows(tokens, segments, actions, start=PROMPT, cuts=[Cut(0, ROWS, 5)], group=GROUP)
    with pytest.raises(TypeError, match="tuple has no rows that are packed"):
        with_layout((), layout_of(pack=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share_prompt": True, "microbatch_completions": 6}, r"share_prompt keeps .* multiple of .* = 12"),
        ({"pack_completions": True, "reference_placement": "rollout_mesh"}, "pack_completions lays rows out"),
        ({"share_prompt": True, "mesh": {"data": 4, "sequence": 2}}, "share_prompt moves tokens .* sequence=2"),
    ],
)
def test_what_packed_rows_do_not_go_with_is_named(changes, message):
    sizes = {"mesh": {"data": 4, "tensor": 2}, "num_generations": 3, "prompts_per_step": 8}
    config = GRPOConfig(**{"model": "m", "dataset": "d", "output_dir": "o"} | sizes | changes)
    plan = Plan(make_mesh(config.mesh))
    with pytest.raises(ValueError, match=message):
        check_layout(config, plan)
    check_layout(dataclasses.replace(config, share_prompt=False, pack_completions=False), plan)


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


def facts(config, tokens, segments, temperature, plan=None, chunk=16):
    """Scores and values, and the gradients of their weighted sum."""
    model = build(config, plan=plan)
    params = host_params(model)
    pulls, actions = PULL, rollout()[2]
    given = jax.tree.map(jnp.asarray, (tokens, segments, temperature))
    if plan is not None:
        params, given = jax.device_put(params, plan.tree(model.specs)), jax.device_put(given, plan.rows)

    def loss(trees, tokens, segments, temperature):
        params, head = trees
        options = {"model": model, "temperature": temperature, "chunk": chunk, "start": PROMPT}
        scores, found = score_with_values(params, head, tokens, segments, **options)
        every = (*scores, found)
        every = tuple(jnp.where(actions, x, 0.0) for x in every)
        return sum(jnp.sum(pull * x) for pull, x in zip(pulls, every, strict=True)), every

    gradient, every = jax.jit(jax.grad(loss, has_aux=True))((params, HEAD), *given)
    return jax.device_get((every, gradient))


def assert_same(found, expected):
    for ours, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)
        assert np.count_nonzero(theirs) == rollout()[2].sum()
    assert_trees_close(found[1], expected[1], 1e-5)


@pytest.fixture(scope="module")
def padded(config):
    return functools.cache(
        lambda window: facts(dataclasses.replace(config, sliding_window=window), *rollout()[:2], TEMPERATURE)
    )


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({"group": GROUP, "pack": False}, None),
        ({"group": GROUP, "pack": True}, 4),
        ({"group": 1, "pack": True}, None),
    ],
    ids=str,
)
def test_scores_values_and_gradients_are_those_of_padded_rows(config, padded, given, window):
    """In the test's rollout a group of 1 is one of 3 whose rows were not told of each other."""
    layout = only(pack_rows(*rollout(), start=PROMPT, cuts=[Cut(0, ROWS, 1)], **given))
    config = dataclasses.replace(config, sliding_window=window)
    assert_same(facts(config, layout, None, TEMPERATURE), padded(window))
