"""Presets and single rules from a config: which layouts they give, and that what does not fit is said."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_lm.config import GRPOConfig
from jaxrl_lm.models import ModelConfig, build, decode_specs
from jaxrl_lm.prepare import build_plan, plan_of
from jaxrl_lm.sharding import DECODE_RULES, PRESETS, RULES, Plan, make_mesh

MESH = {"fsdp": 2, "sequence": 2, "tensor": 2}


def specs_of(plan):
    """Layouts of a kernel [embed, mlp], of the table, of activations and of a logit chunk."""
    logits = plan.for_logits()
    return (
        plan.sharding(("embed", "mlp"), (32, 64)).spec,
        plan.sharding(("vocab", "vocab_embed"), (48, 32)).spec,
        plan.sharding(("batch", "columns", None), (8, 16, 32)).spec,
        logits.sharding(("batch", "columns", "vocab"), (8, 16, 48)).spec,
    )


@pytest.mark.parametrize(
    ("preset", "mesh", "expected"),
    [
        (None, {"data": 8}, (P(None, None), P(None, None), P("data", None, None), P("data", None, None))),
        (
            None,
            {"data": 2, "fsdp": 2, "tensor": 2},
            (
                P("fsdp", "tensor"),
                P(("tensor", "fsdp"), None),
                P(("data", "fsdp"), None, None),
                P("data", None, ("tensor", "fsdp")),
            ),
        ),
        (
            None,
            MESH,
            (
                P(("fsdp", "sequence"), "tensor"),
                P(("tensor", "fsdp", "sequence"), None),
                P("fsdp", "sequence", None),
                P(None, None, ("tensor", "fsdp", "sequence")),
            ),
        ),
        (
            "fsdp",
            {"data": 2, "fsdp": 4},
            (P("fsdp", None), P("fsdp", None), P(("data", "fsdp"), None, None), P("data", None, "fsdp")),
        ),
        (
            "fsdp+tensor",
            {"fsdp": 4, "tensor": 2},
            (
                P("fsdp", "tensor"),
                P(("tensor", "fsdp"), None),
                P("fsdp", None, None),
                P(None, None, ("tensor", "fsdp")),
            ),
        ),
        (
            "tensor",
            {"fsdp": 4, "tensor": 2},
            (P(None, "tensor"), P("tensor", None), P("fsdp", None, None), P("fsdp", None, "tensor")),
        ),
        (
            "sequence",
            {"fsdp": 2, "sequence": 4},
            (
                P(("fsdp", "sequence"), None),
                P(("fsdp", "sequence"), None),
                P("fsdp", "sequence", None),
                P(None, None, ("fsdp", "sequence")),
            ),
        ),
    ],
)
def test_a_preset_says_what_is_split_over_what(preset, mesh, expected):
    assert specs_of(build_plan(mesh, preset=preset)) == expected


def test_without_options_the_rules_are_the_table():
    plan = build_plan({"fsdp": -1})
    assert plan == Plan(make_mesh({"fsdp": -1}))
    assert set(RULES) == set(DECODE_RULES)
    assert all(set(changed) <= set(RULES) for changed in PRESETS.values())


@pytest.mark.parametrize(
    ("preset", "mesh", "axis"),
    [
        ("fsdp", {"fsdp": 4, "tensor": 2}, "tensor=2"),
        ("fsdp", MESH, "sequence=2"),
        ("fsdp+tensor", MESH, "sequence=2"),
        ("tensor", {"sequence": 4, "tensor": 2}, "sequence=4"),
        ("sequence", MESH, "tensor=2"),
    ],
)
def test_an_axis_that_a_preset_leaves_idle_is_refused(preset, mesh, axis):
    with pytest.raises(
        ValueError, match=rf"mesh: {axis}, and sharding_preset='{preset.replace('+', '.')}' splits nothing"
    ):
        build_plan(mesh, preset=preset)


def test_single_rules_replace_those_of_the_preset():
    plan = build_plan(MESH, rules={"embed": "fsdp", "vocab": "tensor+sequence", "mlp": "none"})
    assert specs_of(plan) == (
        P("fsdp", None),
        P(("tensor", "sequence"), None),
        P("fsdp", "sequence", None),
        P("fsdp", None, ("tensor", "sequence")),  # rows keep the axis that the vocabulary does not take
    )
    assert build_plan({"data": 4, "tensor": 2}, preset="fsdp", rules={"mlp": "tensor"}).axes("mlp") == ("tensor",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rules": {"embd": "fsdp"}}, "sharding_rules: unknown logical axis 'embd'; known are batch, columns, embed"),
        ({"rules": {"embed": "model"}}, "sharding_rules.embed='model': unknown mesh axis 'model'; use data, fsdp"),
        ({"rules": {"embed": "fsdp,tensor"}}, "several with a . between them, or none"),
        ({"rules": {"embed": "fsdp+fsdp"}}, "sharding_rules.embed='fsdp.fsdp': a mesh axis is named twice"),
        ({"decode_rules": {"embed": "model"}}, "decode_sharding_rules.embed='model': unknown mesh axis"),
        ({"preset": "zero3"}, "sharding_preset='zero3' is unknown: use fsdp, fsdp.tensor, tensor, sequence"),
    ],
)
def test_rules_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_plan(MESH, **options)


def test_rules_that_do_not_fit_a_model_name_the_parameter(tiny_config):
    specs = build(tiny_config).specs
    with pytest.raises(ValueError, match=r"layers.attn.k_proj.kernel: mesh axis 'tensor' is used twice by axes"):
        build_plan(MESH, rules={"embed": "tensor"}).tree(specs)
    with pytest.raises(
        ValueError, match=r"layers.mlp.down_proj.kernel: dimension 'mlp' of size 63 is not divisible by 2"
    ):
        build_plan(MESH).tree(build(dataclasses.replace(tiny_config, intermediate_size=63)).specs)


def test_a_rule_that_splits_a_head_is_refused(tiny_config: ModelConfig):
    plan = build_plan({"fsdp": 2, "tensor": 4}, rules={"kv_heads": "none"})
    assert build(tiny_config, plan=plan).plan == plan  # num_kv_heads=2 stay whole
    with pytest.raises(ValueError, match="mesh: fsdp=2×tensor=4 does not divide the model's num_heads=4"):
        build(
            tiny_config, plan=build_plan({"fsdp": 2, "tensor": 4}, rules={"heads": "fsdp+tensor", "kv_heads": "none"})
        )


def test_generation_has_rules_of_its_own(tiny_config):
    plan = build_plan(MESH, decode_rules={"mlp": "tensor+fsdp"})
    decode = plan.for_decode()
    assert decode.sharding(("embed", "mlp"), (32, 64)).spec == P(None, ("tensor", "fsdp"))
    assert decode.sharding(("batch", "columns", None), (8, 1, 32)).spec == P(("fsdp", "sequence"), None, None)
    assert decode.for_prompts().sharding(("batch", None), (2, 5)).spec == P("fsdp", None)
    assert plan.axes("mlp") == ("tensor",)
    layouts = decode.tree(decode_specs(tiny_config))
    assert layouts["layers"][0]["gate_up"]["kernel"].spec == P(None, ("tensor", "fsdp"), None)


def test_a_config_says_all_of_it():
    config = GRPOConfig(
        model="m",
        dataset="d",
        output_dir="o",
        mesh={"sequence": 2, "fsdp": -1},
        sharding_preset="sequence",
        sharding_rules={"embed": "fsdp"},
        decode_sharding_rules={"embed": "fsdp"},
    )
    plan = plan_of(config)
    assert dict(plan.mesh.shape) == {"data": 1, "fsdp": 4, "sequence": 2, "tensor": 1}
    assert plan.axes("embed") == ("fsdp",)
    assert plan.for_decode().axes("embed") == ("fsdp",)
