"""Where the compiled steps put things, read from the programs themselves: layouts in and out, and what crosses devices."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from test_sharding import host_params

from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.credit import CreditRule
from jaxrl_lm.models import ModelConfig, build, decode_specs
from jaxrl_lm.objectives import PolicyObjective
from jaxrl_lm.optim import make_optimizer
from jaxrl_lm.plan_config import PlanConfig
from jaxrl_lm.plan_steps import trace_steps
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import by_columns, token_scores
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.steps import compile_steps
from jaxrl_lm.types import Frozen, Requests, Scores

MESH = {"fsdp": 2, "sequence": 2, "tensor": 2}
ROWS, PROMPT, NEW = 8, 6, 10
VOCAB = 88  # no other size of a program has the prime 11 in it


@pytest.fixture(scope="module")
def config(tiny_config):
    return dataclasses.replace(tiny_config, num_layers=2, vocab_size=VOCAB, remat="full", tie_embeddings=False)


@pytest.fixture(scope="module")
def plan():
    return Plan(make_mesh(MESH))


def collectives(text, kinds="all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"):
    """(kind, shapes of the results, name of the JAX operation) of each collective of a compiled program."""
    found = []
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if match:
            shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", match[1])]
            name = re.search(r'op_name="([^"]*)"', line)
            found.append((match[2], shapes, name[1] if name else ""))
    return found


def vocabulary_gathers(text):
    return [one for one in collectives(text, "all-gather") if any(n % 11 == 0 for shape in one[1] for n in shape)]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The record of steps, and the compiled ones."""

    steps: object
    generate: object
    score: object
    update: object
    batch: object  # shapes


@pytest.fixture(scope="module")
def programs(config, plan):
    model = build(config, plan=plan)
    options = {"max_grad_norm": 1.0, "weight_decay": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-3}
    steps = compile_steps(
        model,
        plan,
        objective=PolicyObjective(completion_columns=NEW, score_chunk=32),
        tx=make_optimizer(optax.constant_schedule(1e-3), **options),
        rows=ROWS,
        credit=CreditRule(advantage="constant", group_size=1),
        sampling=SamplingConfig(max_new_tokens=NEW, eos_token_ids=(3,), pad_token_id=0),
        score_chunk=32,
    )
    state = steps.abstract_state
    shape = lambda *size, dtype=jnp.float32: jax.ShapeDtypeStruct(size, dtype)
    weights = jax.eval_shape(steps.prepare_decode, state.params["policy"], None)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
    ints = lambda *size: shape(*size, dtype=jnp.int32)
    requests = Requests(ints(4, PROMPT), ints(4, PROMPT), keys, ints(ROWS), shape(ROWS), ints())
    rollout = jax.eval_shape(steps.generate, weights, requests, None)
    credit = jax.eval_shape(
        steps.credit, shape(ROWS), shape(ROWS, dtype=bool), rollout, None, None, shape(), None, None
    )
    rated = Rated(rollout, shape(ROWS), credit, Scores(rollout.logprobs, rollout.logprobs), None, None)
    given = (rated, Coefficients(shape(), shape(), shape()), state.key, ints(), ints(ROWS))
    batch = jax.eval_shape(lambda *args: steps.minibatch(*args, BatchRule(keep_old=True)), *given)
    policy = state.params["policy"]
    scored = (policy, None, rollout.tokens, rollout.segment_ids, shape(ROWS), PROMPT)
    return Programs(
        steps=steps,
        generate=steps.generate.lower(weights, requests, None).compile(),
        score=steps.score.lower(*scored).compile(),
        update=steps.update.lower(state, Frozen(), batch).compile(),
        batch=batch,
    )


def layouts_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def assert_laid_out(found, expected, shapes):
    same = lambda path, shape, a, b: (
        None if a.is_equivalent_to(b, len(shape.shape)) else f"{path}: {a.spec}, not {b.spec}"
    )
    wrong = jax.tree.leaves(jax.tree_util.tree_map_with_path(same, shapes, found, expected))
    assert not wrong, "\n".join(wrong)


