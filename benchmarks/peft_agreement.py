"""Our adapters in the PEFT library and PEFT's adapters in ours: largest difference of the logits.

    pip install --no-deps peft accelerate   # in an environment of its own that also has this package
    python benchmarks/peft_agreement.py

Small random models of transformers in float32 on the CPU, a random adapter on them, each way and for each kind of config.
Exits with an error where the logits differ by more than 1e-4. docs/checkpoints_and_export.md holds the output.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers

from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.models import LoraConfig, load, lora, positions
from jaxrl_lm.models.peft import read_adapter, save_adapter

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "initializer_range": 0.15}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
CONFIGS = {
    "all layers, rank 8": LoraConfig(rank=8, alpha=16.0),
    "q and v, rank 4, rsLoRA": LoraConfig(rank=4, alpha=8.0, targets=("q", "v"), rslora=True),
    "down, rank 1, alpha 0.5": LoraConfig(rank=1, alpha=0.5, targets=("down",)),
}
TOLERANCE = 1e-4


def torch_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@jax.jit(static_argnames="model")
def our_logits(params, tokens, *, model):
    ones = jnp.ones_like(tokens)
    return model.unembed(params, model.hidden(params, tokens, positions(ones), ones))


def to_peft(base_directory, directory, model, base, config, tokens):
    """(difference of the logits, how far the adapter moves them) with our files in PEFT."""
    rng = np.random.default_rng(1)
    draw = lambda spec: jnp.asarray(rng.normal(0, 0.2, spec.shape), jnp.float32)
    adapter = jax.tree.map(draw, lora.specs(model, config), is_leaf=lambda leaf: hasattr(leaf, "axes"))
    save_adapter(directory, model, adapter, config, str(base_directory))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_directory).eval()
    before = torch_logits(plain, tokens)
    found = torch_logits(peft.PeftModel.from_pretrained(plain, directory).eval(), tokens)
    ours = np.asarray(our_logits(lora.attach(base, adapter, config), tokens, model=model))
    return np.abs(ours - found).max(), np.abs(found - before).max()


def from_peft(base_directory, directory, model, base, config, tokens):
    """The same with PEFT's files in ours; its fresh adapter is given a B first."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(base_directory).eval()
    before = torch_logits(plain, tokens)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="all-linear" if len(config.targets) == 7 else [f"{name}_proj" for name in config.targets],
        use_rslora=config.rslora,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(plain, settings).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.2)
    adapted.save_pretrained(directory)
    found = torch_logits(adapted, tokens)
    read, adapter = read_adapter(directory, model)
    assert read == config, (read, config)
    ours = np.asarray(our_logits(lora.attach(base, adapter, config), tokens, model=model))
    return np.abs(ours - found).max(), np.abs(found - before).max()


def main():
    transformers.utils.logging.disable_progress_bar()
    print(f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}\n")
    print("| model | adapter | ours in PEFT | PEFT's in ours | moved by the adapter |\n|---|---|---|---|---|")
    worst = 0.0
    tokenizer = lab_tokenizer()
    vocabulary = len(tokenizer)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (3, 12)).astype(np.int32)
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as name:
            base_directory = Path(name) / "base"
            torch.manual_seed(0)
            config = transformers.CONFIG_MAPPING[family](vocab_size=vocabulary, **SIZES, **HEADS)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base_directory)
            tokenizer.save_pretrained(base_directory)
            model, base, _ = load(base_directory)
            for number, (title, lora_config) in enumerate(CONFIGS.items()):
                one, moved = to_peft(base_directory, Path(name) / f"to-{number}", model, base, lora_config, tokens)
                two, moved_too = from_peft(
                    base_directory, Path(name) / f"of-{number}", model, base, lora_config, tokens
                )
                worst = max(worst, one, two)
                print(f"| {family} | {title} | {one:.1e} | {two:.1e} | {moved:.2f}, {moved_too:.2f} |")
    if not worst < TOLERANCE:
        raise SystemExit(f"logits differ by {worst:.1e}, more than {TOLERANCE}")


if __name__ == "__main__":
    main()
