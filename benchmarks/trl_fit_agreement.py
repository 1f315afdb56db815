"""Our training on given rows against that of a released TRL, from text to gradient: tokens, loss and gradient of one batch.

    pip install --no-deps trl accelerate datasets pandas dill multiprocess xxhash
    python benchmarks/trl_fit_agreement.py   # in an environment of its own that also has torch and this package

TRL's own trainers run on the CPU: SFT, DPO, KTO, Reward, and the experimental CPO and ORPO, from the rows to `compute_loss`
and its gradient. Ours is the first step of the commands sft, dpo, reward and prm. Both read the same directory of a random
Llama of two layers. TRL's model is in float64 (SFT, DPO and KTO compute the log-probs in float32 all the same), ours in
float32. TRL 1.16.0 has no PRMTrainer: prm is compared with the loss that it documented, cross-entropy that ignores -100,
through transformers' token classification model.

Equal rows: those whose tokens, and which of them the loss reads, are the same on both sides. Differences are relative to
TRL's number; that of the whole gradient is |ours - theirs| / |theirs|. Exits with an error where one is above 1e-5, where
rows differ, or where a departure that the second table claims is not there. docs/benchmarks.md holds the output.
"""

import collections
import dataclasses
import functools
import logging
import math
import tempfile
import time
from typing import Any

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
import torch
import transformers
import trl
from tokenizers.processors import TemplateProcessing
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import jaxrl_lm
from jaxrl_lm import models
from jaxrl_lm.data import batch_indices
from jaxrl_lm.dpo import prepare_dpo
from jaxrl_lm.fit import updates
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.models.hf_table import write_plan
from jaxrl_lm.reward_fit import prepare_prm, prepare_reward
from jaxrl_lm.sft import prepare_sft

TOLERANCE = 1e-5
N = 12
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
IGNORED = -100


# --- rows -------------------------------------------------------------------------------------------------------------


def demonstrations(seed=0, skip=0.3):
    """Prompts such as `47+38=` with completions of 2 to 25 characters."""
    given = demonstration_rows(make_problems(N, seed=0, digits=2), seed=seed, skip=skip)
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in given]


def ended():
    """The same; two completions bring their eos."""
    return [row | {"completion": row["completion"] + "<eos>" * (n < 2)} for n, row in enumerate(demonstrations())]


def texts():
    return [{"text": row["prompt"] + row["completion"]} for row in demonstrations()]


def turn(role, text):
    return {"role": role, "content": text}


def conversations():
    """Two assistant turns each."""
    return [
        {"messages": [turn("user", row["prompt"]), turn("assistant", row["completion"]), turn("user", f"{n}+1="),
                      turn("assistant", f"#{n + 1}")]}
        for n, row in enumerate(demonstrations())
    ]  # fmt: skip


def chats():
    """Prompt and completion as messages."""
    return [
        {"prompt": [turn("user", row["prompt"])], "completion": [turn("assistant", row["completion"])]}
        for row in demonstrations()
    ]


def pairs(prompt=None):
    """Working against a bare, wrong answer; the first prompt is long."""
    good, bad = demonstrations(skip=0.0), demonstrations(seed=1, skip=0.7)
    rows = [
        {"prompt": prompt or one["prompt"], "chosen": one["completion"], "rejected": two["completion"] + "0"}
        for one, two in zip(good, bad, strict=True)
    ]
    return rows if prompt else [rows[0] | {"prompt": "1+1+1+1+1+1+1+1="}, *rows[1:]]


def margins():
    return [row | {"margin": 0.25 * (n % 4)} for n, row in enumerate(pairs())]


def pair_chats():
    """Whole conversations whose common beginning is the prompt."""
    return [
        {side: [turn("user", row["prompt"]), turn("assistant", row[side])] for side in ("chosen", "rejected")}
        for row in pairs()
    ]


def judged():
    return [row | {"label": n % 3 != 0} for n, row in enumerate(demonstrations())]


