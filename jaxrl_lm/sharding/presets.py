"""A plan from what a config says: the mesh's sizes, a preset by name, single rules as text."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxrl_lm.sharding.mesh import make_mesh
from jaxrl_lm.sharding.rules import PRESETS, RULES, MeshAxes, Plan

NONE: Mapping[str, str] = MappingProxyType({})


def build_plan(
    mesh: dict[str, int],
    *,
    preset: str | None = None,
    rules: Mapping[str, str] = NONE,
    decode_rules: Mapping[str, str] = NONE,
    devices: Sequence[Any] | None = None,
) -> Plan:
    """The mesh, of these devices (None: all), with its rules. Raises ValueError, naming the option, for what does not
    fit.
    """
    return ruled(make_mesh(mesh, devices=devices), preset=preset, rules=rules, decode_rules=decode_rules)


def ruled(
    mesh: Mesh | AbstractMesh, *, preset: str | None, rules: Mapping[str, str], decode_rules: Mapping[str, str]
) -> Plan:
    """The plan of a mesh that is there, or of its description. Raises ValueError as `build_plan`."""
    decode = parse_rules(decode_rules, mesh, "decode_sharding_rules")
    return Plan(mesh, tuple(resolve_rules(mesh, preset, rules).items()), decode_rules=tuple(decode.items()))


def resolve_rules(mesh: Mesh | AbstractMesh, preset: str | None, overrides: Mapping[str, str]) -> dict[str, MeshAxes]:
    """The table of a preset (None: `RULES`) with single rules replaced; `parse_rules` says how these are written.

    Raises ValueError for an unknown preset, and for a mesh axis above 1 that nothing would be split over.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"sharding_preset={preset!r} is unknown: use {', '.join(PRESETS)}, or leave it out")
    rules = {**RULES, **PRESETS.get(preset, {}), **parse_rules(overrides, mesh, "sharding_rules")}
    used = {name for axis in rules.values() for name in ((axis,) if isinstance(axis, str) else axis or ())}
    idle = [name for name, size in mesh.shape.items() if size > 1 and name not in used]
    if idle:
        raise ValueError(
            f"mesh: {idle[0]}={mesh.shape[idle[0]]}, and sharding_preset={preset!r} splits nothing over {idle[0]}: take "
            "the axis out of the mesh, or another preset"
        )
    return rules


def parse_rules(given: Mapping[str, str], mesh: Mesh | AbstractMesh, option: str) -> dict[str, MeshAxes]:
    """Rules as a config has them, {"embed": "fsdp", "vocab": "tensor+fsdp", "mlp": "none"}, as the table has them.

    Raises ValueError, naming the option, for an unknown logical axis or mesh axis and for a mesh axis named twice.
    """
    rules: dict[str, MeshAxes] = {}
    for axis, text in given.items():
        if axis not in RULES:
            raise ValueError(f"{option}: unknown logical axis {axis!r}; known are {', '.join(sorted(RULES))}")
        names = () if text == "none" else tuple(text.split("+"))
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise ValueError(
                f"{option}.{axis}={text!r}: unknown mesh axis {unknown[0]!r}; use {', '.join(mesh.shape)}, several with "
                "a + between them, or none"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"{option}.{axis}={text!r}: a mesh axis is named twice")
        rules[axis] = names or None
    return rules
