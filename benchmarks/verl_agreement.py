"""Our functions against the core algorithms of a released verl on random batches: largest relative differences.

    pip install --no-deps verl ray tensordict omegaconf hydra-core antlr4-python3-runtime==4.9.3 codetiming pyvers
    python benchmarks/verl_agreement.py   # in an environment of its own that also has torch and this package

verl's functions are called as they are (`verl.trainer.ppo.core_algos`, `rollout_corr_helper`), with its own ActorConfig, on
the same float32 numbers as ours. A loss's difference is relative to the larger of |loss| and Σ |∂loss/∂log-prob|, that of an
array is the largest one over the largest entry; gradients are those in log-probs or values. Exits with an error where one is
above 1e-5, or where a departure that the second table claims is not there. docs/benchmarks.md holds the output.
"""

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

from jaxrl_lm import algos, masked

P, G, T = 8, 6, 24
N = P * G
SEEDS = range(5)
TOLERANCE = 1e-5
INDEX = np.arange(N) // G


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: (x, differentiated array) -> an array or scalar, ours in JAX and verl's in torch."""

    name: str
    ours: Callable
    verl: Callable
    by: str = "current"  # what is differentiated; "" for functions without a gradient
    draw: dict = dataclasses.field(default_factory=dict)
    # Where we differ on purpose: in what, and how verl's numbers follow from ours, or for which draw the two agree.
    departs: str = ""
    factor: Callable[[dict], float] | None = None
    instead: dict | None = None


def draw(seed, *, gap=0.25, empty=True, equal=1.0, far=None, far_ref=None):
    """A batch: ragged masks with holes, a row without tokens, rewards, log-probs of three policies, values."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, T + 1, N)
    mask = (np.arange(T)[None, :] < lengths[:, None]) & ((rng.random((N, T)) > 0.25) | (np.arange(T)[None, :] == 0))
    mask[3] &= not empty
    noise = lambda size: rng.normal(0, size, (N, T)) * np.where(rng.random((N, T)) < 0.05, 6.0, 1.0)
    old = -rng.gamma(2.0, 0.5, (N, T))
    current = old + noise(gap)
    ref = current + np.clip(noise(0.4), -2, 2)
    if far is not None:
        current[:, 0] = old[:, 0] + far
    if far_ref is not None:
        ref[:, 0] = current[:, 0] + far_ref
    returns = np.where(np.arange(N) < N // 2, rng.normal(0, 1, N), rng.integers(0, 2, N))
    returns[G : 2 * G] = equal
    values = rng.normal(0, 1, (N, T))
    floats = {"sampler": old + noise(0.2), "old": old, "current": current, "ref": ref, "returns": returns}
    floats |= {"values": values, "old_values": values + rng.normal(0, 0.3, (N, T)), "greedy": rng.normal(0, 1, N)}
    floats |= {"advantages": np.repeat(rng.normal(0, 1, (N, 1)), T, 1), "targets": rng.normal(0, 1, (N, T))}
    return {name: jnp.asarray(x, jnp.float32) for name, x in floats.items()} | {"mask": jnp.asarray(mask)}


def tensors(x):
    """The same arrays for verl, its names for the masks and rewards beside them."""
    out = {name: torch.tensor(np.asarray(leaf)) for name, leaf in x.items()}
    rewards = np.asarray(algos.token_rewards(x["returns"], x["mask"]))
    return out | {"mask": out["mask"].float(), "rewards": torch.tensor(rewards)}


def actor(**options):
    return ActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=N, rollout_n=1, **options)


def their_loss(name, over="token-mean", weights=None, config=None, **options):
    """verl's registered policy loss of this name."""
    config = actor(**options) if config is None else config

    def loss(x):
        given = None if weights is None else weights(x)
        arrays = (x["old"], x["current"], x["advantages"], x["mask"])
        function = core_algos.get_policy_loss_fn(name)
        return function(*arrays, loss_agg_mode=over, config=config, rollout_is_weights=given)[0]

    return loss


def our_loss(surrogate, over="token-mean", weights=None, **options):
    """Σ weight · term with a surrogate of ours."""

    def loss(x):
        scale = algos.token_weights(x["mask"], over=over, length=T)
        if weights is not None:
            scale = scale * weights(x)
        first = (x["current"],) if surrogate is algos.policy_gradient else (x["current"], x["old"])
        return jnp.sum(scale * surrogate(*first, x["advantages"], x["mask"], **options))

    return loss


