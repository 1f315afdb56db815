"""Our losses on preferences against those of a released TRL on random batches: largest differences of value and gradient.

    pip install --no-deps trl accelerate datasets pandas dill multiprocess xxhash
    python benchmarks/trl_dpo_agreement.py   # in an environment of its own that also has torch and this package

TRL's own code runs: `_compute_loss` of DPOTrainer and KTOTrainer, `get_batch_loss_metrics` of CPOTrainer and ORPOTrainer.
A trainer without a model stands in for `self`: it returns the batch's log-probs or logits where TRL would run one. Ours are
the functions of `jaxrl_lm.algos.preference`, averaged over the pairs. Both get the same float32 logits.

The value's difference is relative to the larger of |loss| and Σ |∂loss/∂logit|; that of the gradient (in the logits) is the
largest one over the largest entry. Exits with an error where one is above 1e-5, or where a departure that the second table
claims is not there. docs/benchmarks.md holds the output.
"""

import collections
import dataclasses
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
import trl
from accelerate import Accelerator
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from jaxrl_lm.algos import preference
from jaxrl_lm.metrics import result

SEEDS = range(5)
TOLERANCE = 1e-5
N, T, V, PROMPT = 12, 16, 7, 4  # pairs, columns, vocabulary, longest prompt
PAD = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: options of TRL, the same choice in our words, and what to draw."""

    trl: dict[str, Any]
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    trainer: str = "DPO"  # or KTO, CPO, ORPO
    reference: bool = True
    token_mean: bool = False  # our sft terms over the batch's tokens
    draw: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Where we differ on purpose: in what, and under which changes the two agree.
    departs: str = ""
    instead: dict[str, Any] | None = None


def dpo(loss, departs="", instead=None, draw=None, **options):
    """A case of DPOTrainer whose options have the same names here, but for those of the divergence."""
    names = {"f_divergence_type": "f_divergence", "f_alpha_divergence_coef": "f_alpha"}
    ours = {"variant": loss} | {names.get(k, k): v for k, v in options.items()}
    return Case(trl={"loss_type": loss} | options, ours=ours, departs=departs, instead=instead, draw=draw or {})


FLAT = {"beta": 0.5}
TAIL = {"ld_alpha": 0.4}
SMOOTH = {"label_smoothing": 0.1}
JS = {"f_divergence_type": "js_divergence"}
FORWARD = {"f_divergence_type": "forward_kl"}
ALPHA = {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5}
MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}


def cpo(variant, token_mean=True, **options):
    """A case of CPOTrainer, whose loss is ours of that variant plus `cpo_alpha` times the token mean of sft."""
    theirs = {"loss_type": {"cpo": "sigmoid"}.get(variant, variant)} | options
    names = {"cpo_alpha": "sft_weight", "simpo_gamma": "gamma"}
    ours = {names.get(k, k): v for k, v in options.items()}
    if variant == "cpo":
        ours |= {"variant": "cpo"}
    elif theirs["cpo_alpha"]:
        ours |= {"parts": ((variant, 1.0), ("sft", ours.pop("sft_weight")))}
    else:
        ours = {k: v for k, v in ours.items() if k != "sft_weight"} | {"variant": variant}
    token_mean = token_mean and options["cpo_alpha"] > 0
    return Case(trl=theirs, ours=ours, trainer="CPO", reference=False, token_mean=token_mean)


AGREE = [
    dpo("sigmoid"), dpo("sigmoid", **FLAT, **TAIL), dpo("sigmoid", **FORWARD), dpo("sigmoid", **JS),
    dpo("sigmoid", **ALPHA), dpo("sigmoid_norm", beta=2.0), dpo("sigmoid_norm", beta=2.0, **JS), dpo("hinge", **FLAT),
    dpo("hinge", **JS), dpo("ipo"), dpo("ipo", **FORWARD, **TAIL), dpo("robust", **SMOOTH),
    dpo("robust", **SMOOTH, **ALPHA, **FLAT), dpo("exo_pair", label_smoothing=1e-3), dpo("exo_pair", **SMOOTH, **JS),
    dpo("nca_pair"), dpo("nca_pair", **FLAT, **TAIL), dpo("bco_pair", **FLAT), dpo("aot"),
    dpo("aot", **SMOOTH, **TAIL), dpo("aot_unpaired", **FLAT), dpo("aot_unpaired", **SMOOTH), dpo("apo_zero", **FLAT),
    dpo("apo_down", **FLAT), dpo("sppo_hard"), dpo("discopop"), dpo("discopop", discopop_tau=0.5, beta=0.5, **JS),
    dataclasses.replace(dpo("sft"), token_mean=True),
    Case(trl=MPO, ours={"parts": preference.MPO}, token_mean=True),
    cpo("cpo", cpo_alpha=1.0), cpo("cpo", cpo_alpha=0.5, **SMOOTH), cpo("simpo", cpo_alpha=0.0, beta=2.0),
    cpo("simpo", cpo_alpha=1.0, beta=2.0, simpo_gamma=1.0), cpo("hinge", cpo_alpha=0.0), cpo("ipo", cpo_alpha=0.0),
    Case(
        trl={"beta": 0.1}, ours={"variant": "orpo"}, trainer="ORPO", reference=False, token_mean=True,
        draw={"prompt": 1},
    ),
    Case(trl={"loss_type": "kto"}, trainer="KTO"),
    Case(
        trl={"loss_type": "kto", "beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}, trainer="KTO",
        ours={"desirable_weight": 1.3, "undesirable_weight": 0.7}, draw={"drift": 1.0},
    ),
    Case(trl={"loss_type": "apo_zero_unpaired"}, trainer="KTO", ours={"kl": 0.0}),
]  # fmt: skip

FAR = {"far": -2000.0}
DEPART = [
    dpo("sigmoid", "ours is cDPO; TRL's sigmoid does not read it", {"ours": {"variant": "sigmoid"}}, **SMOOTH),
    dpo("sft", "each pair's own mean over its tokens; TRL the batch's mean over tokens", {"token_mean": True}),
    dataclasses.replace(
        cpo("cpo", cpo_alpha=1.0), token_mean=False, departs="the same in the sft term", instead={"token_mean": True}
    ),
    Case(
        trl={"beta": 0.1}, ours={"variant": "orpo"}, trainer="ORPO", reference=False, token_mean=True,
        departs="the sft term is over the completion; TRL's over the prompt too", instead={"draw": {"prompt": 1}},
    ),
    dpo(
        "discopop", "margin of −2000 nats, reference's chosen token: TRL's exp overflows to NaN", {"draw": {}}, FAR,
    ),
    dpo("sigmoid", "the same log-ratio: TRL's exp overflows; ours goes on along its tangent from 20 nats", {"draw": {}},
        FAR, **FORWARD),
    dpo("sigmoid", "the same: TRL's exponent is cut at 80, where its gradient is 0", {"draw": {}}, FAR, **ALPHA),
    dpo("sigmoid", "a rejected side without a token: no comparison, gradient 0; TRL learns from the other side",
        {"draw": {}}, {"cut": True}),
]  # fmt: skip


def draw(seed, *, prompt=PROMPT, drift=0.4, far=None, cut=False):
    """Rows [2N T] in TRL's order, all chosen before all rejected: ids, masks, logits, a reference, labels, a KL batch."""
    rng = np.random.default_rng(seed)
    starts = np.tile(rng.integers(1, prompt + 1, N), 2)
    ends = starts + rng.integers(1, T - prompt + 1, 2 * N)
    if cut:
        ends[N] = starts[N]
    columns = np.arange(T)[None, :]
    attention = columns < ends[:, None]
    mask = attention & (columns >= starts[:, None])
    ids = np.where(attention, rng.integers(1, V, (2 * N, T)), PAD)
    logits = rng.normal(0, 1.5, (2 * N, T, V)).astype(np.float32)
    chances = torch.log_softmax(torch.tensor(logits), -1).numpy()
    logprobs = np.zeros((2 * N, T), np.float32)
    logprobs[:, 1:] = np.take_along_axis(chances[:, :-1], ids[:, 1:, None], -1)[..., 0]
    ref = (logprobs + rng.normal(0, drift, (2 * N, T))).astype(np.float32)
    if far is not None:
        ref[0, starts[0]] -= far
    kl = (-rng.gamma(2.0, 0.5, (2, 2 * N, T))).astype(np.float32)
    kl[0] += 0.3  # the policy's
    labels = rng.random(2 * N) < 0.6
    return {"ids": ids, "attention": attention, "mask": mask, "logits": logits, "ref": ref, "kl": kl, "labels": labels}


