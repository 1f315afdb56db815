"""Our losses against those of a released TRL on random batches: largest differences of value and gradient.

    pip install --no-deps trl accelerate datasets pandas dill multiprocess xxhash
    python benchmarks/trl_agreement.py   # in an environment of its own that also has torch and this package

TRL's own code runs, from the rewards on: `_generate_and_score_completions` (advantages, masks, weights against the sampler)
and `_compute_loss` of GRPOTrainer and RLOOTrainer. A trainer without a model stands in for `self`: it returns the batch's
completions, rewards and log-probs where TRL would generate and score. Ours are the rules that a run is put together from:
CreditRule, BatchRule, PolicyObjective. Both get the same float32 numbers.

The value's difference is relative to the larger of |loss| and Σ |∂loss/∂log-prob| (a loss near 0 is a difference of larger
terms); that of the gradient (in log-probs and entropy) is the largest one over the largest entry. Exits with an error where
one is above 1e-5, or where a departure that the second table claims is not there. docs/benchmarks.md holds the output.
"""

import collections
import dataclasses
import functools
import tempfile
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
import trl
from accelerate import Accelerator
from trl_agreement_cases import AGREE, DAPO, DEPART, KL, Case, G, N, T, vllm

from jaxrl_lm import algos
from jaxrl_lm.batch import BatchRule, Coefficients, Rated
from jaxrl_lm.credit import CreditRule, Outcomes
from jaxrl_lm.metrics import result
from jaxrl_lm.objectives import PolicyObjective
from jaxrl_lm.rewards.aggregate import combine
from jaxrl_lm.types import Rollout, Scores

SEEDS = range(5)
TOLERANCE = 1e-5
EOS, PAD, TOKEN = 2, 0, 5
REWARD_WEIGHTS = (1.0, 0.5)


def draw(
    seed,
    *,
    gap=0.25,
    drift=0.06,
    holes=True,
    abstain=False,
    equal=1.0,
    scale=1.0,
    rewards=1,
    far=None,
    far_ref=None,
    nan=False,
):
    """A batch: ragged completions, some truncated, rewards, log-probs of sampler, old, current and reference policy."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, N)
    lengths[0] = T
    tools = (rng.random((N, T)) < 0.25) & (np.arange(T)[None, :] > 0) & holes
    mask = (np.arange(T)[None, :] < lengths[:, None]) & ~tools
    noise = lambda size: rng.normal(0, size, (N, T)) * np.where(rng.random((N, T)) < 0.05, 6.0, 1.0)
    sampler = -rng.gamma(2.0, 0.5, (N, T))
    old = sampler + noise(drift)
    current = old + noise(gap)
    ref = old + noise(0.4)
    if far is not None:
        current[:, 0] = old[:, 0] + far
    if far_ref is not None:
        ref[:, 0] = current[:, 0] + far_ref
    if nan:
        current[~mask] = np.nan
    returns = (
        np.where(np.arange(N) < N // 2, rng.normal(0, 1, (rewards, N)), rng.integers(0, 2, (rewards, N))).T * scale
    )
    returns[G : 2 * G] = equal
    if abstain:
        returns[rng.random(returns.shape) < 0.15] = np.nan
    floats = {"sampler": sampler, "old": old, "current": current, "ref": ref, "entropy": rng.gamma(2.0, 0.5, (N, T))}
    floats = {name: x.astype(np.float32) for name, x in (floats | {"returns": returns}).items()}
    return floats | {"lengths": lengths, "mask": mask, "truncated": rng.random(N) < 0.3}


class NoModel(types.SimpleNamespace):
    """A model as far as TRL's loss asks of it."""

    training, is_gradient_checkpointing = True, False


