"""TRL's GRPOTrainer on CPU, as a peer of peers.py: `python peer_trl.py MODEL_DIRECTORY REPLY_DESCRIPTOR`."""

import sys
import tempfile
import threading

import torch
import trl
from datasets import Dataset
from peer_serve import serve
from peer_work import letters, questions
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback


class Steps(TrainerCallback):
    """Lets a training that runs in its own thread go on by one step a call."""

    def __init__(self):
        self.go, self.done, self.error = threading.Semaphore(0), threading.Semaphore(0), None

    def on_step_begin(self, *_, **__):
        self.go.acquire()

    def on_step_end(self, *_, **__):
        self.done.release()

    def train(self, trainer) -> None:
        try:
            trainer.train()
        except BaseException as error:
            self.error = error
        self.done.release()

    def step(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise RuntimeError("GRPOTrainer failed") from self.error


def grpo(
    *, completions: int = 16, group: int = 8, new: int = 32, continuous: bool = False, checkpointing: bool = False
):
    """A whole step: generation, rewards, loss and update of `completions` of at most `new` tokens, `group` a prompt."""
    texts = questions(64)
    lengths = []

    def reward(*, completions, completion_ids, **_):
        lengths[:] = [len(ids) for ids in completion_ids]
        return letters(completions=completions)

    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=completions,
        num_generations=group,
        max_completion_length=new,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        max_steps=1_000_000,
        optim="adamw_torch_fused",
        gradient_checkpointing=checkpointing,
        use_transformers_continuous_batching=continuous,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    steps = Steps()
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(sys.argv[1]),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        args=args,
        callbacks=[steps],
    )
    threading.Thread(target=steps.train, args=(trainer,), daemon=True).start()

    def run():
        steps.step()
        return {"completions": len(lengths), "tokens": sum(lengths)}

    return run


if __name__ == "__main__":
    serve({"grpo": grpo}, ("trl", "transformers", "torch"))
