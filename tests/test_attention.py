"""Attention's implementations: each against a loop in float64, and what is compiled for platforms that nobody has here."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax._src.cudnn import fused_attention_stablehlo
from test_plan import needs_tpu_compiler
from test_sequence_axis import SEGMENTS as PACKED
from test_sequence_axis import TOKENS
from test_sharding import assert_trees_close, host_params

from jaxrl_lm import SFTConfig
from jaxrl_lm.assemble import load_model
from jaxrl_lm.fit_prepare import open_model
from jaxrl_lm.flops import count_flops
from jaxrl_lm.models import ModelConfig, attention, build, decode, fuse_layers, layers, positions
from jaxrl_lm.models.decoder import visible
from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_steps import weights_of, with_machine_defaults
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.topologies import parse_topology, topology_devices

ROWS, COLUMNS, HEADS, KV_HEADS, WIDTH = 2, 300, 4, 2, 8  # three of splash's blocks
RNG = np.random.default_rng(3)
# Left padding, packed segments that end within blocks and on their edges, right padding; and one long segment.
LENGTHS = ((5, 0), (123, 1), (1, 2), (100, 3), (60, 4), (11, 0)), ((290, 7), (10, 0))
SEGMENTS = np.stack([np.concatenate([np.full(size, number) for size, number in row]) for row in LENGTHS]).astype(
    np.int32
)
Q, WEIGHTS = (RNG.normal(size=(ROWS, COLUMNS, HEADS, WIDTH)).astype(np.float32) for _ in range(2))
K, V = (RNG.normal(size=(ROWS, KV_HEADS, COLUMNS, WIDTH)).astype(np.float32) for _ in range(2))


@functools.cache
def loop(window):
    """What each token reads, and the gradients of the sum of it times WEIGHTS, a token of a head at a time in float64."""
    out, dq, dk, dv = (np.zeros(x.shape) for x in (Q, Q, K, V))
    q, k, v, weights = (x.astype(np.float64) for x in (Q, K, V, WEIGHTS))
    for n, t, h in np.ndindex(ROWS, COLUMNS, HEADS):
        if SEGMENTS[n, t] == 0:
            continue
        first = t
        while first > 0 and SEGMENTS[n, first - 1] == SEGMENTS[n, t] and (window is None or t - first + 1 < window):
            first -= 1
        seen, c, scale = slice(first, t + 1), h // (HEADS // KV_HEADS), WIDTH**-0.5
        chances = np.exp(k[n, c, seen] @ q[n, t, h] * scale)
        chances /= chances.sum()
        out[n, t, h] = chances @ v[n, c, seen]
        dv[n, c, seen] += np.outer(chances, weights[n, t, h])
        of_chances = v[n, c, seen] @ weights[n, t, h]
        of_logits = chances * (of_chances - chances @ of_chances) * scale
        dq[n, t, h] += of_logits @ k[n, c, seen]
        dk[n, c, seen] += np.outer(of_logits, q[n, t, h])
    return out.reshape(ROWS, COLUMNS, -1), (dq, dk, dv)


def run(name, window, plan=None):
    """A function of (q, k, v) to what its tokens read, in this implementation."""
    segments = jnp.asarray(SEGMENTS)
    places = positions(segments)
    sees = lambda *queries: visible(*queries, places, segments, window)
    if name == "splash":
        return lambda q, k, v: attention.splash(q, k, v, segments, window=window, plan=plan)
    if name == "cudnn":
        return lambda q, k, v: attention.cudnn(q, k, v, sees(places, segments), plan=plan)
    if name == "parts":
        return lambda q, k, v: layers.attend_in_parts(q, k, v, sees, (places, segments), parts=7)
    function = layers.attend if name == "xla" else attention.reference
    return lambda q, k, v: function(q, k, v, sees(places, segments))


MODEL_WEIGHTS = RNG.normal(size=(*TOKENS.shape, 32)).astype(np.float32)
MESH = {"fsdp": 2, "sequence": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("reference", {}), ("xla", {}), ("parts", {}), ("splash", {}), ("splash", MESH), ("cudnn", {}), ("cudnn", MESH)],
)
@pytest.mark.parametrize("window", [None, 70])
def test_each_is_the_loop_in_float64_with_its_gradients(name, mesh, window, monkeypatch):
    """Packed segments, grouped heads, a window; nothing of padding is in any real token, whatever stands there. Of cudnn
    all but the kernel, which no CPU has: JAX's own other implementation of the same function."""
    monkeypatch.setattr(attention, "INTERPRET", True)
    whole = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **y: whole(*x, **y))
    function = run(name, window, Plan(make_mesh(mesh)) if mesh else None)
    real = SEGMENTS[:, :, None] > 0
    # A model reads what padding gives, and nobody reads it from the model. Here it is 0 but for xla.
    weights = WEIGHTS.reshape(ROWS, COLUMNS, -1) * (real if name in ("xla", "parts") else 1.0)

    @jax.jit
    def both(q, k, v):
        loss = lambda *given: (jnp.sum(function(*given) * weights), function(*given))
        (_, out), found = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, found

    out, found = jax.device_get(both(*map(jnp.asarray, (Q, K, V))))
    expected, gradients = loop(window)
    np.testing.assert_allclose(np.where(real, out, 0.0), expected, atol=2e-6)
    assert_trees_close(found, gradients, 1e-6)
    assert np.isfinite(out).all()
    if name not in ("xla", "parts"):
        assert not out[~real[..., 0]].any()
    others = [jnp.asarray(np.where(real[..., None], x, 9.0)) for x in (Q, K.swapaxes(1, 2), V.swapaxes(1, 2))]
    again, found = jax.device_get(both(others[0], *(x.swapaxes(1, 2) for x in others[1:])))
    np.testing.assert_array_equal(again[real[..., 0]], out[real[..., 0]])
    assert_trees_close(found, gradients, 1e-6)


