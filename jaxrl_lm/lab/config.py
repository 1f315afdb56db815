"""Options of the lab. The defaults are what `make quickstart` runs."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabConfig:
    """Options of the arithmetic lab."""

    output_dir: str = "runs/lab"
    """Where everything goes: data, models, the GRPO run, the figure, the export."""
    seed: int = 0
    digits: int = 3
    """Digits of an addend at most; the out-of-distribution set has one more."""
    least_digits: int = 1
    """Digits of an addend at least."""
    train_problems: int = 20000
    test_problems: int = 256
    ood_problems: int = 64
    slip: float = 0.05
    """Chance that the demonstrator miscounts a column."""
    drop: float = 0.6
    """Chance that the demonstrator forgets a carry. Above one half imitation learns to forget, and greedy answers too."""
    skip: float = 0.1
    """Chance that the demonstrator writes a wrong answer without working."""
    hidden_size: int = 160
    num_layers: int = 4
    sft_steps: int = 500
    """Supervised steps on demonstrations before reinforcement learning."""
    sft_rows: int = 32
    sft_learning_rate: float = 2e-3
    grpo_steps: int = 60
    prompts_per_step: int = 16
    num_generations: int = 8
    learning_rate: float = 3e-4
    """Of GRPO."""
    preset: str = "grpo"
    max_completion_length: int = 40
    eval_steps: int = 20
    control: bool = True
    """Also go on with supervised steps for as long as GRPO took, from the same start."""