def test_weights_and_optimiser_state_come_and_go_as_planned(programs, plan, config):
    state = programs.steps.abstract_state
    (given, _, batch), _ = programs.update.input_shardings
    assert_laid_out(given, layouts_of(state), state)
    assert_laid_out(given.params["policy"], plan.tree(build(config).specs), state.params["policy"])
    out, metrics = programs.update.output_shardings
    assert_laid_out(out, layouts_of(state), state)  # what replaces an input lies as it did
    assert all(layout.is_fully_replicated for layout in jax.tree.leaves(metrics))
    assert all(layout.spec == P("fsdp") for layout in jax.tree.leaves(batch))


def test_no_matrix_stands_whole_on_every_device(programs):
    state = programs.steps.abstract_state
    out, _ = programs.update.output_shardings
    kept = jax.tree.leaves((out.params, optax.tree.get(out.opt_state, "mu"), optax.tree.get(out.opt_state, "nu")))
    leaves = jax.tree.leaves((state.params,) * 3)
    parts = [math.prod(layout.shard_shape(x.shape)) / x.size for x, layout in zip(leaves, kept, strict=True)]
    names = [path for path, _ in jax.tree_util.tree_leaves_with_path((state.params,) * 3)]
    for path, part in zip(names, parts, strict=True):
        assert part == (1 / 8 if path[-1].key in ("kernel", "table") else part), path
    assert sum(part == 1 / 8 for part in parts) == 3 * 9


def test_scores_come_out_by_rows(programs):
    (policy, *rows), _ = programs.score.input_shardings
    expected = programs.steps.abstract_state.params["policy"]
    assert_laid_out(policy, layouts_of(expected), expected)
    assert all(layout.spec == P("fsdp") for layout in jax.tree.leaves((rows, programs.score.output_shardings)))


def test_generation_reads_weights_laid_out_for_it(programs, plan, config):
    (weights, *_), _ = programs.generate.input_shardings
    expected = plan.for_decode().tree(decode_specs(config))
    assert_laid_out(weights, expected, decode_shapes(config))
    assert weights["layers"][0]["gate_up"]["kernel"].spec == P(None, "tensor", None)
    assert all(layout.spec == P("fsdp") for layout in jax.tree.leaves(programs.generate.output_shardings))


def decode_shapes(config):
    is_spec = lambda leaf: hasattr(leaf, "axes")
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), decode_specs(config), is_leaf=is_spec
    )


def test_no_weight_crosses_devices_while_decoding(programs, config):
    """In the loop only what is of a token and a row does: nothing as large as the smallest part of a matrix."""
    inside = [one for one in collectives(programs.generate.as_text()) if "while/body" in one[2]]
    assert inside  # sums over tensor
    leaves = jax.tree.leaves_with_path(decode_shapes(config))
    smallest = min(math.prod(x.shape) for path, x in leaves if path[-1].key in ("kernel", "table")) // 2
    assert max(math.prod(shape) for _, shapes, _ in inside for shape in shapes) < smallest


def test_rows_of_generation_take_the_axis_sequence_too(programs, config, plan):
    """A device's keys and values are those of its own rows."""
    caches = re.findall(rf"f32\[(\d+),1,{PROMPT + NEW},8\]", programs.generate.as_text())  # rows, heads, columns, width
    assert {int(rows) for rows in caches} == {ROWS // 4}
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=(3,), pad_token_id=0)
    given = {"objective": None, "tx": optax.identity(), "rows": 6, "sampling": sampling}
    with pytest.raises(ValueError, match="6 rows do not divide over the 4 devices that generation splits them over"):
        compile_steps(build(config, plan=plan), plan, **given)


# --- the vocabulary -----------------------------------------------------------------------------------------------------


def test_neither_logits_nor_the_tables_are_gathered(programs):
    assert not vocabulary_gathers(programs.score.as_text())
    assert not vocabulary_gathers(programs.update.as_text())
    # The sums over the vocabulary do cross devices, and have a number a token.
    sums = [one for one in collectives(programs.score.as_text(), "all-reduce") if "reduce_max" in one[2]]
    assert sums
    assert all(math.prod(shape) <= 32 for _, shapes, _ in sums for shape in shapes)


