"""Meshes and plans fail loudly; 8 devices sample, score and learn what one device does, with the layouts that were named."""

import contextlib
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.credit import CreditRule
from jaxrl_lm.metrics import result
from jaxrl_lm.models import build, decode_specs, decoder_specs
from jaxrl_lm.models.layers import ParamSpec
from jaxrl_lm.objectives import PolicyObjective
from jaxrl_lm.optim import make_optimizer
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.sharding import RULES, Plan, make_mesh
from jaxrl_lm.steps import compile_steps
from jaxrl_lm.types import Frozen, Requests, Scores

# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, None),
        ({"data": 8}, (8, 1, 1, 1)),
        ({"fsdp": -1}, (1, 8, 1, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 2)),
        ({"tensor": 2, "fsdp": -1}, (1, 4, 1, 2)),
        ({"data": 1, "tensor": -1, "fsdp": 8}, (1, 8, 1, 1)),
        ({"sequence": 4, "fsdp": -1}, (1, 2, 4, 1)),
    ],
)
def test_a_mesh_has_four_auto_axes_always(sizes, shape):
    mesh = make_mesh(sizes) if shape else make_mesh(sizes, devices=jax.devices()[:1])
    assert mesh.axis_names == ("data", "fsdp", "sequence", "tensor")
    assert tuple(mesh.shape.values()) == (shape or (1, 1, 1, 1))
    assert mesh.axis_types == (AxisType.Auto,) * 4


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": 8}, "mesh: unknown axis 'model'; the axes are data, fsdp, sequence, tensor"),
        ({"data": 4}, "does not multiply to the 8 devices"),
        ({"data": 3, "fsdp": -1}, "does not multiply to the 8 devices"),
        ({"data": 16, "fsdp": -1}, "does not multiply to the 8 devices"),
        ({}, "does not multiply to the 8 devices"),
        ({"data": -1, "fsdp": -1}, "at most one of them is -1"),
        ({"data": 0, "fsdp": -1}, "sizes are positive"),
        ({"data": -2, "fsdp": -4}, "sizes are positive"),
    ],
)
def test_impossible_meshes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan():
    return Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("batch", None), (8, 5), P(("data", "fsdp"), None)),
        (("embed", "mlp"), (32, 64), P("fsdp", "tensor")),
        (("layers", "heads", "embed"), (3, 32, 32), P(None, "tensor", "fsdp")),
        (("vocab", "vocab_embed"), (48, 32), P(("tensor", "fsdp"), None)),
        (("norm",), (32,), P(None)),
        ((), (), P()),
    ],
)
def test_logical_axes_become_mesh_axes(plan, axes, shape, spec):
    assert plan.sharding(axes, shape) == NamedSharding(plan.mesh, spec)


def test_axes_of_size_one_are_left_out():
    plan = Plan(make_mesh({"data": 8}))
    assert plan.sharding(("embed", "mlp"), (3, 5)).spec == P(None, None)
    assert plan.sharding(("batch",), (8,)).spec == P("data")
    assert plan.batch_ways == 8
    assert plan.rows == NamedSharding(plan.mesh, P("data"))
    assert plan.replicated == NamedSharding(plan.mesh, P())


