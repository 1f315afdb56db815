"""Our training on given rows against that of a released TRL, from text to gradient: tokens, loss and gradient of one batch.

    pip install --no-deps trl accelerate datasets pandas dill multiprocess xxhash
    python benchmarks/trl_fit_agreement.py OLDER   # in an environment of its own that also has torch and this package

TRL's own trainers run on the CPU: SFT, DPO, KTO, Reward, and the experimental CPO and ORPO, from the rows to `compute_loss`
and its gradient. Ours is the first step of the commands sft, dpo, reward and prm. Both read the same directory of a random
Llama of two layers. TRL's model is in float64 (but the log-probs of SFT, DPO and KTO, which TRL computes in float32), ours
in float32. TRL 1.16.0 has no PRMTrainer: OLDER is the Python of an environment with TRL 0.23.1, whose PRMTrainer prm is
compared with (`trl_prm_trainer.py`).

Equal rows: those whose tokens, and which of them the loss reads, are the same on both sides. Differences are relative to
TRL's number; that of the whole gradient is |ours - theirs| / |theirs|. Exits with an error where one is above 1e-5, where
rows differ, or where a departure that the second table claims is not there. docs/benchmarks.md holds the output.
"""

import collections
import dataclasses
import itertools
import json
import logging
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
import trl
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trl_fit_agreement_cases import AGREE, DEPART, N, write_model

import jaxrl_lm
from jaxrl_lm.data import batch_indices
from jaxrl_lm.dpo import prepare_dpo
from jaxrl_lm.fit import updates
from jaxrl_lm.models.hf_table import write_plan
from jaxrl_lm.reward_fit import prepare_prm, prepare_reward
from jaxrl_lm.sft import prepare_sft

TOLERANCE = 1e-5
IGNORED = -100


# --- both sides -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    """What one side made of the rows."""

    rows: list[tuple]  # of each row and side: tokens, and which of them the loss reads
    loss: float
    grads: dict[str, np.ndarray]  # by Hugging Face's names


def ours_of(case, root, rows):
    """The first step of our command: updates() is what its loop takes."""
    head = {"Reward": 1, "PRM": 2}.get(case.trainer)
    directory = write_model(root, case.tokenizer, case.template, head, 0)
    kinds = {
        "SFT": (jaxrl_lm.SFTConfig, prepare_sft), "Reward": (jaxrl_lm.RewardConfig, prepare_reward),
        "PRM": (jaxrl_lm.PRMConfig, prepare_prm),
    }  # fmt: skip
    config, prepare = kinds.get(case.trainer, (jaxrl_lm.DPOConfig, prepare_dpo))
    options = {
        "model": directory, "dataset": "rows", "output_dir": f"{root}/ours", "max_grad_norm": 0.0, "max_steps": 1,
        "length_buckets": (64,),  # one shape, so that cases share what is compiled
    } | case.ours  # fmt: skip
    if case.trainer == "KTO":
        options["loss_type"] = ("kto",)
    if case.trainer in ("DPO", "KTO"):
        options["reference_model"] = write_model(root, case.tokenizer, case.template, None, 1)
    setup = prepare(config(**options, rows_per_step=len(rows)), dataset=rows)
    sides = setup.source.table.data.sides
    if len(sides) != len(rows):  # rows that were left out or packed: all others are the batch
        setup = prepare(config(**options, rows_per_step=len(sides)), dataset=rows)
    _, state, values = next(updates(setup))
    first = optax.tree.get(state.opt_state, "mu")  # Adam's first moment after one step
    grads = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) / (1 - setup.config.adam_b1), first)
    return Result(read_sides(sides), values["loss"], by_name(setup.model, grads))


def read_sides(sides):
    """Rows of our table; the parts of a packed one are rows of their own."""
    out = []
    for row in sides:
        parts = []
        for one in row:
            segments = one.segments or [1] * len(one.ids)
            for number in range(1, max(segments) + 1):
                chosen = [index for index, segment in enumerate(segments) if segment == number]
                parts.append((tuple(one.ids[i] for i in chosen), tuple(one.mask[i] for i in chosen)))
        out += [(part,) for part in parts] if len(row) == 1 else [tuple(parts)]
    return out