def test_in_bfloat16_splash_is_as_near_as_xla(monkeypatch):
    monkeypatch.setattr(attention, "INTERPRET", True)
    given = [jnp.asarray(x, jnp.bfloat16) for x in (Q, K, V)]
    real, expected = SEGMENTS[:, :, None] > 0, loop(70)[0]
    far = {
        name: np.where(real, np.asarray(jax.jit(run(name, 70))(*given), np.float64) - expected, 0.0)
        for name in ("xla", "splash")
    }
    assert np.std(far["splash"]) <= 1.05 * np.std(far["xla"]) < 0.01


def numbers(config, mesh=None):
    """A model's states and a prefill's values where there are tokens; on one device, without a mesh, the gradient too."""
    plan = Plan(mesh or make_mesh({}, devices=jax.devices()[:1]))
    model = build(config, plan=plan)
    params = jax.device_put(host_params(model), plan.tree(model.specs))
    tokens, segments = jnp.asarray(TOKENS), jnp.asarray(PACKED)

    def states(params):
        hidden = model.hidden(params, tokens, positions(segments), segments)
        hidden = jnp.where(segments[..., None] > 0, hidden, 0.0)
        return jnp.sum(hidden * MODEL_WEIGHTS), hidden

    def prefilled(params):
        lengths = jnp.sum(segments > 0, axis=1, dtype=jnp.int32)
        own = model.for_decode().for_prompts()
        _, values = decode.prefill(fuse_layers(params, model=model), tokens, lengths, model=own).layers[-1]
        return jnp.where(jnp.arange(tokens.shape[1])[None, None, :, None] < lengths[:, None, None, None], values, 0.0)

    if mesh is not None:
        return jax.device_get(jax.jit(lambda params: (states(params)[1], prefilled(params)))(params))
    everything = lambda params: (jax.value_and_grad(states, has_aux=True)(params), prefilled(params))
    ((_, hidden), gradient), values = jax.device_get(jax.jit(everything)(params))
    return hidden, values, gradient


@functools.cache
def numbers_of_xla(config):
    return numbers(config)


@pytest.mark.parametrize(("name", "mesh"), [("splash", {}), ("splash", MESH), ("reference", {})])
def test_a_model_has_the_numbers_of_xla_s(tiny_config, monkeypatch, name, mesh):
    monkeypatch.setattr(attention, "INTERPRET", True)
    config = dataclasses.replace(tiny_config, num_layers=2, sliding_window=7)
    own = dataclasses.replace(config, attention_implementation=name)
    expected = numbers_of_xla(config)
    assert_trees_close(numbers(own, make_mesh(mesh) if mesh else None), expected[:2] if mesh else expected, 1e-5)


# --- which -------------------------------------------------------------------------------------------------------------

