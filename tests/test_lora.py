"""Adapters: fresh ones change no bit, merged ones give the same model, on one device and eight; PEFT's files."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.models import LoraConfig, build, decode_specs, decoder_specs, lora, peft, positions
from jaxrl_lm.models.hf_config import config_from_hf
from jaxrl_lm.models.hf_files import Safetensors
from jaxrl_lm.models.hf_table import flatten, read_params
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh
from jaxrl_lm.types import Requests

SEGMENTS = np.array(
    [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0, 0]] * 2, np.int32
)
TOKENS = np.random.default_rng(0).integers(0, 48, SEGMENTS.shape).astype(np.int32)
PULL = np.random.default_rng(1).normal(size=SEGMENTS.shape).astype(np.float32)
CONFIGS = {
    "all": LoraConfig(rank=4, alpha=6.0),
    "q v rslora": LoraConfig(rank=3, alpha=2.0, targets=("v", "q"), rslora=True),
    "down": LoraConfig(rank=1, alpha=1.0, targets=("down",)),
}
ALL = CONFIGS["all"]
is_spec = lambda leaf: hasattr(leaf, "axes")
shapes = lambda tree: jax.tree.map(lambda leaf: tuple(leaf.shape), tree, is_leaf=is_spec)


def random_tree(specs, seed, dtype=np.float32):
    """Weights that all count, B too. From numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    std = {"normal": 0.2, "ones": 0.2, "zeros": 0.2, "fan_in": 0.2}
    one = lambda spec: jnp.asarray((spec.init == "ones") + rng.normal(0, std[spec.init], spec.shape), dtype)
    return jax.tree.map(one, specs, is_leaf=is_spec)


@pytest.fixture(scope="module")
def base(model):
    return random_tree(model.specs, 0)


merge = jax.jit(lora.merge, static_argnums=2)


def scores_of(params, model):
    return score(params, jnp.asarray(TOKENS), jnp.asarray(SEGMENTS), model=model)


@jax.jit(static_argnums=1)
def run_hidden(params, model):
    segments = jnp.asarray(SEGMENTS)
    return model.hidden(params, jnp.asarray(TOKENS), positions(segments), segments)


def by_hand(base, adapter, config):
    """W + alpha/r (or /√r) · A B, layer by layer in float64."""
    scale = config.alpha / (math.sqrt(config.rank) if config.rslora else config.rank)
    out, factors = flatten(base), flatten(adapter)
    for path in {path.rsplit(".", 1)[0] for path in factors}:
        kernel = np.array(out[f"{path}.kernel"], np.float64)
        for layer in range(len(kernel)):
            a, b = (np.float64(factors[f"{path}.lora_{name}"][layer]) for name in "ab")
            kernel[layer] += scale * (a @ b)
        out[f"{path}.kernel"] = kernel
    return out


# --- the config and the declarations ----------------------------------------------------------------------------------


def test_the_scale_is_alpha_over_the_rank_or_its_root():
    assert (LoraConfig().rank, LoraConfig().alpha, LoraConfig().scale) == (16, 32.0, 2.0)
    assert LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0
    assert LoraConfig().targets == ("q", "k", "v", "o", "gate", "up", "down")
    assert LoraConfig(targets=("down", "q", "q")) == LoraConfig(targets=("q", "down"))
    assert hash(LoraConfig(targets=("all",))) == hash(LoraConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "lora rank=0: must be at least 1"),
        ({"alpha": 0.0}, "lora alpha=0.0: must be above 0"),
        ({"alpha": math.inf}, "lora alpha=inf: must be above 0 and finite"),
        ({"targets": ()}, r"lora targets=\(\): give some of q, k, v, o, gate, up, down, or all"),
        ({"targets": ("q", "lm_head")}, r"lora targets=\('q', 'lm_head'\)"),
    ],
)
def test_impossible_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


def test_an_adapter_has_the_paths_of_its_kernels_and_an_axis_for_the_rank(model):
    specs = flatten(lora.specs(model, CONFIGS["q v rslora"]))
    attn = "layers.attn"
    assert set(specs) == {f"{attn}.{name}_proj.lora_{factor}" for name in "qv" for factor in "ab"}
    assert specs[f"{attn}.v_proj.lora_a"].shape == (2, 32, 3)
    assert specs[f"{attn}.v_proj.lora_a"].axes == ("layers", "embed", "rank")
    assert specs[f"{attn}.v_proj.lora_b"].shape == (2, 3, 16)
    assert specs[f"{attn}.v_proj.lora_b"].axes == ("layers", "rank", "kv_heads")
    everywhere = flatten(lora.specs(model, ALL))
    assert len(everywhere) == 14
    assert everywhere["layers.mlp.down_proj.lora_a"].axes == ("layers", "mlp", "rank")
    assert flatten(decoder_specs(model.config, ALL)) == flatten(model.specs) | everywhere


