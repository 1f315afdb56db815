"""transformers on CPU, as a peer of peers.py: `python peer_transformers.py MODEL_DIRECTORY REPLY_DESCRIPTOR`.

Generation has three modes, as documented there: "dynamic" (the default cache), "compiled" (static cache, torch.compile of
forward) and "continuous" (generate_batch and its manager: paged cache, continuous batching). Log-probs of the sampled
tokens are recorded; no token ends a row. Without continuous batching there is no limit per row that saves anything: a
batch decodes to its longest request.
"""

import contextlib
import copy
import functools
import sys

import torch
from peer_serve import serve
from peer_work import batches, long_tail, prompts, sequences
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAD, PAGE = 0, 32
IGNORED = -100


@functools.cache
def compiled_forward(model):
    torch._dynamo.config.recompile_limit = 256  # each number of rows and length is a program of its own
    return torch.compile(model.forward, dynamic=False)


@contextlib.contextmanager
def forward_of(model, mode: str):
    if mode == "compiled":
        model.forward = compiled_forward(model)
    try:
        yield
    finally:
        vars(model).pop("forward", None)


def left_padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    columns = max(len(row) for row in rows)
    ids = torch.tensor([[PAD] * (columns - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.inference_mode()
def batch_generate(model, rows: list[list[int]], new: int, *, group: int = 1, greedy: bool = False, mode: str):
    """`generate` of one batch: tokens [rows, new] and their log-probs."""
    ids, mask = left_padded(rows)
    cache = {"cache_implementation": "static"} if mode == "compiled" else {}
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    with forward_of(model, mode):
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new,
            num_return_sequences=group,
            pad_token_id=PAD,
            output_scores=True,
            return_dict_in_generate=True,
            **how,
            **cache,
        )
    tokens = output.sequences[:, ids.shape[1] :]
    chosen = [
        scores.gather(1, column[:, None])[:, 0] - scores.logsumexp(1)
        for scores, column in zip(output.scores, tokens.T, strict=True)
    ]
    return tokens, torch.stack(chosen, dim=1)


def paged(rows: int, columns: int) -> ContinuousBatchingConfig:
    """A cache that holds all rows at once."""
    blocks = rows * (-(-columns // PAGE) + 1)
    return ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=2048, return_logprobs=True)


def continuous(model, rows: list[list[int]], limits: list[int], *, at_once: int, group: int = 1) -> int:
    """Tokens made by continuous batching with a limit for each request. Raises RuntimeError where a request fails."""
    settings = GenerationConfig(
        max_new_tokens=max(limits),
        do_sample=True,
        top_k=0,
        num_return_sequences=group,
        eos_token_id=-1,
        pad_token_id=PAD,
    )
    config = paged(at_once, max(map(len, rows)) + max(limits))
    finished = 0
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config, block=True, timeout=5
    ) as manager:
        for row, limit in zip(rows, limits, strict=True):
            manager.add_request(row, max_new_tokens=limit, eos_token_id=-1)
        made = 0
        while finished < len(rows) * group:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("continuous batching stopped before all requests were done")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"a request failed: {result.error}")
                finished, made = finished + 1, made + len(result.generated_tokens)
    return made


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Right-padded ids, mask, and each column's next token; padding has none."""
    columns = max(len(row) for row in rows)
    filled = lambda cut, value: torch.tensor([row + [value] * (columns - len(row)) for row in cut])
    mask = filled([[1] * len(row) for row in rows], 0)
    return filled(rows, PAD), mask, filled([row[1:] for row in rows], IGNORED)


def losses(model, batch) -> torch.Tensor:
    """Minus the log-prob of each token but a row's first; 0 at padding."""
    ids, mask, following = batch
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none", ignore_index=IGNORED)


@functools.cache
def trained(model):
    """A copy to train, and its optimiser."""
    copied = copy.deepcopy(model).train()
    return copied, torch.optim.AdamW(copied.parameters(), lr=1e-6, fused=True)


def tasks(model) -> dict:
    """What peers.py may ask for."""

    def generate(
        *, rows: int, prompt: int = 40, new: int = 64, group: int = 1, greedy: bool = False, mode: str = "dynamic"
    ):
        distinct = prompts(rows=rows, columns=prompt, group=group)[::group]
        if mode == "continuous":
            limits = [new] * len(distinct)
            return lambda: {"tokens": continuous(model, distinct, limits, at_once=rows, group=group)}
        call = functools.partial(batch_generate, model, distinct, new, group=group, greedy=greedy, mode=mode)
        return lambda: {"tokens": call()[0].numel()}

    def tail(*, batch: int, prompt: int = 40, mode: str = "dynamic", **drawn):
        lengths = long_tail(**drawn)
        ids = prompts(rows=len(lengths), columns=prompt)
        if mode == "continuous":
            return lambda: {"tokens": continuous(model, ids, lengths, at_once=batch)}
        cuts = list(zip(batches(ids, batch), batches(lengths, batch), strict=True))

        def run():
            made = (batch_generate(model, rows, max(limits), mode=mode)[0].numel() for rows, limits in cuts)
            return {"decoded": sum(made), "tokens": sum(lengths)}

        return run

    def tokens(*, ids: list[list[int]], new: int):
        def run():
            made, logprobs = batch_generate(model, ids, new, greedy=True, mode="dynamic")
            return {"ids": made.tolist(), "logprobs": logprobs.tolist()}

        return run

    def score(*, rows: int = 32, low: int = 20, high: int = 200, batch: int = 8):
        drawn = sequences(rows=rows, low=low, high=high)
        cuts = [padded(cut) for cut in batches(drawn, batch)]

        def run():
            with torch.inference_mode():
                total = sum(losses(model, cut).sum().item() for cut in cuts)
            return {"tokens": sum(map(len, drawn)), "loss": total}

        return run

    def train(*, rows: int = 32, low: int = 20, high: int = 200, batch: int = 8):
        drawn = sequences(rows=rows, low=low, high=high)
        cuts = [padded(cut) for cut in batches(drawn, batch)]
        count = sum(map(len, drawn))
        learner, optimizer = trained(model)

        def run():
            optimizer.zero_grad()
            for cut in cuts:
                (losses(learner, cut).sum() / count).backward()
            optimizer.step()
            return {"tokens": count}

        return run

    return {"generate": generate, "long_tail": tail, "greedy": tokens, "score": score, "train": train}


def load(directory: str):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return model


if __name__ == "__main__":
    serve(tasks(load(sys.argv[1])), ("transformers", "torch"))