class Model:
    """A model as far as TRL's losses ask of it: the outputs that a function gives for a call's arguments."""

    training, is_gradient_checkpointing = True, False

    def __init__(self, outputs: Callable[..., Any]):
        self.outputs = outputs

    def __call__(self, *args, **kwargs):
        return self.outputs(*args, **kwargs)


def fused(logprobs, labels):
    """The outputs of TRL's fused head: log-probs of tokens 1, 2, …, 0 where there is no label."""
    shown = torch.where(labels[:, 1:] != -100, logprobs[:, 1:], 0.0)
    nothing = torch.zeros_like(shown)
    return types.SimpleNamespace(log_probs=shown, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())


def stand_in(kind, config, case, model, ref_model):
    """TRL's trainer without a model: everything that its loss reads is set here, anything else would be an error."""
    with tempfile.TemporaryDirectory() as directory:
        args = config(output_dir=directory, use_cpu=True, bf16=False, report_to="none", **case.trl)
    trainer = object.__new__(kind)
    loss_types = (
        [args.loss_type] if isinstance(getattr(args, "loss_type", None), str) else getattr(args, "loss_type", None)
    )
    vars(trainer).update(vars(args))
    vars(trainer).update(
        args=args, model=model, ref_model=ref_model, accelerator=Accelerator(cpu=True), aux_loss_enabled=False,
        precompute_ref_logps=False, loss_types=loss_types, is_encoder_decoder=False, pad_token_id=PAD,
        padding_value=PAD, calculate_KL=case.trainer == "KTO" and args.loss_type == "kto", _total_train_tokens=0,
        _tp_size=1, _metrics={"train": collections.defaultdict(list)},
    )  # fmt: skip
    if case.trainer == "DPO":
        trainer.loss_weights = args.loss_weights or [1.0] * len(loss_types)
    return trainer


