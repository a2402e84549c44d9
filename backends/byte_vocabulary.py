"""A tokenizer for models that never saw text: every byte is a token, so any prompt goes in and any token comes out.

It is llama.cpp's byte-level BPE ("gpt2"): 256 byte tokens, a handful of merges, three control tokens of the ChatML
form, and numbered words that fill the vocabulary up to the size that a real model's output head has.
"""

from __future__ import annotations

from typing import Any

_NORMAL, _CONTROL = 1, 3
_MERGES = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ġ", "a"), ("i", "n"), ("in", "g"))
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
N_RESERVED = 256 + len(_MERGES) + len(_CONTROLS)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    stand_ins = iter(range(256, 512))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def add_byte_tokenizer(writer: Any, n_vocab: int) -> None:
    """Write the tokenizer's keys to a `gguf.GGUFWriter`. Token b is the byte b for b < 256.

    Raises ValueError if `n_vocab` has no room for the bytes, merges and control tokens.
    """
    if n_vocab < N_RESERVED:
        raise ValueError(f"a byte-level vocabulary needs at least {N_RESERVED} tokens, not {n_vocab}")
    tokens = [*byte_alphabet(), *(left + right for left, right in _MERGES)]
    end_of_text = len(tokens)
    tokens += _CONTROLS
    kinds = [_NORMAL] * end_of_text + [_CONTROL] * len(_CONTROLS)
    tokens += [f"Ġword{number}" for number in range(n_vocab - len(tokens))]
    kinds += [_NORMAL] * (n_vocab - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{left} {right}" for left, right in _MERGES])
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text)
    writer.add_eot_token_id(end_of_text + _CONTROLS.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
