"""The lab's tokenizer: one token a character, in the class that every other part of the framework expects.

No beginning-of-sequence token is added and none exists. The vocabulary is filled up with reserved entries to a multiple
of 8, so that its axis can be sharded. Next to read: `task.py`.
"""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-=;# "
_SPECIAL = ("<pad>", "<eos>", "<unk>")


def lab_tokenizer() -> PreTrainedTokenizerFast:
    """A character tokenizer for digits and `+-=;#` and the space, with `<pad>` 0, `<eos>` 1 and `<unk>` 2.

    Every other character becomes `<unk>`, so only texts of these characters come back from decoding unchanged. The
    reserved entries `<r0>` … are never produced by encoding; a model that samples one is shown it by its name.
    """
    entries = [*_SPECIAL, *CHARACTERS]
    entries += [f"<r{index}>" for index in range(-len(entries) % 8)]
    backend = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