def their_weights(level, threshold):
    function = rollout_corr_helper.compute_rollout_correction_weights
    return lambda x: function((x["old"] - x["sampler"]).detach(), x["mask"], level, threshold)[0]


def our_weights(mode, cap, floor=0.0):
    return lambda x: algos.sampler_correction(x["old"], x["sampler"], x["mask"], mode=mode, cap=cap, floor=floor)


def spread(rows):
    """Advantages of rows at their tokens, as verl returns them."""
    return lambda x: jnp.where(x["mask"], rows(x["returns"])[:, None], 0.0)


def grouped(function, **options):
    return lambda x: function(x["rewards"], x["mask"], index=INDEX, **options)[0]


def on_mask(function):
    return lambda x: function(x) * x["mask"]


def our_gae(x, whiten=True):
    rewards = algos.token_rewards(x["returns"], x["mask"])
    advantages, targets = algos.gae(rewards, x["values"], x["mask"], discount=0.99, lam=0.95)
    return masked.whiten(advantages, x["mask"]) if whiten else targets


def their_gae(which):
    return on_mask(
        lambda x: core_algos.compute_gae_advantage_return(x["rewards"], x["values"], x["mask"], 0.99, 0.95)[which]
    )


def our_reinforce_pp(x):
    rewards = algos.token_rewards(x["returns"], x["mask"])
    return algos.batch_whitened_advantages(algos.returns_to_go(rewards, x["mask"], discount=0.99), x["mask"])


def their_reinforce_pp(x):
    config = AlgoConfig(gamma=0.99)
    return core_algos.compute_reinforce_plus_plus_outcome_advantage(x["rewards"], x["mask"], config)[0]


def our_kl(estimator):
    return lambda x: algos.kl_estimate(x["current"], x["ref"], x["mask"], estimator=estimator).sum()


def their_kl(estimator):
    return lambda x: (core_algos.kl_penalty(x["current"], x["ref"], estimator) * x["mask"]).sum()


def our_value_loss(x):
    terms = algos.value_loss(x["values"], x["old_values"], x["targets"], x["mask"], clip=0.2)
    return jnp.sum(algos.token_weights(x["mask"]) * terms)


def their_value_loss(x):
    return core_algos.compute_value_loss(x["values"], x["targets"], x["old_values"], x["mask"], 0.2)[0]


def our_cov(kind):
    """Clip-Cov of all tokens in the range, or KL-Cov of a quarter with verl's KL to the old policy, |log-ratio|."""

    def loss(x):
        weights = algos.token_weights(x["mask"])
        arrays = (x["current"], x["advantages"], x["mask"])
        if kind == "clip_cov":
            chosen = algos.clip_cov_mask(*arrays, jax.random.key(0), low=0.2, high=5.0, share=1.0)
            weights = jnp.where(chosen, 0.0, weights)
        surrogate = algos.clipped_surrogate(x["current"], x["old"], x["advantages"], x["mask"], **WIDE)
        if kind == "clip_cov":
            return jnp.sum(weights * surrogate)
        chosen = algos.kl_cov_mask(*arrays, share=0.25)
        far = jnp.where(chosen, jnp.abs(x["current"] - x["old"]), 0.0)
        return jnp.sum(weights * (surrogate + far))

    return loss


WIDE = {"clip_low": 1.0, "clip_high": 1e9}  # no clip, as verl's KL-Cov and, for a comparison without ties, Clip-Cov


def their_cov(kind, **options):
    def loss(x):
        config = actor(clip_ratio_low=1.0, clip_ratio_high=1e9)
        for name, value in options.items():
            object.__setattr__(config.policy_loss, name, value(x) if callable(value) else value)
        return their_loss(kind, config=config)(x)

    return loss


def rounded_up(share):
    """A share for verl, which rounds down, that gives it as many tokens as ours."""
    return lambda x: (np.ceil(share * x["mask"].sum().item()) + 0.5) / x["mask"].sum().item()


def our_gpg(x):
    rows = algos.group_advantages(x["returns"], group_size=G, scale="none")
    valid = algos.mixed_groups(x["returns"], group_size=G)
    weights = algos.token_weights(x["mask"], valid=valid)
    advantages = jnp.broadcast_to(rows[:, None], (N, T))
    return jnp.sum(weights * algos.policy_gradient(x["current"], advantages, x["mask"]))


def their_gpg(x):
    advantages = core_algos.compute_gpg_outcome_advantage(x["rewards"], x["mask"], INDEX)[0]
    return their_loss("gpg")(x | {"advantages": advantages})