def trainer_of(case, x):
    """TRL's trainer without a model: everything that its loss reads is set here, anything else would be an error."""
    kind, config = (trl.RLOOTrainer, trl.RLOOConfig) if case.rloo else (trl.GRPOTrainer, trl.GRPOConfig)
    options = {
        "per_device_train_batch_size": N // case.cuts // case.steps, "gradient_accumulation_steps": case.cuts,
        "steps_per_generation": case.cuts * case.steps, "num_generations": G, "max_completion_length": T,
        "num_iterations": 2, "use_cpu": True, "bf16": False, "report_to": "none",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        args = config(output_dir=directory, **options | case.trl)
    trainer = object.__new__(kind)
    ids = [[TOKEN] * int(n - 1) + [TOKEN if cut else EOS] for n, cut in zip(x["lengths"], x["truncated"], strict=True)]
    inside = lambda name: [row[:n].tolist() for row, n in zip(x[name], x["lengths"], strict=True)]
    prompts, text, functions = [[TOKEN]] * N, ["x"] * N, x["returns"].shape[1]
    generated = (prompts, ids, text)
    if not case.rloo:
        generated = (prompts, ids, inside("mask"), text, inside("sampler"), {}, None, [])

    def scores(model, *_, compute_entropy=False, **__):
        if compute_entropy:
            return trainer.current, trainer.entropies, None
        return torch.tensor(x["ref" if model is trainer.ref_model else "old"]), None, None

    vars(trainer).update(vars(args))
    vars(trainer).update(
        args=args, model=NoModel(), ref_model=NoModel(), accelerator=Accelerator(cpu=True), aux_loss_enabled=False,
        epsilon_low=args.epsilon, epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        current_gradient_accumulation_steps=case.cuts, environment_factories=None, environments=None, tools=None,
        eos_token_ids=[EOS], _tokenizer=types.SimpleNamespace(pad_token_id=PAD), reward_funcs=[None] * functions,
        reward_weights=torch.tensor(REWARD_WEIGHTS[:functions]), reward_func_names=list("ab"[:functions]),
        _generate=lambda _: generated, _calculate_rewards=lambda *_: torch.tensor(x["returns"]),
        _get_per_token_logps_and_entropies=scores, _pending_extra_logs={}, _pending_metrics={},
        _metrics={"train": collections.defaultdict(list)},
        _logs=collections.defaultdict(list, rewards=collections.defaultdict(list)),
        _entropy_bonus_enabled=not case.rloo and (args.entropy_coef != 0.0 or args.use_adaptive_entropy),
        _last_world_entropy=float("inf"), _entropy_window_stats=None,
    )  # fmt: skip
    return trainer


def theirs(case, x, trainer=None):
    """TRL's loss, gradient in log-probs and entropy [2 N T], advantages [N] and metrics."""
    trainer = trainer_of(case, x) if trainer is None else trainer
    inputs = trainer._generate_and_score_completions([{"prompt": "x"}] * N)
    current, entropy = (torch.tensor(x[name], requires_grad=True) for name in ("current", "entropy"))
    loss, size = 0.0, N // case.cuts // case.steps
    for start in range(0, N // case.steps, size):
        rows = slice(start, start + size)
        trainer.current, trainer.entropies = current[rows], entropy[rows]
        cut = {name: leaf[rows] if leaf.ndim else leaf for name, leaf in inputs.items()}
        loss = loss + trainer._compute_loss(trainer.model, cut)
    loss.backward()
    grads = [np.zeros((N, T)) if leaf.grad is None else leaf.grad.numpy() for leaf in (current, entropy)]
    metrics = {name: np.mean(values) for name, values in trainer._metrics["train"].items()}
    return loss.item(), np.stack(grads), inputs["advantages"].numpy(), metrics


def parts(case):
    """The choice, our rules and our objective."""
    chosen = dataclasses.replace(algos.PRESETS[case.preset], **case.choice)
    own = functools.partial(algos.group_advantages, scale=chosen.scale_rewards, eps=case.eps)
    credit = CreditRule(advantage=chosen.advantage, group_size=G, own=own if chosen.advantage == "group" else None)
    rule = BatchRule(
        **{"group_size": G, "over": chosen.loss_agg_mode, "length": T, "keep_old": True} | case.rule,
        sampler_correction=chosen.sampler_correction or "none",
        correction_cap=chosen.sampler_correction_cap,
        entropy_bonus="entropy_coef" in case.trl,
    )
    objective = PolicyObjective(
        completion_columns=T,
        surrogate=chosen.surrogate,
        clip_low=chosen.epsilon,
        clip_high=chosen.epsilon if chosen.epsilon_high is None else chosen.epsilon_high,
        delta=chosen.delta,
        level=chosen.importance_sampling_level,
        **case.objective,
    )
    return chosen, credit, rule, objective


def our_function(case):
    """A function of a batch: our loss, gradient [2 N T], advantages [N T] and metrics."""
    chosen, credit, rule, objective = parts(case)
    beta, bonus = case.trl.get("beta", 0.0), case.trl.get("entropy_coef", 0.0)
    rows = jnp.arange(N // case.steps, dtype=jnp.int32)
    paid = chosen.kl_in == "reward" and beta > 0

    @jax.jit
    def call(x, returns, valid):
        mask = x["mask"]
        ids = mask.astype(jnp.int32)
        kl = algos.kl_estimate(x["old"], x["ref"], mask, estimator="k1") if paid else None
        given = credit(Outcomes(returns, valid, mask, x["sampler"], ids, kl, jnp.float32(beta)))
        rollout = Rollout(ids, ids, mask, x["sampler"], None, x["truncated"], ids, ids)
        ref = x["ref"] if beta > 0 and not paid else None
        rated = Rated(rollout, jnp.ones(N), given, Scores(x["old"], x["entropy"]), None, ref)
        coefficients = Coefficients(jnp.float32(beta), jnp.float32(bonus), jnp.float32(1.0))
        batch = rule(rated, coefficients, jax.random.key(0), rows)
        value = lambda scores: objective.loss(jax.tree.map(lambda leaf: leaf[rows], scores), batch)
        (loss, metrics), grads = jax.value_and_grad(value, has_aux=True)(Scores(x["current"], x["entropy"]))
        return loss, jnp.stack(grads), given.advantages, metrics

    def function(x):
        how = case.trl.get("multi_objective_aggregation", "sum_then_normalize")
        count = x["returns"].shape[1]
        values = x["returns"].astype(np.float64)
        returns, valid = combine(values, REWARD_WEIGHTS[:count], group_size=G, aggregation=how)
        loss, grads, advantages, metrics = call(x, returns.astype(np.float32), valid)
        return float(loss), np.asarray(grads, np.float64), np.asarray(advantages), result(metrics)

    return function


def differences(case):
    """The largest relative differences of advantages, value and gradient over the batches; again times the factor."""
    function, worst = our_function(case), np.zeros((2, 3))
    for seed in SEEDS:
        x = draw(seed, **case.draw)
        value, grads, advantages, _ = theirs(case, x)
        found, found_grads, found_advantages, _ = function(x)
        factors = np.array([1.0, 1.0 if case.factor is None else case.factor(x)])
        rows = np.where(x["mask"], found_advantages, advantages[:, None]) - advantages[:, None]
        scale = max(abs(value), np.abs(grads[0]).sum())
        slopes = np.abs(factors[:, None, None, None] * found_grads - grads).max((1, 2, 3)) / np.abs(grads).max()
        same = np.full(2, np.abs(rows).max() / np.abs(advantages).max())
        now = np.stack([same, np.abs(factors * found - value) / scale, slopes], axis=1)
        worst = np.maximum(worst, now)  # a NaN stays
    return worst


def metric_rows():
    """Metrics of the two under TRL's names, as (name, largest relative difference)."""
    case = Case(ours="", preset="grpo", trl=vllm("token_truncate", None, 2.0) | KL)
    names = {
        name: name for name in ("kl", "entropy", *(f"clip_ratio/{side}_mean" for side in ("low", "high", "region")))
    }
    names |= {
        f"sampling/logp_difference/{kind}": f"sampling/sampling_logp_difference/{kind}" for kind in ("mean", "max")
    }
    function, worst = our_function(case), dict.fromkeys(names, 0.0)
    for seed in SEEDS:
        x = draw(seed)
        found, expected = function(x)[3], theirs(case, x)[3]
        for mine, other in names.items():
            worst[mine] = max(worst[mine], abs(found[mine] - expected[other]) / abs(expected[other]))
    return worst


def adaptive_entropy():
    """The largest difference of the adaptive entropy coefficient over a run of batches."""
    options = {"entropy_target": 1.0, "entropy_coef_delta": 0.005, "entropy_coef_max": 0.02, "entropy_coef": 0.01}
    case = Case(ours="", trl=DAPO | {"use_adaptive_entropy": True} | options)
    coefficient, worst, state = jnp.float32(0.01), 0.0, {"entropy_coef": 0.01}
    for seed in range(12):
        x = draw(seed)
        x["entropy"] = x["entropy"] * np.float32(1.3 if seed > 6 else 0.7)
        trainer = trainer_of(case, x)
        vars(trainer).update(state)
        theirs(case, x, trainer)
        state = {name: getattr(trainer, name) for name in ("entropy_coef", "_last_world_entropy")}
        observed = x["entropy"][x["mask"]].mean()
        coefficient, _ = algos.adaptive_entropy_coefficient(coefficient, observed, target=1.0, step=0.005, maximum=0.02)
        worst = max(worst, abs(float(coefficient) - trainer.entropy_coef))
    return worst


def options_of(case):
    words = ["RLOOTrainer"] if case.rloo else []
    short = lambda name: name.replace("vllm_importance_sampling", "vllm…")
    return ", ".join(words + [f"`{short(k)}={v}`" for k, v in case.trl.items()])


def main():
    started = time.perf_counter()
    transformers.utils.logging.set_verbosity_error()
    versions = f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, jax {jax.__version__}; {len(SEEDS)} batches of {N} rows and {T} columns\n")
    shown = lambda numbers: " | ".join(f"{number:.0e}" for number in numbers)
    failures = []
    print("| ours | TRL | advantages | value | gradient |\n|---|---|---|---|---|")
    for case in AGREE:
        found = differences(case)[0]
        print(f"| {case.ours} | {options_of(case)} | {shown(found)} |", flush=True)
        failures += [] if (found <= TOLERANCE).all() else [case.ours]
    print("\n| ours | TRL | advantages | value | gradient | how it differs | then advantages | value | gradient |")
    print("|---|---|---|---|---|---|---|---|---|")
    for case in DEPART:
        before, after = differences(case)
        after = after if case.instead is None else differences(dataclasses.replace(case, **case.instead))[0]
        print(f"| {case.ours} | {options_of(case)} | {shown(before)} | {case.departs} | {shown(after)} |", flush=True)
        failures += [] if (after <= TOLERANCE).all() and not (before <= TOLERANCE).all() else [case.ours]
    print("\n| metric | largest relative difference |\n|---|---|")
    for name, found in (metric_rows() | {"entropy_coef, adaptive": adaptive_entropy()}).items():
        print(f"| `{name}` | {found:.0e} |")
        failures += [] if found <= TOLERANCE else [name]
    print(f"\n{time.perf_counter() - started:.0f} s")
    if failures:
        raise SystemExit(f"not as expected: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