def by_name(model, grads):
    """Our gradient as Hugging Face's tensors."""
    (tree,) = grads.values()
    trunk = jax.tree.map(jnp.asarray, tree.get("trunk", tree))
    out = {tensor.name: fetch() for tensor, fetch in write_plan(trunk, model.specs, "float32")}
    names = {"kernel": "score.weight", "bias": "score.bias"}
    return out | {names[name]: value.T for name, value in tree.get("head", {}).items()}


CLASSES = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig), "DPO": (trl.DPOTrainer, trl.DPOConfig),
    "KTO": (trl.KTOTrainer, trl.KTOConfig), "Reward": (trl.RewardTrainer, trl.RewardConfig),
    "CPO": (CPOTrainer, CPOConfig), "ORPO": (ORPOTrainer, ORPOConfig),
}  # fmt: skip


def theirs_of(case, root, rows):
    """TRL's trainer on the rows: its first batch, loss and gradient."""
    if case.trainer == "PRM":
        return older_prm(case, root, rows)
    directory = write_model(root, case.tokenizer, case.template, 1 if case.trainer == "Reward" else None, 0)
    kind = transformers.AutoModelForCausalLM
    if case.trainer == "Reward":
        kind = transformers.AutoModelForSequenceClassification
    trainer_class, config = CLASSES[case.trainer]
    args = config(
        output_dir=f"{root}/trl", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=len(rows), train_sampling_strategy="sequential", **case.trl,
    )  # fmt: skip
    given = {}
    if case.trainer in ("DPO", "KTO"):
        reference = write_model(root, case.tokenizer, case.template, None, 1)
        given["ref_model"] = transformers.AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64)
    model = kind.from_pretrained(directory, dtype=torch.float64)
    trainer = trainer_class(
        model=model, args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.AutoTokenizer.from_pretrained(directory), **given,
    )  # fmt: skip
    (batch,) = trainer.get_train_dataloader()
    found = read_batch(batch)
    model.train()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return Result(found, loss.item(), torch_grads(model))


def older_prm(case, root, rows):
    """What the PRMTrainer of the older release makes of the rows."""
    directory = write_model(root, case.tokenizer, case.template, 2, 0)
    given, out = f"{root}/steps.json", f"{root}/prm.npz"
    Path(given).write_text(json.dumps(rows))
    script = Path(__file__).with_name("trl_prm_trainer.py")
    subprocess.run([sys.argv[1], script, directory, given, case.ours["step_separator"], out], check=True)
    with np.load(out) as found:
        grads = {name.removeprefix("grad "): found[name] for name in found.files if name.startswith("grad ")}
        read = [
            ((tuple(ids), tuple(label != IGNORED for label in labels)),)
            for ids, labels in json.loads(str(found["rows"]))
        ]
        return Result(read, float(found["loss"]), grads)


def torch_grads(model):
    empty = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    return {name: empty(p).double().numpy() for name, p in model.named_parameters()}