WIDE = ModelConfig(
    vocab_size=64, hidden_size=256, intermediate_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    dtype="bfloat16", remat="full",
)  # fmt: skip


def wide(**changed):
    return dataclasses.replace(WIDE, **changed)


APART = Plan(make_mesh(MESH))._with(kv_heads=None)

CHOICES = [
    ("auto", WIDE, "tpu", None, "splash"),
    ("auto", WIDE, "tpu", Plan(make_mesh(MESH)), "splash"),
    ("auto", WIDE, "tpu", APART, "xla"),
    ("auto", WIDE, "tpu", Plan(make_mesh(MESH), decode_rules=(("kv_heads", None),)), "xla"),
    ("auto", wide(head_dim=32), "tpu", None, "xla"),
    ("splash", wide(head_dim=32), "tpu", None, "splash"),
    ("auto", wide(head_dim=264), "tpu", None, "xla"),
    ("auto", WIDE, "gpu", None, "xla"),  # cuDNN's kernel has not been run by anybody of ours
    ("auto", WIDE, "cpu", None, "xla"),
    ("cudnn", WIDE, "gpu", None, "cudnn"),
    ("reference", WIDE, "tpu", APART, "reference"),
    ("xla", WIDE, "tpu", None, "xla"),
]


@pytest.mark.parametrize(("asked", "config", "platform", "plan", "expected"), CHOICES)
def test_what_is_chosen(asked, config, platform, plan, expected):
    assert attention.choose(asked, config, platform=platform, plan=plan) == expected


REFUSED = [
    ("splash", WIDE, "cpu", None, "is a kernel of a TPU, and this runs on a CPU"),
    ("cudnn", WIDE, "tpu", None, "is a kernel of a GPU, and this runs on a TPU"),
    ("splash", WIDE, "tpu", APART, "it needs heads and kv_heads on the same mesh axes"),
    ("splash", wide(head_dim=264), "tpu", None, "head_dim=264 is above 256"),
    ("cudnn", wide(dtype="float32"), "gpu", None, "bfloat16 or float16, not in dtype=float32"),
    ("cudnn", wide(head_dim=260), "gpu", None, "head_dim=260 is not a multiple of 8 up to 256"),
    ("cudnn", wide(head_dim=264), "gpu", None, "head_dim=264 is not a multiple of 8 up to 256"),
]


@pytest.mark.parametrize(("asked", "config", "platform", "plan", "message"), REFUSED)
def test_what_cannot_be_is_named(asked, config, platform, plan, message):
    with pytest.raises(ValueError, match=f"attention_implementation='{asked}'.*{re.escape(message)}.*take auto or xla"):
        attention.choose(asked, config, platform=platform, plan=plan)


def test_a_model_that_cannot_says_so_before_it_is_compiled(tiny_config):
    with pytest.raises(ValueError, match="attention_implementation='flash' is unknown: use reference, xla, splash"):
        dataclasses.replace(tiny_config, attention_implementation="flash")
    model = build(dataclasses.replace(tiny_config, attention_implementation="splash"), plan=Plan(make_mesh(MESH)))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    with pytest.raises(ValueError, match="attention_implementation='splash' is a kernel of a TPU"):
        jax.eval_shape(model.hidden, weights_of(model.specs, model.plan, "float32"), tokens, tokens, tokens)


def test_the_option_reaches_the_model(tmp_path):
    directory, plan = tiny_run.save_model(tmp_path / "m"), Plan(make_mesh({}, devices=jax.devices()[:1]))
    given = {"dtype": None, "param_dtype": "float32", "remat": None}
    for asked, expected in (("auto", "xla"), ("reference", "reference")):
        model, *_ = load_model(directory, plan, **given, attention=asked)
        assert model.config.attention_implementation == expected
    with pytest.raises(ValueError, match="attention_implementation='cudnn' is a kernel of a GPU"):
        load_model(directory, plan, **given, attention="cudnn")
    config = SFTConfig(model=directory, dataset="d", output_dir="o", attention_implementation="reference")
    assert open_model(config).model.config.attention_implementation == "reference"


def test_a_plan_is_of_what_the_run_would_take():
    config = functools.partial(PlanConfig, model="qwen3-0.6b")
    for topology, asked, expected in (
        ("v5e:2x2", "auto", "splash"),
        ("v5e:2x2", "xla", "xla"),
        ("gpu:H100x8", "auto", "xla"),
    ):
        options = config(topology=topology, attention_implementation=asked)
        found = with_machine_defaults(options, open_model_config("qwen3-0.6b"))
        assert found.attention_implementation == expected


