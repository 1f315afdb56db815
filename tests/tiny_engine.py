"""What tests of the engine share: weights that all count, requests, rollouts compared bit for bit.

The fixtures `model`, `params` and `weights` that go with it stand in `conftest.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_lm.types import Requests

EOS = (3, 17)


def random_params(model, seed=0):
    """Weights that all count, from numpy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    mean, std = {"normal": 0.0, "ones": 1.0, "zeros": 0.0}, {"normal": 0.2, "ones": 0.2, "zeros": 0.2}
    one = lambda spec: jnp.asarray(rng.normal(mean[spec.init], std[spec.init], spec.shape), jnp.float32)
    return jax.tree.map(one, model.specs, is_leaf=lambda leaf: hasattr(leaf, "axes"))


def requests(tokens, segments, seed=0, max_new=10, temperature=1.0, step=7, keys=None):
    rows = len(tokens) if keys is None else len(keys)
    full = lambda value, dtype: jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))
    return Requests(
        tokens=jnp.asarray(tokens, jnp.int32),
        segment_ids=jnp.asarray(segments, jnp.int32),
        keys=jax.random.split(jax.random.key(seed), rows) if keys is None else keys,
        max_new=full(max_new, np.int32),
        temperature=full(temperature, np.float32),
        policy_step=jnp.asarray(step, jnp.int32),
    )


def same(a, b, rows_of_a=slice(None)):
    """Two rollouts equal bit for bit, the rows of a reordered first."""
    for name, x, y in zip(a._fields, a, b, strict=True):
        if x is not None:
            np.testing.assert_array_equal(np.asarray(x)[rows_of_a], y, err_msg=name)
