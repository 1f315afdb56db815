"""Rows, models and cases of trl_fit_agreement.py."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
import transformers
from tokenizers.processors import TemplateProcessing

from jaxrl_lm import models
from jaxrl_lm.lab.task import demonstration_rows, make_problems
from jaxrl_lm.lab.tokenizer import lab_tokenizer

N = 12
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]


# --- rows -------------------------------------------------------------------------------------------------------------


def demonstrations(seed=0, skip=0.3):
    """Prompts such as `47+38=` with completions of 2 to 25 characters."""
    given = demonstration_rows(make_problems(N, seed=0, digits=2), seed=seed, skip=skip)
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in given]


def ended():
    """The same; two completions bring their eos."""
    return [row | {"completion": row["completion"] + "<eos>" * (n < 2)} for n, row in enumerate(demonstrations())]


def texts():
    return [{"text": row["prompt"] + row["completion"]} for row in demonstrations()]


def turn(role, text):
    return {"role": role, "content": text}


def conversations():
    """Two assistant turns each."""
    return [
        {"messages": [turn("user", row["prompt"]), turn("assistant", row["completion"]), turn("user", f"{n}+1="),
                      turn("assistant", f"#{n + 1}")]}
        for n, row in enumerate(demonstrations())
    ]  # fmt: skip


def chats():
    """Prompt and completion as messages."""
    return [
        {"prompt": [turn("user", row["prompt"])], "completion": [turn("assistant", row["completion"])]}
        for row in demonstrations()
    ]


def pairs(prompt=None):
    """Working against a bare, wrong answer; the first prompt is long."""
    good, bad = demonstrations(skip=0.0), demonstrations(seed=1, skip=0.7)
    rows = [
        {"prompt": prompt or one["prompt"], "chosen": one["completion"], "rejected": two["completion"] + "0"}
        for one, two in zip(good, bad, strict=True)
    ]
    return rows if prompt else [rows[0] | {"prompt": "1+1+1+1+1+1+1+1="}, *rows[1:]]


def short_pairs():
    """Without the first."""
    return pairs()[1:]


def margins():
    return [row | {"margin": 0.25 * (n % 4)} for n, row in enumerate(pairs())]


def pair_chats():
    """Whole conversations whose common beginning is the prompt."""
    return [
        {side: [turn("user", row["prompt"]), turn("assistant", row[side])] for side in ("chosen", "rejected")}
        for row in pairs()
    ]


def judged():
    return [row | {"label": n % 3 != 0} for n, row in enumerate(demonstrations())]


def steps():
    """Working in steps, of which some are called wrong."""
    found = [row | {"completions": row["completion"].split(";")} for row in demonstrations(skip=0.0)]
    return [
        {"prompt": row["prompt"], "completions": row["completions"],
         "labels": [(n + k) % 3 != 0 for k in range(len(row["completions"]))]}
        for n, row in enumerate(found)
    ]  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:{% if m['role'] == 'assistant' %}BEGIN{{ m['content'] }}END"
    "{% else %}{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
TEMPLATES = {
    "plain": CHAT.replace("BEGIN", OPEN).replace("END", "<eos>" + CLOSE),
    "newline": CHAT.replace("BEGIN", OPEN).replace("END", "<eos>\n" + CLOSE),
    "unended": CHAT.replace("BEGIN", OPEN).replace("END", CLOSE + "<eos>\n"),
}


def make_tokenizer(kind, template):
    """`characters`: the lab's, without BOS. Else byte pairs with a BOS: `pieces` never cross = : ; # or a line's end,
    `merging` cross everything, so that a prompt's last token may merge with the completion; `ending`: pieces, and the
    tokenizer's own rule puts an eos at the end."""
    if kind == "characters":
        return lab_tokenizer()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    edges = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[=:;#\n]"), behavior="isolated")
    whole = tokenizers.pre_tokenizers.Split(tokenizers.Regex("\n"), behavior="isolated")
    backend.pre_tokenizer = whole if kind == "merging" else edges
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=96, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator([row["text"] + "user:assistant:\n" for row in texts()], trainer)
    single = "<bos> $A <eos>" if kind == "ending" else "<bos> $A"
    backend.post_processor = TemplateProcessing(
        single=single, special_tokens=[(name, backend.token_to_id(name)) for name in ("<bos>", "<eos>")]
    )
    words = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **words
    )
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@functools.cache
def write_model(root, kind, template, head, seed):
    """A random model as a directory; head None: a language model, 1: a reward model, 2: a process reward model."""
    directory = f"{root}/{kind}-{template}-{head}-{seed}"
    tokenizer = make_tokenizer(kind, template)
    config = {"vocab_size": len(tokenizer), "head_dim": 16, "tie_embeddings": True, "initializer_range": 0.2}
    model = models.build(models.ModelConfig(**SHAPE, **config))
    params = model.init(jax.random.key(seed))
    if head is None:
        models.save(directory, model, params, tokenizer)
        return directory
    layer = models.init_head(model.config, labels=head, bias=False, key=jax.random.key(seed + 1))
    layer |= {"bias": jnp.array([0.3, -0.2])} if head == 2 else {}
    whole = {"trunk": models.trunk_params(params), "head": layer}
    trunk = models.trunk_model(model)
    if head == 1:
        models.save_reward_model(directory, trunk, whole, tokenizer, append_eos=True)
    else:
        models.save_process_model(directory, trunk, whole, tokenizer, step_separator=";")
    return directory


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison: the rows, the options of both, and where we differ on purpose, in what and under which changes
    the two agree."""

    title: str
    trainer: str  # SFT, DPO, KTO, Reward, PRM, CPO, ORPO
    rows: Any
    trl: dict[str, Any] = dataclasses.field(default_factory=dict)
    ours: dict[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str = "pieces"
    template: str = "plain"
    reverse: bool = False  # TRL gets the rows in the reverse order of our batch
    departs: str = ""
    instead: dict[str, Any] | None = None


MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
KTO = {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}
CUT = {"max_length": 10}  # what the longest prompt has
KEPT = CUT | {"long_rows": "keep_start"}
PACKED = {"packing": True, "max_length": 48}
CENTRED = {"center_rewards_coefficient": 0.01}
TURNS = {"assistant_only_loss": True}
STEPS = {"step_separator": ";"}
SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}
OURS_SIMPO = {"loss_type": ("simpo",), "beta": 2.0}
IPO, OURS_IPO = {"loss_type": ["ipo"]}, {"loss_type": ("ipo",)}
ORPO = {"loss_type": ("orpo",)}
ONE_TOKEN, FOUR_TOKENS = functools.partial(pairs, "="), functools.partial(pairs, "1+1=")

AGREE = [
    Case(title="prompt and completion", trainer="SFT", rows=ended),
    Case(title="the same, cut", trainer="SFT", rows=ended, trl=CUT, ours=KEPT),
    Case(title="the same, by characters", trainer="SFT", rows=ended, tokenizer="characters"),
    Case(title="the same, packed", trainer="SFT", rows=ended, trl=PACKED | {"packing_strategy": "bfd"}, ours=PACKED),
    Case(title="text", trainer="SFT", rows=texts),
    Case(title="conversations", trainer="SFT", rows=conversations, trl=TURNS),
    Case(title="chat prompt and completion", trainer="SFT", rows=chats),
    Case(title="pairs", trainer="DPO", rows=pairs),
    Case(title="pairs, cut", trainer="DPO", rows=pairs, trl=CUT | IPO, ours=CUT | OURS_IPO),
    Case(title="pairs", trainer="DPO", rows=pairs, trl=MPO, ours={name: tuple(value) for name, value in MPO.items()}),
    Case(title="conversations that share a prompt", trainer="DPO", rows=pair_chats),
    Case(title="judged completions", trainer="KTO", rows=judged, trl=KTO, ours=KTO, reverse=True),
    Case(title="pairs", trainer="Reward", rows=pairs),
    Case(title="pairs with a margin", trainer="Reward", rows=margins, trl=CENTRED, ours=CENTRED),
    Case(title="conversations that share a prompt", trainer="Reward", rows=pair_chats),
    Case(title="steps", trainer="PRM", rows=steps, ours=STEPS),
    Case(title="pairs", trainer="CPO", rows=pairs, ours={"loss_type": ("cpo",)}),
    Case(title="pairs", trainer="CPO", rows=pairs, trl=SIMPO, ours=OURS_SIMPO),
    Case(
        title="pairs", trainer="CPO", rows=pairs, trl=SIMPO | {"cpo_alpha": 0.5}, ours=OURS_SIMPO | {"rpo_alpha": 0.5}
    ),
    Case(title="pairs, prompts of one token", trainer="ORPO", rows=ONE_TOKEN, ours=ORPO, tokenizer="characters"),
]

DEPART = [
    Case(
        title="tokens that merge across the boundary", trainer="SFT", rows=ended, tokenizer="merging",
        departs="ours tokenises the prompt alone, as sampling meets it; TRL both as one text",
        instead={"tokenizer": "pieces"},
    ),
    Case(title="the same", trainer="DPO", rows=pairs, tokenizer="merging", departs="the same",
         instead={"tokenizer": "pieces"}),
    Case(
        title="a tokenizer that adds an eos by itself", trainer="SFT", rows=ended, tokenizer="ending",
        departs="one eos; TRL's rows end with two, and both are trained", instead={"tokenizer": "pieces"},
    ),
    Case(
        title="a line's end after the eos, in the generation block", trainer="SFT", rows=conversations, trl=TURNS,
        template="newline", departs="trained up to the eos; TRL trains the line's end, which nobody samples",
        instead={"template": "plain"},
    ),
    Case(
        title="the eos after the generation block", trainer="SFT", rows=conversations, trl=TURNS, template="unended",
        departs="the eos is trained; by TRL not", instead={"template": "plain"},
    ),
    Case(
        title="conversations by default", trainer="SFT", rows=conversations,
        departs="the assistant's turns; TRL trains every token", instead={"trl": TURNS},
    ),
    Case(
        title="a line's end after the completion's eos", trainer="SFT", rows=chats, template="newline",
        departs="a completion ends with its eos; TRL trains what the template writes after it",
        instead={"template": "plain"},
    ),
    Case(
        title="long rows by default", trainer="SFT", rows=ended, trl=CUT, ours=CUT,
        departs="dropped; TRL cuts their end, and with it the eos", instead={"ours": KEPT},
    ),
    Case(
        title="long rows by default", trainer="Reward", rows=pairs, trl={"max_length": 14}, ours={"max_length": 14},
        departs="cut, as in DPO; TRL drops them", instead={"ours": {"max_length": 14, "long_rows": "drop"}},
    ),
    Case(
        title="KL rows", trainer="KTO", rows=judged, trl=KTO, ours=KTO,
        departs="a prompt with the completion of the next row; TRL with that of the one before",
        instead={"reverse": True},
    ),
    Case(
        title="long KL rows", trainer="KTO", rows=judged, trl=KTO | CUT, ours=KTO | CUT, reverse=True,
        departs="the other completion as its own row has it; TRL cuts prompt and whole completion anew",
        instead={"trl": KTO, "ours": KTO},
    ),
    Case(
        title="prompt tokens", trainer="ORPO", rows=FOUR_TOKENS, tokenizer="characters", ours=ORPO,
        departs="the sft term is over the completion; TRL's over the prompt too", instead={"rows": ONE_TOKEN},
    ),
    Case(
        title="a prompt that fills max_length", trainer="CPO", rows=pairs, trl=SIMPO | CUT, ours=OURS_SIMPO | CUT,
        departs="left out and counted; TRL divides by 0 tokens", instead={"rows": short_pairs},
    ),
]  # fmt: skip
