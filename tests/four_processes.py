"""Four processes of one device against one process of four, by hand: python tests/four_processes.py

Prints the largest relative difference of any metric, and ends with 0 where tokens are equal and it is within 1e-5.
"""

import json
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet
import run_processes
import tiny_run

from jaxrl_lm import GRPOConfig
from jaxrl_lm.options import to_toml

OPTIONS = {"mesh": {"data": 2, "fsdp": 2}, "max_steps": 2, "eval_steps": 2, "prompt_buckets": (16,)}
CLOCK = ("time", "step_time", "tokens_per_second")


def read(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]
    tables = sorted((directory / "completions").glob("step_*.parquet"))
    return kept, [pyarrow.parquet.read_table(path)["completion"].to_pylist() for path in tables]


def main():
    base = Path(tempfile.mkdtemp())
    model, data = tiny_run.save_model(base / "tiny"), tiny_run.write_data(base)
    runs = {"one": (1, 4), "four": (4, 1)}
    for name, (processes, devices) in runs.items():
        config = GRPOConfig(**tiny_run.options(model, data, base / name, **OPTIONS))
        (base / f"{name}.toml").write_text(to_toml(config))
        command = ["grpo", "--config", str(base / f"{name}.toml")]
        if processes == 1:
            ended = run_processes.finish(run_processes.start([command], devices=devices), 3600)
        else:
            ended = run_processes.together(command, processes=processes, devices=devices, timeout=3600)
        if any(one.code for one in ended):
            sys.exit("\n".join(one.errors for one in ended))
    (metrics, tokens), (others, other_tokens) = (read(base / name) for name in runs)
    worst = max(
        (abs(a[name] - b[name]) / (abs(a[name]) + 0.1), a["step"], name)  # 1e-6 where a metric is a rounding error
        for a, b in zip(metrics, others, strict=True)
        for name in a
        if a[name] is not None
    )
    print(f"tokens {'equal' if tokens == other_tokens else 'DIFFER'}, largest difference {worst}")
    sys.exit(0 if tokens == other_tokens and worst[0] < 1e-5 else 1)


if __name__ == "__main__":
    main()
