"""Rules that hold for every file of the package; each is shown to notice an offence."""

import ast
import builtins
import dis
from pathlib import Path
from types import CodeType

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxrl_lm"

# What a file may import stands on a lower line, or on its own line where that is a package or marked so.
LAYERS = (
    (
        "algorithm_config",
        "clock",
        "distributed",
        "flops",
        "group_metrics",
        "hlo",
        "launch",
        "masked",
        "memory",
        "sampling_config",
        "topologies",
        "types",
    ),
    ("config", "metrics"),
    ("fit_config", "tools_config"),
    ("algos", "sharding", "options", "stops"),
    ("moments",),
    ("optim",),
    ("models",),
    ("logit_rules", "placement", "sampling", "score", "speculate", "train_state"),
    ("slots",),
    ("credit", "generate", "update"),
    ("turns",),
    ("batch", "chunks", "distill", "fit_batches", "fit_objectives", "objectives", "rows"),
    ("hlo_loops", "steps"),
    ("decode_steps", "fit_steps"),
    ("data", "report", "checkpoint"),
    ("runs",),
    ("encode", "rewards", "overlap_checks", "process_checks", "rule_tables"),
    ("example",),
    ("sequences",),
    ("packing", "reward_sequences"),
    ("given", "layout", "rollout", "checks"),
    ("mix", "preferences"),
    ("assemble", "evaluate", "host", "reward_model"),
    ("beside", "fit", "process_model"),
    ("judges",),
    ("prompt_sets",),
    ("prepare", "step_rewards"),
    ("plan_config",),
    ("plan_steps",),
    ("plan_memory", "plan_places", "plan_report"),
    ("plan_decode", "plan_estimate", "plan_table"),
    ("plan_changes",),
    ("plan",),
    ("fit_prepare",),
    ("collect",),
    ("flight", "learn", "online_pairs"),
    ("dpo", "loop", "reward_fit", "sft"),
    ("inference",),
    ("completions",),
    ("trunks",),
    ("beams", "label_steps", "traces"),
    ("search",),
    ("seeds",),
    ("recipe_file",),
    ("recipe",),
    ("stages",),
    ("lab",),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Of design.md, section 2: what the lowest parts may import of ours at all.
ONLY = {
    "algos": {"algos", "masked", "metrics", "types"},
    "masked": set(),
    "metrics": {"masked"},
    "types": set(),
    "algorithm_config": set(),
    "clock": set(),
    "distributed": set(),
    "launch": set(),
    "flops": set(),
    "hlo": set(),
    "memory": set(),
    "moments": {"sharding"},
    "sampling_config": set(),
    "topologies": set(),
    "config": {"algorithm_config"},
    "group_metrics": set(),
    "options": set(),
    "sharding": {"sharding"},
    "data": set(),
    "report": set(),
    "rewards": {"rewards", "data"},
    "encode": {"data", "distributed"},
    "checkpoint": {"distributed", "types"},
}

# Steps, and moves between processes: what several processes do together with their devices is a program.
COMPILED = ("steps.py", "fit_steps.py", "decode_steps.py", "sharding/across.py")
COMPILING = ("jit", "pjit", "pmap", "filter_jit")  # jax.jit, nnx.jit, eqx.filter_jit, …


def sources():
    return {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def imports(tree):
    """The full name of everything that is imported, wherever it stands, by the name that it goes by in the file."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{'.' * node.level}{node.module or ''}.{alias.name}"
    return names


def used(tree):
    """The full names of everything that is imported or reached through an import, such as jax.jit."""
    names = imports(tree)
    found = set(names.values())
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            root = names.get(node.id)
            for given, full in names.items():  # `import jax.numpy` goes by jax
                if root is None and given.split(".")[0] == node.id:
                    root = full.split(".")[0]
            if root is not None:
                found.add(".".join([root, *reversed(parts)]))
    return found


def part(file):
    """The line of the layers that a file belongs to: its package, or its own name."""
    return file.split("/")[0].removesuffix(".py")


def upward_imports(file, source):
    """Complaints about imports of our own that do not point down."""
    own, complaints = part(file), []
    if own == "__init__":
        return []
    if own not in RANK:
        return [f"{file}: in no layer: give it a line"]
    for name in imports(ast.parse(source)).values():
        if name.startswith("."):
            complaints.append(f"{file}: relative import of {name}")
        if name.split(".")[0] != "jaxrl_lm":
            continue
        other = name.split(".")[1] if "." in name else "__init__"
        if other not in RANK:
            complaints.append(f"{file}: imports {name}, which is in no layer")
        elif other != own and RANK[other] >= RANK[own]:
            complaints.append(f"{file}: imports {name} of layer {RANK[other]} from layer {RANK[own]}")
        elif other not in ONLY.get(own, RANK):
            complaints.append(f"{file}: {own} may import nothing of ours but {sorted(ONLY[own])}, not {name}")
    return complaints


def jits(file, source):
    """Uses of a compiling transform outside COMPILED, as a call, a decorator or under another name."""
    found = sorted(name for name in used(ast.parse(source)) if name.split(".")[-1] in COMPILING)
    return [] if file in COMPILED else [f"{file}: {name}" for name in found]


def flax_imports(file, source):
    return [
        f"{file}: {name}"
        for name in sorted(set(imports(ast.parse(source)).values()))
        if name.split(".")[0] == "flax" and part(file) != "models"
    ]


def partition_specs(file, source):
    return [
        f"{file}: {name}"
        for name in sorted(used(ast.parse(source)))
        if name.split(".")[-1] in ("PartitionSpec", "P") and "sharding" in name and part(file) != "sharding"
    ]


def future_annotations(file, source):
    return [file for name in imports(ast.parse(source)).values() if name == "__future__.annotations"]


def unknown_names(file, source):
    """Names that a function reads and that nothing defines; ruff's own rule stumbles over the strings of shapes."""
    codes = [compile(source, file, "exec")]
    for code in codes:  # grows meanwhile
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    names = lambda code, *operations: {i.argval for i in dis.get_instructions(code) if i.opname in operations}
    known = names(codes[0], "STORE_NAME").union(dir(builtins), *(names(code, "STORE_GLOBAL") for code in codes))
    read = set().union(*(names(code, "LOAD_GLOBAL") for code in codes))
    return [f"{file}: {name}" for name in sorted(read - known - {"__file__"})]


RULES = (upward_imports, jits, flax_imports, partition_specs, future_annotations, unknown_names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    complaints = [complaint for file, source in sources().items() for complaint in rule(file, source)]
    assert not complaints, "\n".join(complaints)


def test_every_layer_is_a_part_of_the_package():
    assert {part(file) for file in sources()} - {"__init__"} == set(RANK)
    assert set(ONLY) < set(RANK)


def test_the_rules_see_something_in_the_package():
    """The exempted files do what the rules look for."""
    files = sources()
    assert jits("elsewhere.py", files["steps.py"]) == ["elsewhere.py: jax.jit"]
    assert flax_imports("elsewhere.py", files["models/layers.py"]) == ["elsewhere.py: flax.nnx"]
    assert partition_specs("elsewhere.py", files["sharding/rules.py"]) == ["elsewhere.py: jax.sharding.PartitionSpec"]
    assert upward_imports("score.py", files["loop.py"])


OFFENCES = [
    (upward_imports, "score.py", "from jaxrl_lm.steps import Steps", 1),
    (upward_imports, "algos/kl.py", "from jaxrl_lm.models import Model", 1),
    (upward_imports, "algos/kl.py", "from jaxrl_lm.config import GRPOConfig", 1),  # lower, and still not allowed
    (upward_imports, "rewards/verl.py", "from jaxrl_lm.steps import Steps", 1),
    (upward_imports, "steps.py", "import jaxrl_lm.loop as l", 1),
    (upward_imports, "steps.py", "def f():\n    from jaxrl_lm import cli, algos", 1),
    (upward_imports, "generate.py", "from jaxrl_lm.update import update", 1),  # of its own layer
    (upward_imports, "generate.py", "from .update import update", 1),
    (upward_imports, "generate.py", "import jaxrl_lm", 1),
    (upward_imports, "generate.py", "from jaxrl_lm import train", 1),  # a name of the flat package
    (upward_imports, "fresh.py", "import jax", 1),
    (upward_imports, "loop.py", "from jaxrl_lm.steps import Steps\nfrom jaxrl_lm import algos", 0),
    (upward_imports, "models/hf.py", "from jaxrl_lm.models.decoder import Model", 0),
    (jits, "score.py", "import jax\nf = jax.jit(g)", 1),
    (jits, "score.py", "import jax\n@jax.jit\ndef f(x): return x", 1),
    (jits, "score.py", "import functools, jax\n@functools.partial(jax.jit, static_argnums=0)\ndef f(x): return x", 1),
    (jits, "score.py", "import jax as j\nf = j.jit(g)", 1),
    (jits, "score.py", "import jax.numpy as jnp, jax.random\nf = jax.jit(g)", 1),
    (jits, "score.py", "from jax import jit as compiled", 1),
    (jits, "score.py", "from jax.experimental.pjit import pjit", 1),
    (jits, "score.py", "from jax.experimental import pjit", 1),
    (jits, "score.py", "from jax import pmap", 1),
    (jits, "models/layers.py", "from flax import nnx\nf = nnx.jit(g)", 1),
    (jits, "models/layers.py", "import equinox as eqx\nf = eqx.filter_jit(g)", 1),
    (jits, "score.py", "import jax\nf = jax.lax.scan(jax.checkpoint(g))\n# jax.jit is not used", 0),
    (jits, "steps.py", "import jax\nf = jax.jit(g)", 0),
    (jits, "sharding/moves.py", "import jax\nf = jax.jit(g)", 1),
    (flax_imports, "score.py", "from flax import nnx", 1),
    (flax_imports, "score.py", "def f():\n    import flax.nnx as n", 1),
    (flax_imports, "score.py", "from flax.nnx import Module", 1),
    (flax_imports, "models/layers.py", "from flax import nnx", 0),
    (partition_specs, "steps.py", "from jax.sharding import NamedSharding, PartitionSpec as P", 1),
    (partition_specs, "steps.py", "import jax\ns = jax.sharding.PartitionSpec('x')", 1),
    (partition_specs, "steps.py", "from jax import sharding\ns = sharding.PartitionSpec('x')", 1),
    (partition_specs, "steps.py", "from jax.sharding import Mesh", 0),
    (partition_specs, "sharding/rules.py", "from jax.sharding import PartitionSpec", 0),
    (future_annotations, "score.py", "from __future__ import annotations", 1),
    (future_annotations, "score.py", "from __future__ import division", 0),
    (unknown_names, "score.py", "import jax\ndef f(x):\n    return place(x, jax.Array, len(x))", 1),
    (unknown_names, "score.py", "def f():\n    return lambda: [place(x) for x in g()]", 2),
    (unknown_names, "score.py", "from a import place\ndef f(x: 'N T'):\n    return place(x, f, __file__)", 0),
]


@pytest.mark.parametrize(("rule", "file", "source", "count"), OFFENCES)
def test_a_rule_notices_an_offence_and_nothing_else(rule, file, source, count):
    assert len(rule(file, source)) == count
