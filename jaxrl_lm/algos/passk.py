"""pass@k: the chance that at least one of k samples is right."""

import math


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 − C(n−c, k) / C(n, k) from n samples of which c are right: unbiased (Chen et al., 2021, eq. 1).

    In log space, so that n = 10,000 costs no overflow. Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@k needs 0 <= correct <= samples and 1 <= k <= samples: got n={samples}, c={correct}, k={k}"
        )
    if samples - correct < k:
        return 1.0
    # C(n−c, k) / C(n, k) = Π_{i<few} (1 − many / (n − i)), the same with c and k exchanged.
    few, many = min(correct, k), max(correct, k)
    return 0.0 - math.expm1(math.fsum(math.log1p(-many / (samples - i)) for i in range(few)))


def same_outcome_share(p: float, group_size: int) -> float:
    """The expected share of groups that are all wrong or all right: (1 − p)^G + p^G. Such a group teaches nothing."""
    return (1.0 - p) ** group_size + p**group_size
