"""One batch of TRL's PRMTrainer, for `trl_fit_agreement.py`, in an environment of its own.

    python benchmarks/trl_prm_trainer.py MODEL ROWS SEPARATOR RESULT

The environment has TRL 0.23.1, which still has a PRMTrainer, with transformers 4.56. Reads a token classification directory
and a JSON list of stepwise rows; writes, as an .npz file, the batch's tokens and labels, the loss and its gradient.
"""

import json
import sys

import datasets
import numpy as np
import torch
import transformers
import trl

VERSION = "0.23.1"


def main(model_directory: str, rows_file: str, separator: str, result: str) -> None:
    if trl.__version__ != VERSION:
        raise SystemExit(f"trl {trl.__version__}: this needs trl {VERSION}, which has a PRMTrainer")
    with open(rows_file) as file:
        rows = json.load(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    model = transformers.AutoModelForTokenClassification.from_pretrained(model_directory, dtype=torch.float64)
    args = trl.PRMConfig(
        output_dir=result + ".trl", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=len(rows), step_separator=separator, disable_dropout=True,
    )  # fmt: skip
    trainer = trl.PRMTrainer(
        model=model, args=args, processing_class=tokenizer, train_dataset=datasets.Dataset.from_list(rows)
    )
    (batch,) = trainer.get_train_dataloader()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    found = [
        [ids[real == 1].tolist(), labels[real == 1].tolist()]
        for ids, real, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    ]
    empty = lambda p: torch.zeros_like(p) if p.grad is None else p.grad
    grads = {f"grad {name}": empty(p).double().numpy() for name, p in model.named_parameters()}
    np.savez(result, rows=json.dumps(found), loss=loss.item(), **grads)


if __name__ == "__main__":
    main(*sys.argv[1:])
