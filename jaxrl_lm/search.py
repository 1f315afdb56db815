"""Choosing among completions by a score, judged by a verifier: best-of-n, votes, and beams of steps.

A reward model is judged here by what its choice is worth to the verifier (the gold score of best-of-n), for every number
of samples up to n. The choices are `algos/selection.py`; this file samples, scores, and draws the curves.
"""

import json
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_lm import algos
from jaxrl_lm.algos.process import completion_credit
from jaxrl_lm.beams import Beam, Continuations, beam_search
from jaxrl_lm.completions import Completer, Prompts, encode_rows, judge_texts, open_tool, output_file
from jaxrl_lm.data import Row, load_function
from jaxrl_lm.evaluate import CORRECT
from jaxrl_lm.options import nearest
from jaxrl_lm.process_model import PREFIX as PRM_PREFIX
from jaxrl_lm.process_model import ProcessModel
from jaxrl_lm.reward_model import PREFIX, open_reward_models
from jaxrl_lm.rewards import RewardFunction, resolve
from jaxrl_lm.rule_tables import refuse_from_the_start
from jaxrl_lm.sharding import Plan
from jaxrl_lm.tools_config import SearchConfig

METHODS = ("best_of_n", "majority", "weighted_majority", "beam")


class Candidates(NamedTuple):
    """n completions of each of P prompts with what was made of them."""

    texts: list[list[str]]
    scores: Float[np.ndarray, "P n"]  # the scorer's
    gold: Float[np.ndarray, "P n"]  # the verifier's; NaN: not judged
    answers: Int[np.ndarray, "P n"]  # equal numbers are equal answers of a prompt; −1: none
    tokens: int


# --- curves on arrays -------------------------------------------------------------------------------------------------


