"""Writes the character tokenizer as a Hugging Face tokenizer folder that transformers and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from megatron_ppo.data import char_tokenizer as chars


def save_char_tokenizer(folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Encoding with special tokens prepends BOS, as the tasks' prompts do. There is no unknown token: a
    character outside the alphabet raises.

    Args:
        context_length: tokens; stored as `model_max_length`.
    """
    tokenizer = Tokenizer(models.WordLevel(chars.vocabulary()))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in chars.SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{chars.BOS_TOKEN} $A",
        pair=f"{chars.BOS_TOKEN} $A $B",
        special_tokens=[(chars.BOS_TOKEN, chars.BOS_ID)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chars.BOS_TOKEN,
        "eos_token": chars.EOS_TOKEN,
        "pad_token": chars.PAD_TOKEN,
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