# --- compiled for others ----------------------------------------------------------------------------------------------


def kernels(text):
    """The names of the Pallas kernels that a TPU's program calls."""
    calls = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    return [re.search(r"splash_mha_(\w+?)_segmented", line)[1] for line in calls]


def laid(plan, shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=plan.sharding(axes, shape))


@needs_tpu_compiler
def test_a_model_s_gradient_is_compiled_for_a_tpu():
    """Each kernel is in the loop of the layers once, and the forward one again where it is recomputed."""
    plan, columns = Plan(make_mesh({"fsdp": 4}, devices=topology_devices(parse_topology("v5e:2x2")))), 200
    model = build(wide(attention_implementation="splash", sliding_window=50), plan=plan)
    tokens, segments = (laid(plan, (4, columns), jnp.int32, "batch", None) for _ in range(2))
    states = lambda params, tokens, segments: model.hidden(params, tokens, positions(segments), segments)
    gradient = jax.grad(lambda *given: jnp.sum(states(*given).astype(jnp.float32)))
    compiled = jax.jit(gradient).lower(weights_of(model.specs, plan, "float32"), tokens, segments).compile()
    assert sorted(kernels(compiled.as_text())) == ["dkv", "dq", "fwd", "fwd"]


@needs_tpu_compiler
@pytest.mark.parametrize(("mesh", "width"), [({"fsdp": 2, "tensor": 4}, 80), (MESH, 128)])
def test_it_is_compiled_for_a_mesh_of_tpus(mesh, width):
    """Nothing is moved but the gradients of keys and values over split columns, and no square is in memory: the weights
    of one row's head would have more bytes than all that the program holds."""
    plan = Plan(make_mesh(mesh, devices=topology_devices(parse_topology("v5e:2x4"))))
    q = laid(plan, (4, 4096, 8, width), jnp.bfloat16, "batch", "columns", "heads", None)
    k = laid(plan, (4, 4, 4096, width), jnp.bfloat16, "batch", "kv_heads", None, None)
    segments = laid(plan, (4, 4096), jnp.int32, "batch", None)
    loss = lambda q, k, v, segments: jnp.sum(
        attention.splash(q, k, v, segments, window=None, plan=plan).astype(jnp.float32)
    )
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, segments).compile()
    text, own = compiled.as_text(), 4096 // plan.ways("columns")
    assert compiled.memory_analysis().temp_size_in_bytes < own * 4096 * 4
    assert sorted(kernels(text)) == ["dkv", "dq", "fwd"]
    moved = set(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", text))
    assert moved == ({"all-reduce"} if "sequence" in mesh else set())


def test_the_flops_of_a_kernel_are_counted():
    """Blocks of which a causal mask leaves nothing are counted; those that a window leaves out are not."""
    squares = 4.0 * ROWS * HEADS * WIDTH * 128**2
    count = lambda window, plan: count_flops(jax.make_jaxpr(run("splash", window, plan))(*map(jnp.asarray, (Q, K, V))))
    assert count(None, None) == 9 * squares
    assert count(70, None) == 6 * squares  # two blocks at most of three
    halves = Plan(make_mesh({"fsdp": 2, "tensor": 2}, devices=jax.devices()[:4]))
    assert count(None, halves) == 9 * squares


def test_cudnn_is_lowered_for_a_gpu(monkeypatch):
    """What JAX asks of the machine, which has none, is cuDNN's version; all else of the lowering is its own."""
    q, k = jnp.asarray(Q, jnp.bfloat16), jnp.asarray(K, jnp.bfloat16)
    places, segments = positions(jnp.asarray(SEGMENTS)), jnp.asarray(SEGMENTS)
    mask = visible(places, segments, places, segments, None)
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        attention.cudnn(q, k, k, mask)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    for plan in (None, Plan(make_mesh(MESH))):
        loss = lambda q, k, v, plan=plan: jnp.sum(attention.cudnn(q, k, v, mask, plan=plan).astype(jnp.float32))
        text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
        assert re.findall(r"@(__cudnn\$\w+)", text) == [
            "__cudnn$fmhaScaleBiasSoftmax",
            "__cudnn$fmhaScaleBiasSoftmaxBackward",
        ]