def gpg_factor(x):
    returns, mask = np.asarray(x["returns"]), np.asarray(x["mask"])
    valid = np.asarray(algos.mixed_groups(x["returns"], group_size=G))
    return N / np.count_nonzero(returns) * mask[valid].sum() / mask.sum()


def our_adaptive(x):
    observed = jnp.abs(x["greedy"]) * 6.0
    return jax.vmap(lambda kl: algos.adaptive_coefficient(0.1, kl, target=6.0, horizon=10_000, steps=256))(observed)


def their_adaptive(x):
    found = []
    for kl in np.abs(x["greedy"].numpy()) * np.float32(6.0):
        controller = core_algos.AdaptiveKLController(0.1, 6.0, 10_000)
        controller.update(float(kl), 256)
        found.append(controller.value)
    return torch.tensor(np.array(found))


MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
THEIR_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
TOKEN = {"over": "seq-mean-token-mean", "level": "sequence-token"}
NARROW, THEIR_NARROW = {"clip_low": 3e-4, "clip_high": 4e-4}, {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
FULL = {"empty": False}  # verl's outcome advantages read the rewards, which a row without tokens does not have here
group = lambda **options: spread(lambda r: algos.group_advantages(r, group_size=G, **options))
leave_one_out = spread(lambda r: algos.leave_one_out_advantages(r, group_size=G))
remax = lambda x: spread(lambda r: algos.greedy_baseline_advantages(r, x["greedy"]))(x)
their_remax = on_mask(lambda x: core_algos.compute_remax_outcome_advantage(x["rewards"], x["greedy"], x["mask"])[0])
vanilla = lambda over="token-mean", **more: their_loss("vanilla", over, clip_ratio_c=3.0, **THEIR_CLIP, **more)
clipped = lambda over="token-mean", **more: our_loss(algos.clipped_surrogate, over, dual_clip=3.0, **CLIP, **more)
CORRECTIONS = (
    ("token_truncate, cap 2", our_weights("token_truncate", 2.0), their_weights("token", 2.0)),
    ("token_mask, 0.5 to 5", our_weights("token_mask", 5.0, 0.5), their_weights("token", "0.5_5.0")),
    ("sequence_truncate, cap 2", our_weights("sequence_truncate", 2.0), their_weights("sequence", 2.0)),
    ("sequence_mask, 0.2 to 5", our_weights("sequence_mask", 5.0, 0.2), their_weights("sequence", "0.2_5.0")),
)

AGREE = (
    *(Case(name=f"clip and dual clip 3, `{over}`", ours=clipped(over), verl=vanilla(over)) for over in MODES),
    *(Case(name=f"the same, `{name}`", ours=clipped(weights=one), verl=vanilla(weights=two))
      for name, one, two in CORRECTIONS),
    Case(name="`gspo` loss, `sequence-token`", ours=our_loss(algos.clipped_surrogate, **TOKEN, **NARROW),
         verl=their_loss("gspo", "seq-mean-token-mean", **THEIR_NARROW), draw={"gap": 1e-3}),
    Case(name="`cispo` loss", ours=our_loss(algos.clipped_weight_surrogate, clip_low=1.0, clip_high=4.0),
         verl=their_loss("cispo", clip_ratio_low=1.0, clip_ratio_high=4.0)),
    Case(name="`sapo` loss", ours=our_loss(algos.soft_gate_surrogate, "seq-mean-token-mean"), verl=their_loss("sapo")),
    Case(name="`policy_gradient`", ours=our_loss(algos.policy_gradient), verl=their_loss("gpg")),
    Case(name="Clip-Cov, all in the range", ours=our_cov("clip_cov"),
         verl=their_cov("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.2, clip_cov_ub=5.0)),
    Case(name="KL-Cov, a quarter, verl's KL", ours=our_cov("kl_cov"),
         verl=their_cov("kl_cov", kl_cov_ratio=rounded_up(0.25), ppo_kl_coef=1.0)),
    *(Case(name=f"`kl_estimate` {kind}", ours=our_kl(kind), verl=their_kl(kind))
      for kind in ("k1", "k2", "k3", "k1+", "k3+")),
    Case(name="`value_loss`, clip 0.2", ours=our_value_loss, verl=their_value_loss, by="values"),
    Case(name="`gae`, whitened", ours=our_gae, verl=their_gae(0), by=""),
    Case(name="`gae`, targets", ours=lambda x: our_gae(x, whiten=False), verl=their_gae(1), by=""),
    Case(name="`group_advantages`", ours=group(), by="", draw=FULL,
         verl=grouped(core_algos.compute_grpo_outcome_advantage)),
    Case(name="`group_advantages`, scale none", ours=group(scale="none"), by="", draw=FULL,
         verl=grouped(core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False)),
    Case(name="`leave_one_out_advantages`", ours=leave_one_out, by="", draw=FULL,
         verl=grouped(core_algos.compute_rloo_outcome_advantage)),
    Case(name="`greedy_baseline_advantages`", ours=remax, verl=their_remax, by=""),
    Case(name="`reinforce_pp` advantages", ours=our_reinforce_pp, verl=their_reinforce_pp, by=""),
    Case(name="`adaptive_coefficient`", ours=our_adaptive, verl=their_adaptive, by=""),
)  # fmt: skip

DEPART = (
    Case(name="k3 at a gap of 5 nats", ours=our_kl("k3"), verl=their_kl("k3"), draw={"far_ref": 5.0},
         departs="the value; verl cuts it at 10, without a gradient there", instead={"far_ref": 1.0}),
    Case(name="`gspo` loss, log-ratios of 15", ours=our_loss(algos.clipped_surrogate, **TOKEN, **CLIP),
         verl=their_loss("gspo", "seq-mean-token-mean", **THEIR_CLIP), draw={"gap": 15.0},
         departs="log-ratios bounded to ±20, verl's to 10", instead={"gap": 0.25}),
    Case(name="a group of equal rewards of 10.1", ours=group(), by="", draw=FULL | {"equal": 10.1},
         verl=grouped(core_algos.compute_grpo_outcome_advantage),
         departs="0 for equal rewards; verl the rounding of their mean over eps", instead=FULL),
    Case(name="`gpg`, advantages and loss", ours=our_gpg, verl=their_gpg, factor=gpg_factor, draw=FULL,
         departs="groups of equal rewards leave the mean; verl scales by rows over rows with a reward other than 0"),
)  # fmt: skip


def differences(case):
    """The largest relative differences of value and gradient over the batches; again times the factor."""
    run = jax.jit(jax.value_and_grad(lambda leaf, x: case.ours(x | {case.by: leaf})) if case.by else case.ours)
    worst = np.zeros((2, 2))
    for seed in SEEDS:
        x = draw(seed, **case.draw)
        y = tensors(x)
        factors = np.array([1.0, 1.0 if case.factor is None else case.factor(x)])
        if case.by:
            found, slopes = run(x[case.by], x)
            y[case.by].requires_grad_()
            value = case.verl(y)
            value.backward()
            grads = y[case.by].grad.numpy()
            scale = max(abs(value.item()), np.abs(grads).sum())
            both = np.abs(factors * float(found) - value.item()) / scale
            slopes = np.abs(factors[:, None, None] * np.asarray(slopes) - grads).max((1, 2)) / np.abs(grads).max()
        else:
            value = case.verl(y).numpy()
            both = np.full(2, np.abs(np.asarray(run(x)) - value).max() / np.abs(value).max())
            slopes = np.zeros(2)
        worst = np.maximum(worst, np.stack([both, slopes], axis=1))  # a NaN stays
    return worst


def shown(case, numbers):
    return f"{numbers[0]:.0e} | {numbers[1]:.0e}" if case.by else f"{numbers[0]:.0e} | –"


def main():
    started = time.perf_counter()
    version = importlib.metadata.version("verl")
    print(
        f"verl {version}, torch {torch.__version__}, jax {jax.__version__}; {len(SEEDS)} batches of {N} rows, {T} columns\n"
    )
    failures = []
    print("| ours | value | gradient |\n|---|---|---|")
    for case in AGREE:
        found = differences(case)[0]
        print(f"| {case.name} | {shown(case, found)} |", flush=True)
        failures += [] if (found <= TOLERANCE).all() else [case.name]
    print("\n| ours | value | gradient | how it differs | then value | gradient |\n|---|---|---|---|---|---|")
    for case in DEPART:
        before, after = differences(case)
        after = after if case.instead is None else differences(dataclasses.replace(case, draw=case.instead))[0]
        print(f"| {case.name} | {shown(case, before)} | {case.departs} | {shown(case, after)} |", flush=True)
        failures += [] if (after <= TOLERANCE).all() and not (before <= TOLERANCE).all() else [case.name]
    print(f"\n{time.perf_counter() - started:.0f} s")
    if failures:
        raise SystemExit(f"not as expected: {'; '.join(failures)}")


if __name__ == "__main__":
    main()
