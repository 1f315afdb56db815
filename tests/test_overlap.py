"""What runs beside what: rewards beside decoding, and sampling of the next batch beside the update of this one.

Whatever overlaps, a run's numbers are those of its parts one after the other, bit for bit.
"""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest
import tiny_run
from test_generate import EOS, random_params, requests, same
from test_slots import COLUMNS, GROUP, LIMITS, NEW, PROMPTS, ROWS, SEGMENTS, TEMPERATURE, TOKENS

from jaxrl_lm import GRPOConfig, chunks
from jaxrl_lm.config import SamplingConfig
from jaxrl_lm.generate import collect, generate, prepare_decode
from jaxrl_lm.models import build

# --- decoding in chunks -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_config):
    return build(dataclasses.replace(tiny_config, num_layers=1))


@pytest.fixture(scope="module")
def weights(model):
    return prepare_decode(random_params(model), model=model)


@pytest.mark.parametrize(("slots", "passes"), [(None, 1), (6, 5)])
def test_chunks_give_the_bits_of_one_run_and_show_each_row_once_it_has_ended(model, weights, slots, passes):
    sampling = SamplingConfig(max_new_tokens=NEW, eos_token_ids=EOS, pad_token_id=0, slots=slots)
    asked = requests(
        TOKENS, SEGMENTS, keys=jax.random.split(jax.random.key(0), ROWS), max_new=LIMITS, temperature=TEMPERATURE
    )
    parts = {"model": model, "sampling": sampling}
    whole = jax.jit(functools.partial(generate, **parts))(weights, asked)
    mask = np.asarray(whole.action_mask)[:, COLUMNS:]
    lengths = mask.sum(1)
    compiled = chunks.Chunks(
        jax.jit(functools.partial(chunks.begin, **parts)),
        jax.jit(functools.partial(chunks.advance, passes=passes, **parts), donate_argnums=2),
        functools.partial(collect, sampling=sampling),
    )
    seen = []
    rollout = chunks.sample_in_chunks(compiled, weights, asked, watch=lambda *one: seen.append(one))
    same(whole, rollout)
    counts = [ended.sum() for ended, _, _ in seen]
    assert counts == sorted(set(counts))
    assert counts[-1] == ROWS
    for ended, tokens, action_mask in seen:  # what has been shown of an ended row is whole
        np.testing.assert_array_equal(action_mask[ended], mask[ended])
        kept = np.where(mask, np.asarray(whole.tokens)[:, COLUMNS:], 0)
        np.testing.assert_array_equal(np.where(action_mask, tokens, 0)[ended], kept[ended])
    if slots is None:  # a row of n tokens ends in pass n, and is shown after it
        done = [lengths <= number for number in range(1, NEW + 1)]
        later = [n for n in range(NEW) if n == 0 or done[n].sum() > done[n - 1].sum()]
        assert [ended.tolist() for ended, _, _ in seen] == [done[n].tolist() for n in later]