def sample_counts(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n itself."""
    powers = [1 << exponent for exponent in range(n.bit_length()) if 1 << exponent <= n]
    return powers if powers[-1] == n else [*powers, n]


def best_of_n_curve(scores: Float[np.ndarray, "P n"], gold: Float[np.ndarray, "P n"], ks: Sequence[int]) -> list[float]:
    """The mean gold value of the best by score of k completions, for each k: over all subsets of k of the n.

    With scores = gold it is the ceiling, which no scorer passes. See `algos.expected_best_of_n`.
    """
    _refuse_nan(scores, gold)
    ranks = _ranks(scores)  # float32 could not tell close scores apart
    values = jnp.asarray(gold, jnp.float32)
    return [float(jnp.mean(algos.expected_best_of_n(ranks, k=k, values=values))) for k in ks]


def _ranks(scores: Float[np.ndarray, "P n"]) -> Int[Array, "P n"]:
    """The place of each score among its prompt's; equal ones share it."""
    return jnp.asarray(np.stack([np.unique(row, return_inverse=True)[1] for row in scores]), jnp.int32)


def majority_curve(
    answers: Int[np.ndarray, "P n"],
    gold: Float[np.ndarray, "P n"],
    ks: Sequence[int],
    *,
    weights: Float[np.ndarray, "P n"] | None = None,
) -> list[float]:
    """The mean gold value of the answer that k completions vote for, for each k: over the n // k disjoint blocks of k.

    An answer is worth the mean gold value of the completions of its block that give it; no answer at all is worth 0.
    `weights`, not negative, are what a vote counts; None: 1.
    """
    _refuse_nan(gold)
    if weights is not None:
        _refuse_nan(weights)
        if (weights < 0).any():
            raise ValueError(
                f"weighted_majority: the scorer gave {weights.min():.4g}, and with scores below 0 more votes would count "
                "less; use a scorer of chances, or leave the method out"
            )
    curve = []
    for k in ks:
        whole = answers.shape[1] // k * k
        block = lambda x, whole=whole, k=k: x[:, :whole].reshape(-1, k)
        mine, values = block(answers), block(gold)
        given = None if weights is None else jnp.asarray(block(weights), jnp.float32)
        chosen = np.asarray(algos.weighted_majority(jnp.asarray(mine), given, valid=jnp.asarray(mine >= 0)))
        same = (mine == chosen[:, None]) & (mine >= 0)
        curve.append(float(np.mean(np.where(same, values, 0.0).sum(1) / np.maximum(same.sum(1), 1))))
    return curve


def pass_curve(gold: Float[np.ndarray, "P n"], ks: Sequence[int]) -> list[float]:
    """pass@k for each k: a completion is right from a gold value of 0.5 up."""
    _refuse_nan(gold)
    right = (gold >= CORRECT).sum(1).tolist()
    return [float(np.mean([algos.pass_at_k(gold.shape[1], c, k) for c in right])) for k in ks]


def _refuse_nan(*arrays: Float[np.ndarray, "P n"]) -> None:
    for array in arrays:
        if np.isnan(array).any():
            row, column = np.argwhere(np.isnan(array))[0]
            raise ValueError(f"completion {column} of prompt {row} has the score NaN")


def answer_ids(texts: Sequence[Sequence[str]], function: Callable[[str], Hashable]) -> Int[np.ndarray, "P n"]:
    """A number for each final answer, the same for equal ones of a prompt; −1 where the function gives None.

    Raises ValueError with the text where the function raises or gives something that is not hashable.
    """
    out = []
    for group in texts:
        numbers: dict[Hashable, int] = {}
        row = []
        for text in group:
            try:
                answer = function(text)
                row.append(-1 if answer is None else numbers.setdefault(answer, len(numbers)))
            except Exception as error:
                raise ValueError(
                    f"answer_function: {type(error).__name__}: {error} on the completion {text[-60:]!r}"
                ) from error
        out.append(row)
    return np.asarray(out, np.int32)


# --- the scorer -------------------------------------------------------------------------------------------------------


def open_scorer(config: SearchConfig, plan: Plan) -> RewardFunction:
    """The function that ranks completions, as a reward function.

    Raises ValueError, naming scorer, for what cannot be opened.
    """
    try:
        if config.scorer.startswith(PRM_PREFIX):
            model = ProcessModel(config.scorer, plan=plan, dtype=config.dtype)
            return RewardFunction("process_model", process_scorer(model, config.credit))
        ((scorer,),) = open_reward_models([config.scorer], plan=plan, dtype=config.dtype)
        return resolve(scorer)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"scorer={config.scorer!r}: {error}") from error
    except ValueError as error:
        raise ValueError(f"scorer={config.scorer!r}: {error}") from error