def steps():
    """Working in steps, of which some are called wrong."""
    found = [row | {"completions": row["completion"].split(";")} for row in demonstrations(skip=0.0)]
    return [
        {"prompt": row["prompt"], "completions": row["completions"],
         "labels": [(n + k) % 3 != 0 for k in range(len(row["completions"]))]}
        for n, row in enumerate(found)
    ]  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] }}END"
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
TEMPLATES = {
    "plain": CHAT.replace("BEGIN", OPEN).replace("END", "<eos>" + CLOSE),
    "newline": CHAT.replace("BEGIN", OPEN).replace("END", "<eos>\n" + CLOSE),
    "unended": CHAT.replace("BEGIN", OPEN).replace("END", CLOSE + "<eos>\n"),
}


def make_tokenizer(kind, template):
    """`characters`: the lab's, without BOS. Else byte pairs with a BOS: `pieces` never cross = : ; # or a line's end,
    `merging` cross everything, so that a prompt's last token may merge with the completion; `ending`: pieces, and the
    tokenizer's own rule puts an eos at the end."""
    if kind == "characters":
        return lab_tokenizer()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    edges = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[=:;#\n]"), behavior="isolated")
    whole = tokenizers.pre_tokenizers.Split(tokenizers.Regex("\n"), behavior="isolated")
    backend.pre_tokenizer = whole if kind == "merging" else edges
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=96, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([row["text"] + "user:assistant:\n" for row in texts()], trainer)
    single = "<bos> $A <eos>" if kind == "ending" else "<bos> $A"
    backend.post_processor = TemplateProcessing(
        single=single, special_tokens=[(name, backend.token_to_id(name)) for name in ("<bos>", "<eos>")]
    )
    words = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **words
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@functools.cache
def write_model(root, kind, template, head, seed):
    """A random model as a directory; head None: a language model, 1: a reward model, 2: a process reward model."""
    directory = f"{root}/{kind}-{template}-{head}-{seed}"
    tokenizer = make_tokenizer(kind, template)
    config = {"vocab_size": len(tokenizer), "head_dim": 16, "tie_embeddings": True, "initializer_range": 0.2}
    model = models.build(models.ModelConfig(**SHAPE, **config))
    params = model.init(jax.random.key(seed))
    if head is None:
        models.save(directory, model, params, tokenizer)
        return directory
    layer = models.init_head(model.config, labels=head, bias=head == 2, key=jax.random.key(seed + 1))
    whole = {"trunk": models.trunk_params(params), "head": jax.tree.map(lambda leaf: leaf + 0.1, layer)}
    trunk = models.trunk_model(model)
    if head == 1:
        models.save_reward_model(directory, trunk, whole, tokenizer, append_eos=True)
    else:
        models.save_process_model(directory, trunk, whole, tokenizer, step_separator=";")
    return directory


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: the rows, the options of both, and where we differ on purpose, in what and under which changes
    the two agree."""

    title: str
    trainer: str  # SFT, DPO, KTO, Reward, PRM, CPO, ORPO
    rows: Any
    trl: dict[str, Any] = dataclasses.field(default_factory=dict)
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str = "pieces"
    template: str = "plain"
    reverse: bool = False  # TRL gets the rows in the reverse order of our batch
    departs: str = ""
    instead: dict[str, Any] | None = None


MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
KTO = {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}
CUT = {"max_length": 14}
KEPT = CUT | {"long_rows": "keep_start"}
BARE = {"center_rewards_coefficient": 0.01}

AGREE = [
    Case(title="prompt and completion", trainer="SFT", rows=ended),
    Case(title="the same, cut", trainer="SFT", rows=ended, trl=CUT, ours=KEPT),
    Case(title="the same, by characters", trainer="SFT", rows=ended, tokenizer="characters"),
    Case(
        title="the same, packed", trainer="SFT", rows=ended,
        trl={"packing": True, "packing_strategy": "bfd", "max_length": 48}, ours={"packing": True, "max_length": 48},
    ),
    Case(title="text", trainer="SFT", rows=texts),
    Case(title="conversations", trainer="SFT", rows=conversations, trl={"assistant_only_loss": True}),
    Case(title="chat prompt and completion", trainer="SFT", rows=chats),
    Case(title="pairs", trainer="DPO", rows=pairs),
    Case(title="pairs, cut", trainer="DPO", rows=pairs, trl=CUT | {"loss_type": ["ipo"]}, ours=KEPT | {"loss_type": ("ipo",)}),
    Case(title="pairs", trainer="DPO", rows=pairs, trl=MPO, ours={k: tuple(v) for k, v in MPO.items()}),
    Case(title="conversations that share a prompt", trainer="DPO", rows=pair_chats),
    Case(title="judged completions", trainer="KTO", rows=judged, trl=KTO, ours=KTO, reverse=True),
    Case(title="pairs", trainer="Reward", rows=pairs),
    Case(title="pairs with a margin", trainer="Reward", rows=margins, trl=BARE, ours=BARE),
    Case(title="conversations that share a prompt", trainer="Reward", rows=pair_chats),
    Case(title="steps", trainer="PRM", rows=steps, ours={"step_separator": ";"}),
    Case(title="pairs", trainer="CPO", rows=pairs, ours={"loss_type": ("cpo",), "rpo_alpha": None}),
    Case(
        title="pairs", trainer="CPO", rows=pairs, trl={"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0},
        ours={"loss_type": ("simpo",), "beta": 2.0},
    ),
    Case(
        title="pairs", trainer="CPO", rows=pairs, trl={"loss_type": "simpo", "cpo_alpha": 0.5, "beta": 2.0},
        ours={"loss_type": ("simpo",), "beta": 2.0, "rpo_alpha": 0.5},
    ),
    Case(
        title="pairs, prompts of one token", trainer="ORPO", rows=functools.partial(pairs, "="),
        ours={"loss_type": ("orpo",)}, tokenizer="characters",
    ),
]  # fmt: skip

TURNS = {"assistant_only_loss": True}
DEPART = [
    Case(
        title="tokens that merge across the boundary", trainer="SFT", rows=demonstrations, tokenizer="merging",
        departs="ours tokenises the prompt alone, as sampling meets it; TRL both as one text", instead={"tokenizer": "pieces"},
    ),
    Case(
        title="the same", trainer="DPO", rows=pairs, tokenizer="merging", departs="the same",
        instead={"tokenizer": "pieces"},
    ),
    Case(
        title="a tokenizer that adds an eos by itself", trainer="SFT", rows=demonstrations, tokenizer="ending",
        departs="one eos; TRL's rows end with two, and both are trained", instead={"tokenizer": "pieces"},
    ),
    Case(
        title="a line's end after eos in the generation block", trainer="SFT", rows=conversations, trl=TURNS,
        template="newline", departs="trained up to the eos; TRL trains what nobody samples", instead={"template": "plain"},
    ),
    Case(
        title="the eos outside the generation block", trainer="SFT", rows=conversations, trl=TURNS, template="unended",
        departs="the eos is trained; TRL warns and does not", instead={"template": "plain"},
    ),
    Case(
        title="a line's end after the completion's eos", trainer="SFT", rows=chats, template="newline",
        departs="a completion ends with its eos; TRL trains what the template writes after it", instead={"template": "plain"},
    ),
    Case(
        title="long rows by default", trainer="SFT", rows=ended, trl=CUT, ours=CUT,
        departs="dropped; TRL cuts their end, and with it the eos", instead={"ours": KEPT},
    ),
    Case(
        title="long rows by default", trainer="Reward", rows=pairs, trl=CUT, ours=CUT,
        departs="cut, as in DPO; TRL drops them", instead={"ours": CUT | {"long_rows": "drop"}},
    ),
    Case(
        title="KL rows", trainer="KTO", rows=judged, trl=KTO, ours=KTO,
        departs="a prompt with the completion of the next row; TRL of the one before", instead={"reverse": True},
    ),
    Case(
        title="prompt tokens", trainer="ORPO", rows=functools.partial(pairs, "1+1="), tokenizer="characters",
        ours={"loss_type": ("orpo",)}, departs="the sft term is over the completion; TRL's over the prompt too",
        instead={"rows": functools.partial(pairs, "=")},
    ),
    Case(
        title="a prompt that fills max_length", trainer="CPO", rows=pairs, tokenizer="characters",
        trl={"loss_type": "simpo", "cpo_alpha": 0.0, "max_length": 16}, ours={"loss_type": ("simpo",), "max_length": 16},
        departs="left out and counted; TRL divides by its 0 tokens",
        instead={"trl": {"loss_type": "simpo", "cpo_alpha": 0.0, "max_length": 20}, "ours": {"loss_type": ("simpo",), "max_length": 20}},
    ),
]  # fmt: skip


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
    options = {"model": directory, "dataset": "rows", "output_dir": f"{root}/ours", "max_grad_norm": 0.0, "max_steps": 1}
    options |= case.ours | ({"loss_type": ("kto",)} if case.trainer == "KTO" else {})
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
        return documented_prm(case, root, rows)
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


def documented_prm(case, root, rows):
    """Prompt, then each step with its separator, each tokenised on its own; the label at the last token of each."""
    directory = write_model(root, case.tokenizer, case.template, 2, 0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForTokenClassification.from_pretrained(directory, dtype=torch.float64)
    plain = functools.partial(tokenizer, add_special_tokens=False)
    separator = plain(case.ours["step_separator"])["input_ids"]
    given, labels = [], []
    for row in rows:
        prompt = tokenizer(row["prompt"])["input_ids"]
        pieces = [plain(step)["input_ids"] + separator for step in row["completions"]]
        marks = [[IGNORED] * (len(piece) - 1) + [int(label)] for piece, label in zip(pieces, row["labels"], strict=True)]
        given.append(prompt + sum(pieces, []))
        labels.append([IGNORED] * len(prompt) + sum(marks, []))
    pad = lambda lists, value: torch.tensor([one + [value] * (max(map(len, lists)) - len(one)) for one in lists])
    attention = pad([[1] * len(one) for one in given], 0)
    logits = model(input_ids=pad(given, tokenizer.pad_token_id), attention_mask=attention).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), pad(labels, IGNORED).flatten(), ignore_index=IGNORED)
    loss.backward()
    read = [((tuple(ids), tuple(mark != IGNORED for mark in marks)),) for ids, marks in zip(given, labels, strict=True)]
    return Result(read, loss.item(), torch_grads(model))


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
        cut = lambda name: [batch[name][0, a:b] for a, b in zip(starts[:-1], starts[1:], strict=True)]
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


def options_of(case):
    words = [f"{case.trainer}Trainer" if case.trainer != "PRM" else "documented loss of PRMTrainer"]
    return ", ".join(words + [f"`{name}={value}`" for name, value in case.trl.items()])


def main():
    started = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    versions = f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, jax {jax.__version__}; one batch of {N} rows\n")
    failures = []
    exact = lambda gaps: " | ".join(f"{gap:.0e}" for gap in gaps)
    with tempfile.TemporaryDirectory() as root:
        print("| rows | TRL | equal rows | TRL's loss | ours | loss | gradient norm | gradient |")
        print("|---|---|---|---|---|---|---|---|")
        for case in AGREE:
            found = compare(case, root)
            numbers = f"{found.theirs:.7f} | {found.ours:.7f} | {exact(found.gaps)}"
            print(f"| {case.title} | {options_of(case)} | {found.equal} | {numbers} |", flush=True)
            failures += [] if found.agrees else [f"{case.trainer}, {case.title}"]
        print("\n| rows | TRL | equal rows | TRL's loss | ours | ours against TRL | then equal rows | loss | gradient |")
        print("|---|---|---|---|---|---|---|---|---|")
        for case in DEPART:
            before, after = compare(case, root), compare(dataclasses.replace(case, **case.instead), root)
            numbers = f"{before.equal} | {before.theirs:.4f} | {before.ours:.4f} | {case.departs}"
            then = f"{after.equal} | {exact(after.gaps[::2])}"
            print(f"| {case.title} | {options_of(case)} | {numbers} | {then} |", flush=True)
            failures += [] if after.agrees and not before.agrees else [f"{case.trainer}, {case.title}"]
    print(f"\n{time.perf_counter() - started:.0f} s")
    if failures:
        raise SystemExit(f"not as expected: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
