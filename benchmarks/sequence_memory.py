"""What the axis sequence does to compiled memory: the gradient of the scores of long rows on 1 to 8 CPU devices.

    python benchmarks/sequence_memory.py

Nothing is run: XLA says what each program would need on each device. docs/scale_mesh.md holds the output.
"""

import argparse
import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm.models import ModelConfig, build, decoder
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh

PAIRS = decoder.PAIRS
BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1}


def compile_gradient(config: ModelConfig, ways: int, rows: int, columns: int, chunk: int):
    """The program of a mesh whose axis sequence has `ways` devices."""
    plan = Plan(make_mesh({"sequence": ways}, devices=jax.devices()[:ways]))
    model = build(config, plan=plan)
    layouts = plan.tree(model.specs)
    shaped = lambda spec, layout: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=layout)
    params = jax.tree.map(shaped, model.specs, layouts, is_leaf=lambda leaf: hasattr(leaf, "axes"))
    ids = jax.ShapeDtypeStruct((rows, columns), jnp.int32, sharding=plan.rows)
    loss = lambda *given: jnp.sum(score(*given, model=model, chunk=chunk, start=columns // 4).logprobs)
    return jax.jit(jax.grad(loss), out_shardings=layouts).lower(params, ids, ids).compile()


def largest(text: str) -> tuple[int, str]:
    """Bytes and shape of the largest array in a program."""
    shapes = re.findall(r"\b(f32|s32|u32|pred)\[([\d,]+)\]", text)
    return max((BYTES[kind] * int(np.prod([int(n) for n in dims.split(",")])), f"[{dims}]") for kind, dims in shapes)


def memory(program) -> int:
    """Bytes of temporaries on each device."""
    return program.memory_analysis().temp_size_in_bytes


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--columns", type=int, nargs="+", default=[4096, 32768])
    options.add_argument("--rows", type=int, default=1)
    given = options.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    config = ModelConfig(
        family="qwen3", vocab_size=4096, hidden_size=256, intermediate_size=768, num_layers=4, num_heads=8,
        num_kv_heads=2, head_dim=32, qk_norm=True, remat="full",
    )  # fmt: skip
    print("| columns | queries at once | sequence | temporaries, MiB | largest array, MiB | its shape |")
    print("|---|---|---|---|---|---|")
    for columns in given.columns:
        for name, pairs in (("all", columns**2), ("some", PAIRS)):
            decoder.PAIRS = pairs
            for ways in (1, 2, 4, 8):
                program = compile_gradient(config, ways, given.rows, columns, chunk=2048)
                size, shape = largest(program.as_text())
                numbers = (columns, name, ways, *(round(x / 2**20) for x in (memory(program), size)), shape)
                print(f"| {' | '.join(map(str, numbers))} |", flush=True)


if __name__ == "__main__":
    main()