def process_scorer(model: Callable[..., Any], credit: str) -> Callable[..., list[float]]:
    """A reward function from (end, chance) of the steps of each row: their last, min, product or mean; 0 without steps."""

    def process_model(*, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        steps = [[chance for _, chance in row] for row in model(prompts, completions)]
        longest = max([1, *map(len, steps)])
        table = np.zeros((len(steps), longest), np.float32)
        ends = np.arange(longest)[None, :] < np.array([len(row) for row in steps])[:, None]
        table[ends] = [chance for row in steps for chance in row]
        return np.asarray(completion_credit(jnp.asarray(table), jnp.asarray(ends), credit)).tolist()

    return process_model


def _scores(
    scorer: RewardFunction, rows: Sequence[Row], texts: Sequence[str], ids: Sequence[Sequence[int]]
) -> Float[np.ndarray, " n"]:
    """The scorer's values, one for every completion."""
    scores = judge_texts([scorer], rows, texts, ids)
    if np.isnan(scores).any():
        raise ValueError(
            f"scorer {scorer.name!r} gave no score to a completion of {rows[int(np.isnan(scores).argmax())]}"
        )
    return scores


# --- sampling and judging ---------------------------------------------------------------------------------------------


def sample_candidates(
    config: SearchConfig,
    completer: Completer,
    scorer: RewardFunction,
    verifier: Sequence[RewardFunction],
    prompts: Prompts,
) -> Candidates:
    """`num_generations` completions of every prompt, scored and judged."""
    answer = load_function(config.answer_function, option="answer_function")
    sampler, group = completer.sampler([prompts.encoded]), config.num_generations
    texts, scores, gold, tokens = [], [], [], 0
    for batch, sampled in completer.draw(sampler, prompts.encoded, range(len(prompts.places)), number=0):
        row = (sampled.rows, sampled.texts, sampled.completion_ids)
        scores.append(_scores(scorer, *row).reshape(len(batch), group))
        gold.append(judge_texts(verifier, *row).reshape(len(batch), group))
        texts += [sampled.texts[start : start + group] for start in range(0, sampled.count, group)]
        tokens += sum(map(len, sampled.completion_ids))
    return Candidates(texts, np.concatenate(scores), np.concatenate(gold), answer_ids(texts, answer), tokens)


def judge_candidates(candidates: Candidates, methods: Sequence[str], *, logits: bool) -> dict[str, Any]:
    """The curves over the prompts all of whose completions were judged.

    gold_best_of_n is the ceiling (the verifier itself chooses), regret how far best_of_n stays below it. `logits`: scores
    become vote weights by σ. Raises ValueError where no prompt is judged, and for negative weights.
    """
    judged = ~np.isnan(candidates.gold).any(1)
    if not judged.any():
        raise ValueError("reward: the verifier judged no prompt's completions whole")
    scores, gold, answers = (x[judged] for x in (candidates.scores, candidates.gold, candidates.answers))
    ks = sample_counts(scores.shape[1])
    found: dict[str, Any] = {"n": ks, "prompts": int(judged.sum()), "unjudged": int((~judged).sum())}
    found |= {"pass@n": pass_curve(gold, ks), "gold_best_of_n": best_of_n_curve(gold, gold, ks)}
    if "best_of_n" in methods:
        found["best_of_n"] = best_of_n_curve(scores, gold, ks)
        found["regret"] = [top - own for top, own in zip(found["gold_best_of_n"], found["best_of_n"], strict=True)]
    if "majority" in methods:
        found["majority"] = majority_curve(answers, gold, ks)
    if "weighted_majority" in methods:
        weights = 0.5 * (1.0 + np.tanh(0.5 * scores)) if logits else scores
        found["weighted_majority"] = majority_curve(answers, gold, ks, weights=weights)
    return found


def judge_beams(
    beams: Sequence[Sequence[Beam]], gold: Float[np.ndarray, " P"], generated: int
) -> dict[str, int | float]:
    """What the best beam of each prompt is worth, over the prompts that were judged."""
    judged = ~np.isnan(gold)
    if not judged.any():
        raise ValueError("reward: the verifier judged no beam")
    best = [group[0] for group in beams]
    return {
        "gold": float(gold[judged].mean()),
        "unjudged": int((~judged).sum()),
        "finished": float(np.mean([beam.finished for beam in best])),
        "steps": float(np.mean([beam.steps for beam in best])),
        "tokens": generated,
    }


def run_search(config: SearchConfig) -> dict[str, Any]:
    """Curves of every method, and of beam search its result; with records of the prompts in `output`.

    Raises ValueError, naming option or row, for what does not fit.
    """
    check_options(config)
    output = output_file(config.output) if config.output else None
    config, plan, verifier, rows = open_tool(config, from_prefixes="beam" in config.methods)
    scorer, completer = open_scorer(config, plan), Completer(config, plan)
    prompts = encode_rows(config, completer.tokenizer, rows, "dataset")
    result: dict[str, Any] = {"scorer": config.scorer}
    records = [{"row": place, "prompt": rows[place]["prompt"]} for place in prompts.places]
    if set(config.methods) - {"beam"}:
        logits = config.scorer.startswith(PREFIX) and "sigmoid=true" not in config.scorer
        candidates = sample_candidates(config, completer, scorer, verifier, prompts)
        result |= judge_candidates(candidates, config.methods, logits=logits)
        result["tokens"] = candidates.tokens
        table = zip(candidates.texts, candidates.scores.tolist(), candidates.gold.tolist(), strict=True)
        for record, (texts, scores, gold) in zip(records, table, strict=True):
            record |= {"completions": texts, "scores": scores, "gold": [None if math.isnan(g) else g for g in gold]}
    if "beam" in config.methods:
        result["beam"] = _run_beams(config, completer, scorer, verifier, prompts, records)
    if output is not None:
        output.write_text(json.dumps(result | {"records": records}, indent=1) + "\n")
    return result


def _run_beams(
    config, completer: Completer, scorer, verifier, prompts: Prompts, records: list[Row]
) -> dict[str, int | float]:
    """Beam search over all prompts; the best beam goes into the records."""
    rows = prompts.encoded.rows
    continuations = Continuations(config, completer, prompts.encoded)

    def search(own: range) -> list[list[Beam]]:
        """The beams of these prompts."""
        score = lambda places, beams: _scores(
            scorer, [rows[own[place]] for place in places], [beam.text for beam in beams], [beam.ids for beam in beams]
        )
        grow = lambda number, places, beams: continuations(number, [own[place] for place in places], beams)
        return beam_search(grow, score, len(own), width=config.beam_width, max_steps=config.max_steps)

    every = range(len(rows))
    groups = [every[start : start + config.beam_prompts] for start in range(0, len(rows), config.beam_prompts)]
    beams = [group for own in groups for group in search(own)]
    best = [group[0] for group in beams]
    gold = judge_texts(verifier, rows, [beam.text for beam in best], [beam.ids for beam in best])
    for record, beam, value in zip(records, best, gold.tolist(), strict=True):
        chosen = {"completion": beam.text, "score": beam.score, "gold": None if math.isnan(value) else value}
        record["beam"] = chosen | {"finished": beam.finished, "steps": beam.steps}
    return judge_beams(beams, gold, continuations.tokens)


def check_options(config: SearchConfig) -> None:
    """Raises ValueError, naming the option, for what no method reads or that is out of range."""
    for method in config.methods:
        if method not in METHODS:
            raise ValueError(f"methods: {method!r} is unknown; the nearest is {nearest(method, METHODS)!r}")
    if not config.methods:
        raise ValueError(f"methods: give some of {', '.join(METHODS)}")
    for name in ("beam_width", "beam_expand", "max_step_length", "max_steps", "beam_prompts", "num_generations"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 1")
    if not config.step_separator:
        raise ValueError("step_separator='': give the text that steps end with")
    if "beam" in config.methods:
        refuse_from_the_start(config, "method beam")
    _check_idle(config)


def _check_idle(config: SearchConfig) -> None:
    defaults = SearchConfig(model="", dataset="", scorer="")
    idle = {"credit": config.scorer.startswith(PRM_PREFIX)}
    of_beams = ("beam_width", "beam_expand", "step_separator", "max_step_length", "beam_prompts")
    idle |= dict.fromkeys(of_beams, "beam" in config.methods)
    for name, reads in idle.items():
        if not reads and getattr(config, name) != getattr(defaults, name):
            what = "a scorer of steps, prm:DIRECTORY" if name == "credit" else "the method beam"
            raise ValueError(f"{name}={getattr(config, name)!r} has no effect without {what}: leave it out")


def search_table(result: dict[str, Any]) -> str:
    """The curves as a table, a row a method."""
    lines = []
    if "n" in result:
        lines += [f"{'n':18}" + "".join(f"{k:9d}" for k in result["n"])]
        names = ("pass@n", "gold_best_of_n", "best_of_n", "regret", "majority", "weighted_majority")
        lines += [f"{name:18}" + "".join(f"{x:9.4f}" for x in result[name]) for name in names if name in result]
        lines += [f"{result['prompts']} prompts, {result['unjudged']} unjudged, {result['tokens']} tokens"]
    if "beam" in result:
        lines += ["beam: " + ", ".join(f"{name} {value:.4g}" for name, value in result["beam"].items())]
    return "\n".join(lines)