def test_generation_has_its_own_table(plan):
    """No weight is gathered over fsdp for each token; what the tensor axis splits stays split."""
    decode = plan.for_decode()
    assert decode.sharding(("embed", "mlp"), (32, 64)).spec == P(None, "tensor")
    assert decode.sharding(("vocab", "vocab_embed"), (48, 32)).spec == P("tensor", None)
    assert decode.sharding(("batch", "kv_heads", None), (8, 2, 5)).spec == P(("data", "fsdp"), "tensor", None)
    own = dataclasses.replace(plan, rules=tuple((RULES | {"mlp": None}).items())).for_decode()
    assert own.sharding(("embed", "mlp"), (32, 64)).spec == P(None, None)  # a user's own rule is kept


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (("embed", "width"), (4, 4), "a.kernel: unknown logical axis 'width'; known are batch, columns, embed"),
        (("embed", "embed"), (4, 4), "a.kernel: mesh axis 'fsdp' is used twice"),
        (("batch", "vocab"), (8, 8), "a.kernel: mesh axis 'fsdp' is used twice"),
        (("mlp",), (7,), r"a.kernel: dimension 'mlp' of size 7 is not divisible by 2 \(tensor\)"),
        (("vocab",), (6,), r"a.kernel: dimension 'vocab' of size 6 is not divisible by 4 \(tensor×fsdp\)"),
        (("embed",), (4, 4), r"a.kernel: 1 logical axes \('embed',\) for shape \(4, 4\)"),
    ],
)
def test_impossible_layouts_are_refused_with_the_path(plan, axes, shape, message):
    with pytest.raises(ValueError, match=message):
        plan.sharding(axes, shape, "a.kernel")


def test_a_rule_onto_a_mesh_axis_that_does_not_exist_is_refused(plan):
    wrong = dataclasses.replace(plan, rules=tuple((RULES | {"mlp": "model"}).items()))
    with pytest.raises(ValueError, match=r"a.kernel: axis 'mlp' is ruled onto 'model', no axis of"):
        wrong.sharding(("mlp",), (8,), "a.kernel")


def test_a_trees_error_names_the_parameter(plan, tiny_config):
    odd = dataclasses.replace(tiny_config, intermediate_size=63)
    with pytest.raises(ValueError, match=r"layers\.mlp.down_proj.kernel: dimension 'mlp' of size 63"):
        plan.tree({"layers": {"mlp": {"down_proj": decoder_specs(odd)["layers"]["mlp"]["down_proj"]}}})
    block = decode_specs(odd)["layers"][1]["down"]
    with pytest.raises(ValueError, match=r"layers\.1.down.kernel: dimension 'mlp' of size 63"):
        plan.tree({"layers": ({}, {"down": block})})


def test_a_large_matrix_that_would_stand_whole_everywhere_is_refused_unless_asked_for(plan):
    large, small = ParamSpec((4096, 1025), (None, None), "normal"), ParamSpec((4096, 1024), (None, None), "normal")
    with pytest.raises(ValueError, match=r"head.table: shape \(4096, 1025\) would be whole on every device"):
        plan.tree({"head": {"table": large}})
    asked = dataclasses.replace(plan, allow_replicated=True)
    assert asked.tree({"head": {"table": large}})["head"]["table"].is_fully_replicated
    assert plan.tree({"head": {"table": small}})["head"]["table"].is_fully_replicated
    # Data parallelism keeps every weight whole, and says so by its name.
    data = Plan(make_mesh({"data": 8}))
    assert data.tree({"head": {"table": large}})["head"]["table"].is_fully_replicated


# --- compiled steps on 8 devices ----------------------------------------------------------------------------------------

ROWS, PROMPT, NEW, UPDATES = 8, 5, 4, 3
MESHES = [
    {"data": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "sequence": 2, "tensor": 2},
]
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(10, 48, (ROWS, PROMPT)).astype(np.int32)
SEGMENTS = (np.arange(PROMPT) >= PROMPT - np.array([5, 1, 3, 4, 2, 5, 4, 1])[:, None]).astype(np.int32)
ADVANTAGES = RNG.normal(size=ROWS).astype(np.float32)
TEMPERATURE = np.array([1.0, 0.5, 1.5, 0.0, 1.3, 0.7, 1.0, 0.8], np.float32)


