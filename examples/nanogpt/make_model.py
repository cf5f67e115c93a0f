"""Make ``examples/nanogpt/model``: the shape of a small GPT, and a tokenizer whose tokens are bytes.

    python examples/nanogpt/make_model.py examples/nanogpt/model

There are no weights in the folder: train it with ``from_scratch``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, PreTrainedTokenizerFast

END = "<|endoftext|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and the end of a text: it can write anything."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[END] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False)


def make_config(tokenizer: PreTrainedTokenizerFast) -> GPT2Config:
    """The shape: 0.9 M parameters."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=["GPT2LMHeadModel"],
    )


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_config(tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
