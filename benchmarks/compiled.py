"""What the TPU compiler makes of decoding and of the update, for chips that nobody need own.

    python benchmarks/compiled.py                                        # all rows; 20 minutes on a small machine
    python benchmarks/compiled.py --only llama-3.2-1b_v5e                # the row of this name, or all that hold it
    python benchmarks/compiled.py --only llama-3.1-8b_v5p:2x2x1 --steps decode --layers 2    # one compilation, two layers

Rows are named MODEL_TOPOLOGY, with an int8 cache MODEL_TOPOLOGY_int8 (--list prints them). For each step is read, from the
compiler's own memory and cost analysis and from the program: whether the donated state (the cache, the training state) stays
where it is, which copies of a cache the decode loop makes, what it gathers, and how many bytes a pass moves beside weights
and cache, which it has to read. Prompts and completions have 1024 tokens each, 256 rows in as many slots. Output:
docs/benchmarks.md.
"""

import argparse
import dataclasses
from collections import Counter
from typing import Any, NamedTuple

import jax

from jaxrl_lm.plan_config import PlanConfig, open_model_config
from jaxrl_lm.plan_decode import STEPS, Compiled, check_steps

GIB, MIB = float(1 << 30), float(1 << 20)


class Row(NamedTuple):
    model: str
    topology: str
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.model}_{self.topology}{'_int8' if self.rounded else ''}"

    @property
    def rounded(self) -> bool:
        """Whether the cache is: that changes decoding alone."""
        return "kv_cache_dtype" in self.options


ROWS = (
    Row("llama-3.2-1b", "v5e:2x4", {"mesh": {"fsdp": 4, "tensor": 2}}),
    Row("llama-3.2-1b", "v5p:2x2x1", {"mesh": {"fsdp": 4}}),
    # Of 16 GB a chip, eight hold a state of 8B with moments of two bytes, and no copy of its weights for each.
    Row("llama-3.1-8b", "v5e:2x4", {"mesh": {"tensor": 8}, "moments_dtype": "bfloat16"}),
    Row("llama-3.1-8b", "v5p:2x2x1", {"mesh": {"fsdp": 2, "tensor": 2}}),
    Row("llama-3.2-1b", "v5e:2x4", {"mesh": {"fsdp": 4, "tensor": 2}, "kv_cache_dtype": "int8"}),
    Row("llama-3.1-8b", "v5e:2x4", {"mesh": {"tensor": 8}, "kv_cache_dtype": "int8"}),
    Row("llama-3.1-8b", "v5p:2x2x1", {"mesh": {"fsdp": 2, "tensor": 2}, "kv_cache_dtype": "int8"}),
)


def config_of(row: Row) -> PlanConfig:
    return PlanConfig(
        model=row.model,
        topology=row.topology,
        prompts_per_step=32,
        num_generations=8,
        max_prompt_length=1024,
        max_completion_length=1024,
        microbatch_completions=8,
        **row.options,
    )


def line(row: Row, step: Compiled) -> str:
    """A row of the table."""
    mesh = " × ".join(f"{axis} {size}" for axis, size in row.options["mesh"].items())
    decode = step.name == "decode"
    kinds = Counter()
    for one in step.collectives:
        kinds[one.kind] += one.bytes * one.runs
    moved = ", ".join(f"{kind} {size / MIB:,.3g}" for kind, size in kinds.most_common() if size >= MIB / 100)
    numbers = (
        f"{step.donated / GIB:.2f}" if step.donated else "–",
        f"{step.aliased / GIB:.2f}",
        f"{step.temporaries / GIB:.2f}",
        f"{sum(one.runs for one in step.moved):.0f}" if decode else "–",
        moved or "none",
        f"{step.whole / MIB:,.0f}",
        f"{step.traffic / MIB:,.0f} / {step.least / MIB:,.0f} = {step.traffic / step.least:.2f}" if decode else "–",
        f"{step.counted / MIB:,.0f}",
        f"{step.seconds:.0f}",
    )
    name = f"{step.name}, int8 cache" if row.rounded else step.name
    return f"| {row.model} | {row.topology} | {mesh} | {name} | {' | '.join(numbers)} |"


HEAD = (
    "model", "on", "mesh", "step", "donated, GiB", "in place, GiB", "temporaries, GiB", "copies of a cache in the loop",
    "collectives, MiB", "all weights, MiB", "bytes a pass / weights + cache, MiB", "compiler's bytes accessed, MiB",
    "compiling, s",
)  # fmt: skip


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="the row of this name, or those whose name holds it (default: all)")
    options.add_argument("--steps", nargs="+", choices=STEPS, default=["decode", "update"], help="(default: both)")
    options.add_argument("--layers", type=int, help="of the model, for a quicker look (default: all)")
    options.add_argument("--list", action="store_true", help="print the rows' names and stop")
    given = options.parse_args()
    chosen = [row for row in ROWS if row.name == given.only] or [row for row in ROWS if given.only in row.name]
    if given.list or not chosen:
        names = "\n".join(row.name for row in ROWS)
        raise SystemExit(names if given.list else f"--only {given.only}: no row's name holds this; there are\n{names}")
    if "decode" not in given.steps and all(row.rounded for row in chosen):
        raise SystemExit(f"--only {given.only}: rows with an int8 cache decode alone; take --steps decode")
    jax.config.update("jax_platforms", "cpu")
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for row in chosen:
        model = open_model_config(row.model)
        model = dataclasses.replace(model, num_layers=given.layers or model.num_layers)
        for name in [name for name in given.steps if name == "decode" or not row.rounded]:
            print(line(row, check_steps(config_of(row), model, only=(name,))[name]), flush=True)


if __name__ == "__main__":
    main()