@contextlib.contextmanager
def counted_compilations():
    """The names of the programs that XLA compiles inside the block."""
    names = []

    def listen(event, duration, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(facts["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


class Everything:
    """What one mesh samples, and the states and gradients of a few updates on it."""

    def __init__(self, config, mesh):
        plan = Plan(mesh)
        self.plan, self.model = plan, build(config, plan=plan)
        self.steps = steps = compile_steps(
            self.model,
            plan,
            objective=PolicyObjective(completion_columns=NEW),
            tx=make_optimizer(
                optax.constant_schedule(3e-3), max_grad_norm=1.0, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-3
            ),
            rows=ROWS,
            credit=CreditRule(advantage="constant", group_size=1),
            sampling=SamplingConfig(max_new_tokens=NEW, eos_token_ids=(3, 17), pad_token_id=0),
        )
        params = jax.device_put(host_params(self.model), plan.tree(self.model.specs))
        self.layouts = jax.tree.map(lambda x: x.sharding, steps.abstract_state)
        state = steps.init({"policy": params}, jax.random.key(0))
        self.init_shardings = jax.tree.map(lambda x: x.sharding, state)
        self.params_deleted = [leaf.is_deleted() for leaf in jax.tree.leaves(params)]

        decode_params = steps.prepare_decode(state.params["policy"], None)
        self.decode_shardings = jax.tree.map(lambda x: x.sharding, decode_params)
        keys = steps.row_keys(jax.random.key(5), np.int32(0), np.int32(0))
        limits = np.full(ROWS, NEW, np.int32)
        request = Requests(*steps.place((TOKENS, SEGMENTS)), keys, *steps.place((limits, TEMPERATURE, np.int32(2))))
        self.rollout = steps.generate(decode_params, request, None)

        rated = Rated(
            rollout=self.rollout,
            temperature=request.temperature,
            credit=steps.credit(
                *steps.place((ADVANTAGES, np.ones(ROWS, bool))), self.rollout, None, None, np.float32(0), None, None
            ),
            old=Scores(self.rollout.logprobs, self.rollout.logprobs),
            values=None,
            ref_logprobs=None,
        )
        coefficients = Coefficients(*steps.place((np.float32(0), np.float32(0), np.float32(1))))
        rows = steps.place(np.arange(ROWS, dtype=np.int32))
        batch = steps.minibatch(rated, coefficients, state.key, np.int32(0), rows, BatchRule(keep_old=True))
        self.batch_shardings = {leaf.sharding for leaf in jax.tree.leaves(batch)}
        self.metrics, self.moments, self.params, self.donated = [], [], [], []
        self.compilations = []  # by update
        for _ in range(UPDATES):
            with counted_compilations() as compilations:
                old, (state, metrics) = state, steps.update(state, Frozen(), batch)
            self.compilations.append(len(compilations))
            # Later ones are read by the host here, and a buffer that numpy looks at is copied instead.
            self.donated = self.donated or [leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state))]
            self.metrics.append(result(metrics))
            self.params.append(jax.device_get(state.params["policy"]))
            self.moments.append(jax.device_get(optax.tree.get(state.opt_state, "mu")["policy"]))
        self.state = state


def host_params(model):
    """Weights that all count, from numpy, which compiles nothing."""
    rng = np.random.default_rng(0)
    mean, std = {"normal": 0.0, "ones": 1.0, "zeros": 0.0}, {"normal": 0.2, "ones": 0.2, "zeros": 0.2}
    one = lambda spec: rng.normal(mean[spec.init], std[spec.init], spec.shape).astype(np.float32)
    return jax.tree.map(one, model.specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))


@pytest.fixture(scope="module")
def config(tiny_config):
    return dataclasses.replace(tiny_config, num_layers=2)


@pytest.fixture(scope="module")
def one_device(config):
    return Everything(config, make_mesh({}, devices=jax.devices()[:1]))


@pytest.fixture(scope="module", params=MESHES, ids=lambda sizes: " ".join(f"{k}{v}" for k, v in sizes.items()))
def sharded(request, config):
    return Everything(config, make_mesh(request.param))