def theirs(case, x):
    """TRL's loss, its gradient in the logits [2N T V] and its metrics."""
    logits = torch.tensor(x["logits"], requires_grad=True)
    ids, attention, mask = (torch.tensor(x[name].astype(np.int64)) for name in ("ids", "attention", "mask"))
    ref = torch.tensor(x["ref"])

    def logprobs():
        chances = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([torch.zeros(2 * N, 1), chances], 1)

    if case.trainer in ("CPO", "ORPO"):
        kind, config = (CPOTrainer, CPOConfig) if case.trainer == "CPO" else (ORPOTrainer, ORPOConfig)
        model = Model(lambda *_, **__: types.SimpleNamespace(logits=logits))
        trainer = stand_in(kind, config, case, model, None)
        facts = {"input_ids": ids, "attention_mask": attention, "labels": ids.masked_fill(mask == 0, -100)}
        sides = {"chosen": slice(0, N), "rejected": slice(N, 2 * N)}
        batch = {f"{side}_{name}": fact[rows] for side, rows in sides.items() for name, fact in facts.items()}
        loss, metrics = trainer.get_batch_loss_metrics(model, batch)
    else:
        kind, config = (trl.DPOTrainer, trl.DPOConfig) if case.trainer == "DPO" else (trl.KTOTrainer, trl.KTOConfig)
        inputs = {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}
        if case.trainer == "KTO":
            other = {"KL_input_ids": ids + 1, "KL_attention_mask": attention, "KL_completion_mask": mask}
            inputs |= other | {"label": torch.tensor(x["labels"])}
        is_kl = lambda given: bool((given != ids).any())
        kl = torch.tensor(x["kl"])
        model = Model(lambda *, input_ids, labels, **_: fused(kl[0] if is_kl(input_ids) else logprobs(), labels))
        ref_model = Model(lambda *, input_ids, labels, **_: fused(kl[1] if is_kl(input_ids) else ref, labels))
        trainer = stand_in(kind, config, case, model, ref_model)
        loss = trainer._compute_loss(model, inputs, False)
        metrics = {name: np.mean(values) for name, values in trainer._metrics["train"].items()}
    loss.backward()
    return loss.item(), logits.grad.numpy(), metrics


def paired(x):
    """Rows in TRL's order [2N …] as pairs [N 2 …]."""
    return jnp.swapaxes(jnp.asarray(x).reshape(2, N, *x.shape[1:]), 0, 1)