def read_batch(batch):
    """The rows of TRL's batch, padding taken off; a mark at a row's first token, which nothing predicts, is none."""
    if "chosen_input_ids" in batch:  # CPO and ORPO
        names = ("input_ids", "attention_mask", "labels")
        columns = [[*batch[f"chosen_{name}"], *batch[f"rejected_{name}"]] for name in names]
        marks = [labels != IGNORED for labels in columns[2]]
    elif "position_ids" in batch:  # packed: one row of all
        starts = [*torch.nonzero(batch["position_ids"][0] == 0)[:, 0].tolist(), batch["position_ids"].shape[1]]
        cut = lambda name: [batch[name][0, a:b] for a, b in itertools.pairwise(starts)]
        columns = [cut("input_ids"), [torch.ones_like(ids) for ids in cut("input_ids")]]
        marks = [labels != IGNORED for labels in cut("labels")]
    else:
        columns = [list(batch["input_ids"]), list(batch["attention_mask"])]
        if "labels" in batch:
            marks = [labels != IGNORED for labels in batch["labels"]]
        elif "completion_mask" in batch:
            marks = [mask == 1 for mask in batch["completion_mask"]]
        else:  # a reward model reads the last token
            marks = [torch.arange(len(real)) == real.sum() - 1 for real in columns[1]]
    sides = []
    for ids, real, mark in zip(columns[0], columns[1], marks, strict=True):
        mark = [bool(value) and index > 0 for index, value in enumerate(mark[real == 1])]
        sides.append((tuple(ids[real == 1].tolist()), tuple(mark)))
    if not {"labels", "position_ids", "KL_input_ids"} & set(batch):  # pairs: all chosen before all rejected
        return list(zip(sides[: len(sides) // 2], sides[len(sides) // 2 :], strict=True))
    return [(side,) for side in sides]


# --- comparison -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    equal: str
    same: bool  # every row
    theirs: float
    ours: float
    gaps: tuple[float, float, float]  # loss, norm of the gradient, whole gradient

    @property
    def agrees(self):
        return self.same and all(gap <= TOLERANCE for gap in self.gaps)


def compare(case, root):
    rows = case.rows()
    order = batch_indices(len(rows), seed=0, position=0, count=len(rows))
    order = order[::-1] if case.reverse else order
    ours, theirs = ours_of(case, root, rows), theirs_of(case, root, [rows[index] for index in order])
    if ours.grads.keys() != theirs.grads.keys():
        raise SystemExit(f"{case.title}: the parameters differ: {sorted(ours.grads.keys() ^ theirs.grads.keys())}")
    norm = lambda grads: math.sqrt(sum(float(np.square(grad).sum()) for grad in grads.values()))
    apart = norm({name: ours.grads[name] - grad for name, grad in theirs.grads.items()})
    scale, size = norm(theirs.grads), norm(ours.grads)
    gaps = (abs(ours.loss - theirs.loss) / abs(theirs.loss), abs(size - scale) / scale, apart / scale)
    shared = (collections.Counter(ours.rows) & collections.Counter(theirs.rows)).total()
    most = max(len(ours.rows), len(theirs.rows))
    return Found(f"{shared} of {most}", shared == most, theirs.loss, ours.loss, tuple(map(float, gaps)))


COMMANDS = {"SFT": "sft", "Reward": "reward", "PRM": "prm"}


def shown(case):
    """Ours and TRL's with their options."""
    plain = lambda value: ",".join(map(str, value)) if isinstance(value, tuple) else value
    write = lambda name, options: ", ".join([name, *(f"`{key}={plain(value)}`" for key, value in options.items())])
    ours = {"loss_type": "kto"} | case.ours if case.trainer == "KTO" else case.ours
    trainer = "PRMTrainer of 0.23.1" if case.trainer == "PRM" else f"{case.trainer}Trainer"
    return f"{case.title} | {write(COMMANDS.get(case.trainer, 'dpo'), ours)} | {write(trainer, case.trl)}"


def main():
    if len(sys.argv) != 2:
        raise SystemExit("give the Python of an environment with trl 0.23.1, which has a PRMTrainer")
    started = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    versions = f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, jax {jax.__version__}; one batch of {N} rows\n")
    failures, done = [], {}
    exact = lambda gaps: " | ".join(f"{gap:.0e}" for gap in gaps)
    with tempfile.TemporaryDirectory() as root:
        keep_compiled(f"{root}/xla")

        def compared(case):
            key = repr(dataclasses.replace(case, title="", departs="", instead=None))
            done[key] = done[key] if key in done else compare(case, root)
            return done[key]

        print("| rows | ours | TRL | equal rows | TRL's loss | our loss | loss | gradient norm | gradient |")
        print("|---|---|---|---|---|---|---|---|---|")
        for case in AGREE:
            found = compared(case)
            numbers = f"{found.equal} | {found.theirs:.7f} | {found.ours:.7f} | {exact(found.gaps)}"
            print(f"| {shown(case)} | {numbers} |", flush=True)
            failures += [] if found.agrees else [f"{case.trainer}, {case.title}"]
        print(
            "\n| rows | ours | TRL | equal rows | TRL's loss | our loss | ours, and TRL's | then equal | loss | gradient |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for case in DEPART:
            before, after = compared(case), compared(dataclasses.replace(case, **case.instead))
            numbers = f"{before.equal} | {before.theirs:.4f} | {before.ours:.4f} | {case.departs}"
            print(f"| {shown(case)} | {numbers} | {after.equal} | {exact(after.gaps[::2])} |", flush=True)
            failures += [] if after.agrees and not before.agrees else [f"{case.trainer}, {case.title}"]
    print(f"\n{time.perf_counter() - started:.0f} s")
    if failures:
        raise SystemExit(f"not as expected: {'; '.join(failures)}")


def keep_compiled(directory):
    """Cases of one shape share what XLA makes, without its slow optimisations."""
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


if __name__ == "__main__":
    main()
