"""A tiny model, dataset, rewards and options for tests of whole runs; as a script, a run that is killed on the way.

    python tests/tiny_run.py CONFIG.toml CALL terminated new
    python tests/tiny_run.py CONFIG.toml CALL full

CALL is a number of a call of the reward `digits`; runs go into directories of these names beside the file.

The script has the session's 8 devices, so that its run can be resumed in the session, bit for bit.
"""

import asyncio
import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
CALLS = []  # functions that `digits` calls first, with its arguments: a test's way into a running step


def digits(*, completions, **columns):
    """The share of digits among 12 characters."""
    for function in CALLS:
        function(completions=completions, **columns)
    return [sum(c.isdigit() for c in text) / 12 for text in completions]


async def shortness(*, completion_ids, answer, **_):
    """Minus the length; abstains where the answer is odd."""
    await asyncio.sleep(0)
    return [None if total % 2 else -len(ids) / 12 for ids, total in zip(completion_ids, answer, strict=True)]


def plus(*, completions, **_):
    """1 where there is a plus; never trained on."""
    return [float("+" in text) for text in completions]


@contextlib.contextmanager
def compile_cache(directory):
    """XLA's results are kept in a directory meanwhile, for runs that compile the same steps, subprocesses too."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {"jax_compilation_cache_dir": str(directory), "jax_persistent_cache_min_compile_time_secs": 0.1}
    settings["jax_persistent_cache_min_entry_size_bytes"] = -1
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        compilation_cache.reset_cache()
        for name, value in before.items():
            jax.config.update(name, value)


def run(options, config="GRPOConfig", **arguments):
    """train() with these options: its Run and what it printed."""
    import jaxrl_lm

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run = jaxrl_lm.train(getattr(jaxrl_lm, config)(**options), **arguments)
    return run, printed.getvalue()


def bits(tree):
    """Every array of a tree as bytes with its dtype and shape, by path; typed keys as their integers."""
    import jax
    import numpy as np

    def one(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

    return {jax.tree_util.keystr(path): one(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def save_model(directory, *, seed=0, chat_template=None, **changes):
    """A random Llama of two layers with the lab's tokenizer, as a Hugging Face directory."""
    import jax

    from jaxrl_lm.lab.tokenizer import lab_tokenizer
    from jaxrl_lm.models import ModelConfig, build, save

    tokenizer = lab_tokenizer()
    tokenizer.chat_template = chat_template
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
    config = {"vocab_size": len(tokenizer), "head_dim": 16, "tie_embeddings": True, "initializer_range": 0.2}
    model = build(ModelConfig(**shape | config | changes))
    save(directory, model, model.init(jax.random.key(seed)), tokenizer)
    return str(directory)


def write_rows(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(split, count, seed=0):
    from jaxrl_lm.lab.task import make_problems, rows

    return rows(make_problems(count, seed=seed, split=split, digits=2))


def write_data(directory):
    """Sixteen training prompts of at most 6 tokens, but one of 14: one step of an epoch's four needs a longer bucket."""
    train = [*problems("train", 15), {"prompt": "1+1+1+1+1+1+1=", "answer": 7, "operands": [1] * 7}]
    return {
        "train": write_rows(directory / "train.jsonl", train),
        "test": write_rows(directory / "test.jsonl", problems("test", 6)),
        "ood": write_rows(directory / "ood.jsonl", problems("ood", 3)),
    }


def options(model, data, output_dir, /, **changes):
    """Options of a run with everything in it: a KL, four updates a step, three rewards, two buckets."""
    return {
        "model": model,
        "dataset": data["train"],
        "eval_dataset": {"test": data["test"], "ood": data["ood"]},
        "reward": ("tiny_run:digits", "tiny_run:shortness", "tiny_run:plus"),
        "reward_weights": (1.0, 0.5, 0.0),
        "true_reward": "plus",
        "output_dir": str(output_dir),
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "prompts_per_step": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "prompt_buckets": (8, 16),
        "learning_rate": 1e-2,
        "adam_eps": 1e-3,
        "beta": 0.05,
        "num_iterations": 2,
        "minibatch_completions": 8,
        "max_steps": 5,
        "eval_steps": 5,
        "eval_num_generations": 3,
        "probe_prompts": 8,
        "save_steps": 1,
        "save_total_limit": 2,
        "completions_steps": 1,
    } | changes


# --- the script -------------------------------------------------------------------------------------------------------


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_while_saving(checkpoints, step):
    """SIGKILL at a random moment after the checkpoint of a step has been begun."""

    def watch():
        while not list(checkpoints.glob(f"{step}*")):
            time.sleep(0.001)
        time.sleep(random.uniform(0.0, 0.05))
        _kill()

    threading.Thread(target=watch, daemon=True).start()


def _kill_before_first_commit(checkpoints):
    import orbax.checkpoint as ocp

    async def killed(*_, **__):
        while not list(checkpoints.glob("1.*")):
            await asyncio.sleep(0.001)
        _kill()

    ocp.JsonCheckpointHandler.async_save = killed


def _fill_disk(checkpoint):
    """Once a checkpoint is there: files may not grow beyond a size that metrics stay below and the weights do not."""
    while not checkpoint.exists():
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def main(config, call, *names):
    """Runs that are terminated or meet a full disk, and a last one that is killed."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from jaxrl_lm import cli

    checkpoints = {name: Path(config).parent / name / "checkpoints" for name in names}
    grpo = lambda name: cli.main(["grpo", "--config", config, "--output_dir", str(checkpoints[name].parent)])
    calls = []
    at_call = lambda function: lambda **_: calls.append(0) or (len(calls) == call and function())
    if names == ("terminated", "new"):
        CALLS.append(at_call(lambda: os.kill(os.getpid(), signal.SIGTERM)))
        grpo("terminated")
        print("EXIT 0", flush=True)
        _kill_before_first_commit(checkpoints["new"])
        grpo("new")
    else:
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        CALLS.append(at_call(lambda: _fill_disk(checkpoints["full"] / "1")))
        try:
            grpo("full")
        except SystemExit as end:
            print(f"EXIT {end.code}", flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        _kill_while_saving(checkpoints["full"], 3)
        grpo("full")


if __name__ == "__main__":
    sys.modules["tiny_run"] = sys.modules[__name__]  # the reward functions' module has this name
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