def assert_trees_close(ours, theirs, relative):
    """Each leaf within `relative` of its largest number."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=relative * np.abs(b).max(), rtol=0)


def test_sampled_tokens_are_equal_and_logprobs_within_rounding(sharded, one_device):
    ours, theirs = sharded.rollout, one_device.rollout
    for name in ("tokens", "segment_ids", "action_mask", "truncated", "turn_ids", "policy_step"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
    assert np.asarray(theirs.action_mask).sum() > ROWS * NEW / 2


def test_one_update_has_the_same_gradient(sharded, one_device):
    """The first moment after one step is (1 − b1) times the clipped gradient."""
    assert_trees_close(sharded.moments[0], one_device.moments[0], 1e-5)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(one_device.moments[0]))
    first, expected = sharded.metrics[0], one_device.metrics[0]
    assert first["nonfinite"] == 0
    for name in ("grad_norm", "loss", "entropy", "sampling/importance_ratio/mean"):
        assert first[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name


def test_several_updates_give_the_same_parameters(sharded, one_device):
    for ours, theirs in zip(sharded.params, one_device.params, strict=True):
        assert_trees_close(ours, theirs, 1e-5)
    last, expected = sharded.metrics[-1], one_device.metrics[-1]
    assert last.keys() == expected.keys()
    assert last["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert last["loss"] < sharded.metrics[0]["loss"]  # it learns


def test_the_state_comes_and_goes_in_the_named_layouts(sharded):
    """From the declarations to the state that update returns: nothing drifts, nothing comes out whole by accident."""
    plan, state = sharded.plan, sharded.state
    declared = plan.tree(sharded.model.specs)
    equivalent = lambda leaf, layout: leaf.sharding.is_equivalent_to(layout, leaf.ndim)
    assert jax.tree.all(jax.tree.map(equivalent, state.params["policy"], declared))
    for moment in ("mu", "nu"):
        tree = optax.tree.get(state.opt_state, moment)["policy"]
        assert jax.tree.all(jax.tree.map(equivalent, tree, declared)), moment
    assert jax.tree.all(jax.tree.map(equivalent, state, sharded.layouts))
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, sharded.init_shardings, sharded.layouts))
    decode = plan.for_decode().tree(decode_specs(sharded.model.config))
    assert jax.tree.all(jax.tree.map(lambda a, b: a == b, sharded.decode_shardings, decode))
    shards = math.prod(plan.mesh.shape[axis] for axis in ("fsdp", "sequence", "tensor"))
    kernel = state.params["policy"]["layers"]["mlp"]["gate_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // shards


def test_rows_are_split_over_the_batch_axes(sharded):
    assert sharded.batch_shardings == {sharded.plan.rows}
    assert {leaf.sharding for leaf in jax.tree.leaves(sharded.rollout)} == {sharded.plan.rows}
    assert sharded.rollout.tokens.addressable_shards[0].data.shape == (ROWS // sharded.plan.batch_ways, PROMPT + NEW)


def test_old_states_and_initial_parameters_are_donated(sharded):
    assert all(sharded.params_deleted)
    assert all(sharded.donated)


def test_an_update_is_compiled_once(sharded):
    assert sharded.compilations == [1, 0, 0]


def test_a_mesh_that_would_split_a_head_is_refused(tiny_config):
    plan = Plan(make_mesh({"tensor": 4, "data": -1}))
    with pytest.raises(ValueError, match="mesh: tensor=4 does not divide the model's num_kv_heads=2"):
        build(tiny_config, plan=plan)


def test_rows_that_do_not_divide_over_the_mesh_are_refused(tiny_config):
    plan = Plan(make_mesh({"data": 8}))
    with pytest.raises(ValueError, match="12 rows do not divide over the 8 devices of the mesh's batch axes"):
        compile_steps(
            build(tiny_config, plan=plan),
            plan,
            objective=PolicyObjective(completion_columns=1),
            tx=optax.sgd(1.0),
            rows=12,
        )


def test_a_batch_that_does_not_divide_is_refused_while_tracing(plan, tiny_config):
    model = build(tiny_config, plan=plan)
    rows = jnp.ones((6, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"activation .*: dimension 'batch' of size 6 is not divisible by 4"):
        jax.eval_shape(model.hidden, jax.eval_shape(model.init, jax.random.key(0)), rows, rows, rows)