def test_initial_values_are_those_of_peft(model):
    config = LoraConfig(rank=32)
    adapter = jax.jit(lora.init, static_argnums=(1, 2))(jax.random.key(5), model, config)
    leaves = flatten(adapter)
    assert shapes(adapter) == shapes(lora.specs(model, config))
    for path, leaf in leaves.items():
        if path.endswith("lora_b"):
            assert (np.asarray(leaf) == 0).all()
        else:
            bound = leaf.shape[1] ** -0.5
            assert bound * 0.95 < float(jnp.abs(leaf).max()) <= bound
            assert float(leaf.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    drawn = [float(leaf[layer, 0, 0]) for path, leaf in leaves.items() if path.endswith("lora_a") for layer in (0, 1)]
    assert len(set(drawn)) == 14  # each path and layer its own numbers
    half = jax.eval_shape(lambda key: lora.init(key, model, config, "bfloat16"), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}


# --- the same model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_adapter_changes_no_bit(model, base, dtype):
    model = build(dataclasses.replace(model.config, dtype=dtype))
    adapter = jax.jit(lora.init, static_argnums=(1, 2))(jax.random.key(0), model, ALL)
    np.testing.assert_array_equal(run_hidden(lora.attach(base, adapter, ALL), model), run_hidden(base, model))
    jax.tree.map(np.testing.assert_array_equal, merge(base, adapter, ALL), base)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_merged_equals_attached_equals_the_formula(model, base, config):
    adapter = random_tree(lora.specs(model, config), 1)
    merged = merge(base, adapter, config)
    for path, leaf in by_hand(base, adapter, config).items():
        np.testing.assert_allclose(flatten(merged)[path], leaf, atol=1e-6, err_msg=path)
    attached = run_hidden(lora.attach(base, adapter, config), model)
    np.testing.assert_allclose(attached, run_hidden(merged, model), atol=1e-5)
    assert np.abs(attached - run_hidden(base, model)).max() > 0.05


def test_a_bfloat16_base_is_merged_in_float32(model, base):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base)
    adapter = random_tree(lora.specs(model, ALL), 1)
    for dtype in (jnp.float32, jnp.bfloat16):
        low = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), adapter)
        expected = by_hand(half, low, ALL)
        for path, leaf in flatten(merge(half, low, ALL)).items():
            assert leaf.dtype == jnp.bfloat16
            rounding = 2.0**-8 * np.abs(np.float64(expected[path])) + 1e-6
            assert (np.abs(np.float64(leaf) - np.float64(expected[path])) <= rounding).all(), path


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_the_merged_weight_never_exists(model, base):
    """Neither forward nor backward; merging inside of the loss is the control."""
    adapter = random_tree(lora.specs(model, ALL), 1)

    def products(join):
        loss = lambda adapter: scores_of(join(base, adapter, ALL), model).logprobs.sum()
        found = equations(jax.make_jaxpr(jax.grad(loss))(adapter).jaxpr)
        return {equation.outvars[0].aval.shape[-2:] for equation in found if equation.primitive.name == "dot_general"}

    assert (32, 64) in products(lora.merge)  # the shape of gate and up
    assert not {(32, 64), (64, 32)} & products(lora.attach)


def gradient_of(model, join, out_shardings=None):
    """jitted (adapter, base) -> gradient of the adapter, log-probs."""

    def loss(adapter, base):
        scores = scores_of(join(base, adapter, ALL), model)
        return jnp.sum(PULL * scores.logprobs), scores.logprobs

    return jax.jit(jax.grad(loss, has_aux=True), out_shardings=out_shardings)


@pytest.fixture(scope="module")
def one_device(model, base):
    """The adapter, and the gradient and log-probs with it; with recomputation in the backward pass."""
    adapter = random_tree(lora.specs(model, ALL), 1)
    recomputing = build(dataclasses.replace(model.config, remat="dots"))
    return adapter, *gradient_of(recomputing, lora.attach)(adapter, base)


def test_gradients_reach_the_adapter_only_and_are_those_of_the_merged_weights(model, base, one_device):
    adapter, attached, _ = one_device
    merged, _ = gradient_of(model, lora.merge)(adapter, base)
    assert shapes(attached) == shapes(adapter)
    for ours, theirs in zip(jax.tree.leaves(attached), jax.tree.leaves(merged), strict=True):
        assert np.abs(theirs).max() > 0
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max())


