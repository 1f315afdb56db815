"""Rows that two processes encode together, and one to compare with.

`save` is called by the test session, which is one process; `distributed_checks.py` compares.
"""

import json

from jaxrl_lm.encode import encode_completions, encode_prompts
from jaxrl_lm.lab.tokenizer import lab_tokenizer
from jaxrl_lm.reward_sequences import encode_comparisons, encode_outcomes, encode_steps
from jaxrl_lm.sequences import encode_pairs, encode_sft, encode_unpaired

CHAT = (
    "{% for m in messages %}#{{ '+' if m.role == 'assistant' else '-' }}{{ m.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}#+{% endif %}"
)
# Seven rows, of which process 0 has three; row 4 is long.
PLAIN = [{"prompt": f"{i}+{i}=" + "1" * (20 if i == 4 else 0), "number": i} for i in range(7)]
CHATS = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in PLAIN]
TALKS = [{"messages": [*row["prompt"], {"role": "assistant", "content": "2 " * i}]} for i, row in enumerate(CHATS, 1)]
PAIRS = [{**row, "chosen": "3" * (i + 1), "rejected": "3" * (5 - i % 3)} for i, row in enumerate(PLAIN)]
JUDGED = [{**row, "completion": "12" * (i + 1), "label": i / 7} for i, row in enumerate(PLAIN)]
STEPS = [
    {**row, "completions": ["1"] * (i + 1), "labels": [0.1 * n for n in range(i + 1)]} for i, row in enumerate(PLAIN)
]
BINARY = [{**row, "label": i % 2 == 0} for i, row in enumerate(JUDGED)]


def changed(rows, **places):
    """The rows with other columns: row_2={...} changes row 2."""
    return [{**row, **places.get(f"row_{i}", {})} for i, row in enumerate(rows)]


EMPTY, LONG, NO_LABEL = {"prompt": ""}, {"prompt": "1" * 30}, {"label": 2}
prompts = {"max_prompt_length": 14}
written = {"max_length": 14, "eos_token_id": 1}
read = {"max_length": 14, "append_eos": True}
CASES = {
    "prompts": (encode_prompts, PLAIN, prompts),
    "prompts, cut": (encode_prompts, PLAIN, prompts | {"long_prompts": "keep_end"}),
    "chats": (encode_prompts, CHATS, {"max_prompt_length": 16, "system_prompt": "0"}),
    "one prompt": (encode_prompts, PLAIN[:1], prompts),
    "completions": (encode_completions, JUDGED, written),
    "sft": (encode_sft, JUDGED, written | {"long_rows": "keep_start"}),
    "conversations": (encode_sft, TALKS, written | {"max_length": 40}),
    "documents": (encode_sft, [{"text": row["prompt"]} for row in PLAIN], written),
    "dpo": (encode_pairs, PAIRS, written),
    "kto": (encode_unpaired, BINARY, written),
    "reward": (encode_comparisons, PAIRS, read),
    "outcomes": (encode_outcomes, JUDGED, read | {"per_token": True}),
    "steps": (encode_steps, STEPS, {"max_length": 14, "step_separator": ";"}),
}
ERRORS = {
    "row 5: the prompt is empty": (encode_prompts, changed(PLAIN, row_5=EMPTY), prompts),
    "row 1: the prompt is empty": (encode_completions, changed(JUDGED, row_1=EMPTY, row_6=EMPTY), written),
    "row 2: the prompt has 30": (
        encode_prompts, changed(PLAIN, row_2=LONG, row_3=EMPTY), prompts | {"long_prompts": "error"}
    ),
    "row 3: the prompt is empty": (encode_pairs, changed(PAIRS, row_3=EMPTY), written | {"long_rows": "error"}),
    "row 4 has 30": (encode_pairs, changed(PAIRS, row_5=EMPTY), written | {"long_rows": "error"}),
    "row 6: 'label' is 2": (encode_outcomes, changed(JUDGED, row_6=NO_LABEL), read | {"per_token": False}),
    "no prompt is left": (encode_prompts, PLAIN, {"max_prompt_length": 1}),
    "the same tokens in all 6": (encode_pairs, [{**row, "chosen": row["rejected"]} for row in PAIRS], written),
}  # fmt: skip


class Recording:
    """A tokenizer that keeps the texts that it was given."""

    def __init__(self):
        self.inner, self.texts = lab_tokenizer(), []
        self.inner.chat_template = CHAT

    def __call__(self, text, **options):
        self.texts.append(text)
        return self.inner(text, **options)

    def __getattr__(self, name):
        return getattr(self.inner, name)


def encode(case):
    """What a case gives, or its error, to the last bit and type, and the texts that were tokenised for it."""
    function, rows, options = case
    tokenizer = Recording()
    try:
        found = repr(function(rows, tokenizer, name="data", **options))
    except ValueError as error:
        found = str(error)
    return [found, tokenizer.texts]


def save(path):
    path.write_text(json.dumps({name: encode(case) for name, case in (CASES | ERRORS).items()}))
