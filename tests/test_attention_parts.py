"""Attention of some columns at a time: the numbers of the whole, and memory that grows as the columns do."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sequence_axis import SEGMENTS, TOKENS, compiled
from test_sharding import assert_trees_close, host_params

from jaxrl_lm.models import build, decode, decoder, fuse_layers, positions
from jaxrl_lm.score import score
from jaxrl_lm.sharding import Plan, make_mesh

WEIGHTS = np.random.default_rng(2).normal(size=TOKENS.shape).astype(np.float32)


def facts(config, queries, monkeypatch, mesh=None):
    """States, the cache of a prefill, and the gradient of weighted log-probs, with `queries` columns at a time."""
    for module in (decoder, decode):
        monkeypatch.setattr(module, "PAIRS", queries * TOKENS.shape[1])
    plan = None if mesh is None else Plan(mesh)
    model = build(config, plan=plan)
    params = host_params(model) if plan is None else jax.device_put(host_params(model), plan.tree(model.specs))

    def everything(params, tokens, segments):
        hidden = model.hidden(params, tokens, positions(segments), segments)
        lengths = segments.astype(bool).sum(1, dtype=jnp.int32)
        cache = decode.prefill(
            fuse_layers(params, model=model), tokens, lengths, model=model.for_decode().for_prompts()
        )
        real = segments[..., None] > 0
        loss = lambda p: jnp.sum(
            WEIGHTS * score(p, tokens, segments, model=model, temperature=0.7, chunk=40, start=1).logprobs
        )
        return jnp.where(real, hidden, 0.0), cache.layers, jax.grad(loss)(params)

    # A function of its own for each size: a jitted one would be found again by its arguments.
    return jax.device_get(jax.jit(lambda *given: everything(*given))(params, TOKENS, SEGMENTS))


@pytest.mark.parametrize(("queries", "window", "remat"), [(1, None, "full"), (7, 3, "dots"), (10, None, "none")])
def test_parts_give_what_the_whole_gives(tiny_config, monkeypatch, queries, window, remat):
    """Two segments a row, padding on both sides, and columns that no part divides."""
    config = dataclasses.replace(tiny_config, num_layers=2, sliding_window=window, remat=remat)
    whole, parts = facts(config, 1000, monkeypatch), facts(config, queries, monkeypatch)
    assert parts[0].shape == whole[0].shape
    assert_trees_close(parts, whole, 1e-5)


def test_parts_of_split_columns_too(tiny_config, monkeypatch):
    config = dataclasses.replace(tiny_config, num_layers=2, remat="full")
    mesh = make_mesh({"fsdp": 2, "sequence": 2, "tensor": 2})
    assert_trees_close(facts(config, 2, monkeypatch, mesh), facts(config, 1000, monkeypatch), 1e-5)


def test_memory_grows_with_the_columns_and_not_with_their_square(tiny_config, monkeypatch):
    config = dataclasses.replace(tiny_config, num_layers=1, remat="full")
    temporary = lambda columns: compiled(config, {"sequence": 4}, 1, columns).memory_analysis().temp_size_in_bytes
    grows = lambda: temporary(4096) / temporary(2048)
    monkeypatch.setattr(decoder, "PAIRS", 1 << 15)
    assert grows() < 2
    monkeypatch.setattr(decoder, "PAIRS", 1 << 40)
    assert grows() > 3