def our_loss(case, x):
    """A function of the logits [2N T V]: our loss."""
    options = {"beta": case.trl.get("beta", 0.1)} | case.ours
    mask, ids = jnp.asarray(x["mask"]), jnp.asarray(x["ids"])
    if case.token_mean:
        options["sft_length"] = float(x["mask"][:N].sum(1).mean())

    def logprobs(logits):
        chances = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], 2)[..., 0]
        return jnp.pad(chances, ((0, 0), (1, 0)))

    def loss(logits):
        ours = logprobs(logits)
        if case.trainer == "KTO":
            rest = dict(options)
            kl = rest.pop("kl", None)
            kl = preference.kto_kl(jnp.asarray(x["kl"][0]), jnp.asarray(x["kl"][1]), mask) if kl is None else kl
            given = (ours, jnp.asarray(x["ref"]), mask, jnp.asarray(x["labels"]), kl)
            return jnp.mean(preference.kto_loss(*given, **rest))
        ref = paired(x["ref"]) if case.reference else None
        function = preference.mpo_loss if "parts" in options else preference.dpo_loss
        return jnp.mean(function(paired(ours), ref, paired(mask), **options))

    return loss


def differences(case):
    """The largest relative differences of value and gradient over the batches; a NaN of TRL's counts as infinite."""
    worst = np.zeros(2)
    for seed in SEEDS:
        x = draw(seed, **case.draw)
        value, grads, _ = theirs(case, x)
        found, found_grads = jax.jit(jax.value_and_grad(our_loss(case, x)))(jnp.asarray(x["logits"]))
        if not (np.isfinite(found) and np.isfinite(found_grads).all()):
            raise SystemExit(f"ours is not finite: {case}")
        scale = max(abs(value), np.abs(grads).sum())
        now = np.array([abs(found - value) / scale, np.abs(found_grads - grads).max() / np.abs(grads).max()])
        worst = np.maximum(worst, np.where(np.isnan(now), np.inf, now))
    return worst


def metric_rows():
    """Metrics of the two under TRL's names, as (name, largest relative difference)."""
    worst = {}
    cases = {"": dpo("sigmoid"), "DPO, ld_alpha: ": dpo("sigmoid", **TAIL), "SimPO: ": cpo("simpo", cpo_alpha=0.0)}
    for title, case in cases.items():
        for seed in SEEDS:
            x = draw(seed)
            expected = theirs(case, x)[2]
            chances = jax.nn.log_softmax(jnp.asarray(x["logits"])[:, :-1])
            logprobs = jnp.take_along_axis(chances, jnp.asarray(x["ids"])[:, 1:, None], 2)[..., 0]
            given = (paired(jnp.pad(logprobs, ((0, 0), (1, 0)))), paired(x["ref"]) if case.reference else None)
            options = {"ld_alpha": case.trl.get("ld_alpha"), "average": case.trainer == "CPO"}
            found = result(preference.preference_metrics(*given, paired(x["mask"]), beta=0.1, **options))
            for name, value in found.items():
                if name.startswith("rewards") or not title:
                    gap = abs(value - expected[name]) / abs(expected[name])
                    worst[title + name] = max(worst.get(title + name, 0.0), gap)
    return worst


def shown(case):
    ours = {k: v for k, v in case.ours.items() if k != "variant"}
    name = "`mpo_loss`" if "parts" in ours else f"`{case.ours.get('variant', 'kto_loss')}`"
    options = lambda given: "".join(f", `{k}={v}`" for k, v in given.items() if k not in ("parts",))
    tokens = ", `sft_length` of the batch" if case.token_mean else ""
    return f"{name}{options(ours)}{tokens} | {case.trainer}Trainer{options(case.trl)}"


def main():
    started = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    versions = f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, jax {jax.__version__}; {len(SEEDS)} batches of {N} pairs and {T} columns\n")
    numbers = lambda found: " | ".join(f"{number:.0e}" for number in found)
    failures = []
    print("| ours | TRL | value | gradient |\n|---|---|---|---|")
    for case in AGREE:
        found = differences(case)
        print(f"| {shown(case)} | {numbers(found)} |", flush=True)
        failures += [] if (found <= TOLERANCE).all() else [shown(case)]
    print("\n| ours | TRL | value | gradient | how it differs | then value | gradient |\n|---|---|---|---|---|---|---|")
    for case in DEPART:
        before, after = differences(case), differences(dataclasses.replace(case, **case.instead))
        print(f"| {shown(case)} | {numbers(before)} | {case.departs} | {numbers(after)} |", flush=True)
        failures += [] if (after <= TOLERANCE).all() and not (before <= TOLERANCE).all() else [shown(case)]
    print("\n| metric | largest relative difference |\n|---|---|")
    for name, found in metric_rows().items():
        print(f"| `{name}` | {found:.0e} |")
        failures += [] if found <= TOLERANCE else [name]
    print(f"\n{time.perf_counter() - started:.0f} s")
    if failures:
        raise SystemExit("not as expected:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