@pytest.mark.parametrize("tied", [True, False])
def test_no_device_has_logits_of_the_whole_vocabulary(tied):
    """Nor their gradient: a tied table's is summed with the look-up's, which has another layout."""
    model = ModelConfig(
        vocab_size=5632, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=64,
        tie_embeddings=tied,
    )  # fmt: skip
    plan = Plan(make_mesh({"fsdp": 4}, devices=jax.devices()[:4]))
    given = {"prompts_per_step": 4, "num_generations": 4, "max_prompt_length": 32, "max_completion_length": 224}
    config = PlanConfig(model="", topology="", microbatch_completions=4, score_chunk=256, dtype="float32", **given)
    text = trace_steps(config, model, plan)["update"].trace().lower().compile().as_text()
    sizes = {int(dims.split(",")[-1]) for dims in re.findall(r"\bf32\[(\d+,\d+,\d+)\]", text)}
    assert 5632 // 4 in sizes
    assert 5632 not in sizes


@pytest.mark.parametrize("sizes", [MESH, {"data": 2, "fsdp": 2, "tensor": 2}], ids=["sequence", "data"])
def test_a_split_vocabulary_gives_the_numbers_of_a_whole_one(config, sizes):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(ROWS, 12, 32)).astype(np.float32)
    targets = jnp.asarray(rng.integers(0, VOCAB, (ROWS, 12)), jnp.int32)
    temperature = jnp.asarray(rng.uniform(0.5, 1.5, ROWS), jnp.float32)
    weights = rng.normal(size=(2, ROWS, 12))
    found = []
    for mesh in (make_mesh({}, devices=jax.devices()[:1]), make_mesh(sizes)):
        plan = Plan(mesh)
        model = build(config, plan=plan)
        params = jax.device_put(host_params(model), plan.tree(model.specs))
        table = params["lm_head"]["table"]

        def loss(table, hidden, model=model, params=params):
            params = params | {"lm_head": {"table": table}}
            one = lambda hidden, targets: token_scores(model.unembed(params, hidden), targets, temperature)
            scores = by_columns(one, hidden, targets, chunk=32, plan=model.plan)
            return sum(
                jnp.sum(weight * x) for weight, x in zip(weights.astype(np.float32), scores, strict=True)
            ), scores

        grad = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
        found.append(jax.device_get(grad(table, jax.device_put(hidden, plan.rows))))
    for whole, split in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(split, whole, atol=1e-6 * np.abs(whole).max(), rtol=0)


# --- constraints --------------------------------------------------------------------------------------------------------


def test_a_constraint_is_in_the_program(plan, config):
    """As `with mesh:` would ignore it: each layout here comes from a constraint and from nothing else."""
    model = build(config, plan=plan)
    x = jax.ShapeDtypeStruct((ROWS, 4, 32), jnp.float32)
    fixed = jax.jit(lambda x: plan.constrain(x + 1.0, ("batch", "columns", None))).lower(x).compile()
    assert fixed.output_shardings.spec == P("fsdp", "sequence")
    params = jax.eval_shape(model.init, jax.random.key(0))
    logits = jax.jit(model.unembed).lower(params, x).compile()
    assert logits.output_shardings.spec == P(None, None, ("tensor", "fsdp", "sequence"))


def test_a_constraint_that_does_nothing_is_noticed(plan, config, monkeypatch):
    """That the layouts above come from constraints: without them XLA leaves the same program on one device's layout."""
    model = build(config, plan=plan)
    params = jax.eval_shape(model.init, jax.random.key(0))
    monkeypatch.setattr(Plan, "constrain", lambda self, x, axes: x)
    logits = jax.jit(model.unembed).lower(params, jax.ShapeDtypeStruct((ROWS, 4, 32), jnp.float32)).compile()
    assert jax.tree.all(jax.tree.map(lambda layout: layout.is_fully_replicated, logits.output_shardings))