def test_generation_samples_from_the_merged_weights(model, base):
    adapter = random_tree(lora.specs(model, ALL), 1)
    sampling = SamplingConfig(max_new_tokens=4, eos_token_ids=(0,), pad_token_id=0)
    rows, prompt = 4, 7
    requests = Requests(
        jnp.asarray(TOKENS[:2]),
        jnp.asarray(SEGMENTS[:2]),
        jax.vmap(lambda n: jax.random.fold_in(jax.random.key(3), n))(jnp.arange(rows)),
        jnp.full(rows, 4, jnp.int32),
        jnp.array([1.0, 1.0, 0.0, 0.0]),
        jnp.zeros((), jnp.int32),
    )
    attached, merged = lora.attach(base, adapter, ALL), merge(base, adapter, ALL)
    prepare = jax.jit(lambda params: prepare_decode(params, model=model))
    decode = prepare(attached)
    assert shapes(decode) == shapes(decode_specs(model.config))  # plain
    for ours, theirs in zip(jax.tree.leaves(decode), jax.tree.leaves(prepare(merged)), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    rollout = jax.jit(lambda params: generate(params, requests, model=model, sampling=sampling))(decode)

    @jax.jit
    def logits(tokens, segments):
        return model.unembed(attached, model.hidden(attached, tokens, positions(segments), segments))

    before = np.asarray(logits(rollout.tokens, rollout.segment_ids))[:, :-1]
    tokens, mask = np.asarray(rollout.tokens)[:, 1:], np.asarray(rollout.action_mask)[:, 1:]
    expected = np.take_along_axis(np.asarray(jax.nn.log_softmax(before)), tokens[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(rollout.logprobs)[:, 1:][mask], expected[mask], atol=2e-5)
    assert mask[:, prompt - 1 :].any(1).all()
    greedy = mask & (np.asarray(requests.temperature) == 0)[:, None]
    np.testing.assert_array_equal(tokens[greedy], before.argmax(-1)[greedy])


# --- on a mesh --------------------------------------------------------------------------------------------------------


def test_eight_devices_give_the_scores_and_gradients_of_one(model, base, one_device):
    adapter, gradient, logprobs = one_device
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    layouts = plan.tree(lora.specs(model, ALL))
    attn, mlp = layouts["layers"]["attn"], layouts["layers"]["mlp"]
    assert tuple(attn["q_proj"]["lora_a"].spec) == (None, "fsdp", None)
    assert tuple(attn["q_proj"]["lora_b"].spec) == (None, None, "tensor")
    assert tuple(mlp["down_proj"]["lora_a"].spec) == (None, "tensor", None)

    wide = build(model.config, plan=plan)
    placed = jax.device_put(adapter, layouts), jax.device_put(base, plan.tree(model.specs))
    their_gradient, their_logprobs = gradient_of(wide, lora.attach, (layouts, None))(*placed)
    np.testing.assert_allclose(their_logprobs, logprobs, atol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(their_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    decode = plan.for_decode().tree(decode_specs(model.config))
    merging = jax.jit(lambda a, b: prepare_decode(lora.attach(b, a, ALL), model=wide), out_shardings=decode)
    expected = jax.jit(lambda a, b: prepare_decode(lora.merge(b, a, ALL), model=model))(adapter, base)
    for ours, theirs in zip(jax.tree.leaves(merging(*placed)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def test_a_factor_may_stand_whole_where_its_matrix_may_not(model):
    """Tensor parallelism splits no width of a residual stream, so large A of q, k, v, gate and up are whole."""
    large = build(dataclasses.replace(model.config, hidden_size=4096, num_layers=40))
    plan = Plan(make_mesh({"tensor": 2, "data": -1}))
    config = LoraConfig(rank=64, targets=("gate",))
    factors = plan.tree(lora.specs(large, config))["layers"]["mlp"]["gate_proj"]
    assert math.prod(lora.specs(large, config)["layers"]["mlp"]["gate_proj"]["lora_a"].shape) > 1 << 22
    assert factors["lora_a"].is_fully_replicated
    assert not factors["lora_b"].is_fully_replicated
    with pytest.raises(ValueError, match="would be whole on every device"):
        plan.tree(
            {"kernel": dataclasses.replace(large.specs["layers"]["mlp"]["gate_proj"]["kernel"], axes=(None,) * 3)}
        )


# --- failures of attach -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"layers": {"mixer": a["layers"]["attn"]}}, "the adapter has layers.mixer, the base has no such"),
        (lambda a: {"layers": {"input_norm": a["layers"]["attn"]["q_proj"]}}, "layers.input_norm: an adapter is"),
        (
            lambda a: {"layers": {"attn": {"q_proj": {"lora_a": jnp.zeros((2, 32, 4))}}}},
            "layers.attn.q_proj: an adapter",
        ),
        (
            lambda a: {"layers": {"attn": {"k_proj": a["layers"]["attn"]["q_proj"]}}},
            r"layers.attn.k_proj: the adapter has shapes \(2, 32, 4\) and \(2, 4, 32\), expected",
        ),
        (lambda a: jax.tree.map(lambda leaf: leaf[:1], a), "the adapter has shapes"),
        (lambda a: jax.tree.map(lambda leaf: leaf[:, :2, :2], a), "the adapter has shapes"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_its_path(model, base, change, message):
    adapter = random_tree(lora.specs(model, ALL), 1)
    with pytest.raises(ValueError, match=message):
        lora.attach(base, change(adapter), ALL)


# --- PEFT's files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_round_trip_keeps_every_bit(model, tmp_path, config, dtype):
    adapter = random_tree(lora.specs(model, config), 2, dtype)
    peft.save_adapter(tmp_path / "out", model, adapter, config, "some/base")
    found, again = peft.read_adapter(tmp_path / "out", model)
    assert found == config
    assert jax.tree.structure(again) == jax.tree.structure(adapter)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(adapter), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_round_trip_over_a_mesh(model, tmp_path):
    plan = Plan(make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    wide, adapter = build(model.config, plan=plan), random_tree(lora.specs(model, ALL), 2)
    layouts = plan.tree(lora.specs(model, ALL))
    peft.save_adapter(tmp_path / "out", wide, jax.device_put(adapter, layouts), ALL, "some/base")
    _, again = peft.read_adapter(tmp_path / "out", wide)
    assert jax.tree.map(lambda leaf: leaf.sharding, again) == layouts
    jax.tree.map(np.testing.assert_array_equal, again, adapter)


def test_the_files_are_those_of_peft(model, tmp_path):
    config = LoraConfig(rank=4, alpha=8.0, targets=("q", "down"))
    adapter = random_tree(lora.specs(model, config), 2)
    peft.save_adapter(tmp_path / "out", model, adapter, config, "some/base")
    settings = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    expected = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}
    expected |= {"target_modules": ["q_proj", "down_proj"], "use_rslora": False, "base_model_name_or_path": "some/base"}
    assert settings | expected == settings
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers"
    modules = ("self_attn.q_proj", "mlp.down_proj")
    names = {f"{prefix}.{layer}.{module}.lora_{ab}.weight" for layer in (0, 1) for module in modules for ab in "AB"}
    assert set(tensors) == names
    down = adapter["layers"]["mlp"]["down_proj"]
    np.testing.assert_array_equal(tensors[f"{prefix}.1.mlp.down_proj.lora_A.weight"], down["lora_a"][1].T)
    np.testing.assert_array_equal(tensors[f"{prefix}.1.mlp.down_proj.lora_B.weight"], down["lora_b"][1].T)


def test_the_written_tensors_added_to_torch_weights_give_our_logits(tmp_path):
    """Which way round and at which scale, by transformers: each weight [out, in] += scale · B A from the file."""
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes, **heads)).eval()
    reference.save_pretrained(tmp_path / "base")
    model = build(config_from_hf(tmp_path / "base"))
    one_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    layouts = jax.tree.map(lambda _: one_device, model.specs, is_leaf=is_spec)
    base = read_params(Safetensors(tmp_path / "base"), model.specs, layouts, "float32")
    config = LoraConfig(rank=3, alpha=5.0, rslora=True)
    adapter = random_tree(lora.specs(model, config), 4)
    peft.save_adapter(tmp_path / "out", model, adapter, config, "base")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    with torch.no_grad():
        weights, before = dict(reference.named_parameters()), reference(torch.tensor(TOKENS[:1])).logits
        for name in tensors:
            if name.endswith("lora_A.weight"):
                a, b = (torch.tensor(tensors[name.replace("lora_A", kind)]) for kind in ("lora_A", "lora_B"))
                weights[re.sub(r"^base_model\.model\.|\.lora_A", "", name)].add_(5.0 / 3**0.5 * b @ a)
        expected = reference(torch.tensor(TOKENS[:1])).logits
    tokens = jnp.asarray(TOKENS[:1])
    ones = jnp.ones_like(tokens)

    @jax.jit
    def logits(base, adapter):
        attached = lora.attach(base, adapter, config)
        return model.unembed(attached, model.hidden(attached, tokens, positions(ones), ones))

    np.testing.assert_allclose(logits(base, adapter), expected, atol=1e-4)
    assert (expected - before).abs().max() > 0.1


@pytest.fixture
def saved(model, tmp_path):
    config = LoraConfig(rank=2, alpha=4.0, targets=("q", "v"))
    peft.save_adapter(tmp_path / "adapter", model, random_tree(lora.specs(model, config), 2), config, "some/base")
    return tmp_path / "adapter"


def edit(directory, **changes):
    path = directory / "adapter_config.json"
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"bias": "lora_only"}, "bias='lora_only' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern={'q_proj': 4} is not supported"),
        ({"layers_to_transform": [0]}, r"layers_to_transform=\[0\] is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' is not supported"),
        ({"setting_of_the_future": 1}, "setting_of_the_future=1 is not supported"),
        ({"r": ...}, "r is not given"),
        ({"r": "2"}, "r has a value of another type"),
        ({"r": 3}, r"wrong shapes: base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight has shape \(2, 32\)"),
        ({"target_modules": ["q_proj"]}, "unknown tensors: base_model.model.model.layers.0.self_attn.v_proj.lora_A"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj"]},
            "missing tensors: .*layers.0.self_attn.k_proj.lora_A.weight",
        ),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "target_modules names lm_head; supported are q_proj"),
        ({"target_modules": ["layers.0.self_attn.q_proj"]}, "names q_proj of some layers only"),
        ({"target_modules": ".*"}, "missing tensors"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(saved, model, changes, message):
    edit(saved, **changes)
    with pytest.raises(ValueError, match=message):
        peft.read_adapter(saved, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["self_attn.q_proj", "v_proj"]},
        {"lora_dropout": 0.1, "peft_version": "0.21.2", "loftq_config": {}, "corda_config": None, "use_dora": ...},
    ],
)
def test_other_ways_to_say_the_same_are_read(saved, model, changes):
    config, adapter = peft.read_adapter(saved, model)
    edit(saved, **changes)
    found, again = peft.read_adapter(saved, model)
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, again, adapter)


def test_all_linear_means_every_projection(model, tmp_path):
    peft.save_adapter(tmp_path / "out", model, random_tree(lora.specs(model, ALL), 2), ALL, "some/base")
    edit(tmp_path / "out", target_modules="all-linear")
    assert peft.read_adapter(tmp_path / "out", model)[0] == ALL


def edit_tensors(directory, change):
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(FIRST), f"missing tensors: {FIRST}"),
        (
            lambda t: t.update({"base_model.model.lm_head.weight": t[FIRST]}),
            "unknown tensors: base_model.model.lm_head",
        ),
        (lambda t: t.update({FIRST: t[FIRST].T.copy()}), rf"{FIRST} has shape \(32, 2\), expected \(2, 32\)"),
        (lambda t: t.update({FIRST: t[FIRST].astype(np.float16)}), "dtypes F16, F32; one of F32, BF16, F16 is read"),
        (lambda t: t.update({name: t[name].astype(np.int32) for name in t}), "dtypes I32; one of"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(saved, model, change, message):
    edit_tensors(saved, change)
    with pytest.raises(ValueError, match=message):
        peft.read_adapter(saved, model)


def test_absent_and_damaged_files_are_named(saved, model):
    (saved / "adapter_model.safetensors").write_bytes(b"\x00" * 4)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: not a whole safetensors file"):
        peft.read_adapter(saved, model)
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.safetensors: no such file"):
        peft.read_adapter(saved, model)
    (saved / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"adapter_config\.json: no such file"):
        peft.read_adapter(saved, model)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(model, tmp_path):
    adapter = random_tree(lora.specs(model, ALL), 2)
    mixed = jax.tree.map_with_path(lambda path, x: x.astype("bfloat16" if "lora_a" in str(path) else x.dtype), adapter)
    for wrong, config, message in (
        (adapter, LoraConfig(rank=4, targets=("q",)), r"has shape .* in the adapter, None by its config"),
        (adapter, LoraConfig(rank=5), r"layers.attn.k_proj.lora_a has shape \(2, 32, 4\) in the adapter, \(2, 32, 5\)"),
        ({"layers": {"attn": adapter["layers"]["attn"]}}, ALL, "layers.mlp.down_proj.lora_a has shape None"),
        (mixed, ALL, "several dtypes: bfloat16, float32"),
    ):
        with pytest.raises(ValueError, match=message):
            peft.save_adapter(tmp_path / "out", model, wrong, config, "some/base")
    assert not list(tmp_path.iterdir())
    peft.save_adapter(tmp_path / "out", model, adapter, ALL, "some/base")
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        peft.save_adapter(tmp_path / "out", model, adapter, ALL, "some/base")
