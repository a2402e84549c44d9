"""A model's tokens: text to ids and back, its end tokens and its chat template."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llama_cpp import llama_cpp as lc

from backends.chat_template import ChatTemplate
from capabilities.errors import UsageError
from capabilities.tool_form import ToolForm

_PIECE_BYTES: Final = 256
_PROMPT_BYTES_MAX: Final = 16 << 20


class Vocabulary:
    """The vocabulary of a loaded llama.cpp model, which must outlive it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._vocab = lc.llama_model_get_vocab(model)
        self.n_vocab = int(lc.llama_vocab_n_tokens(self._vocab))
        template = lc.llama_model_chat_template(model, None)
        self.chat_template: str | None = template.decode(errors="replace") if template else None
        self._pieces: dict[int, bytes] = {}
        self._made: tuple[str, ChatTemplate] | None = None

    @property
    def pointer(self) -> Any:
        """llama.cpp's vocabulary itself."""
        return self._vocab

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text. `add_special` adds the model's start token, `parse_special` reads control tokens.

        Raises:
            UsageError: the text is too long to be a prompt, or the model has no tokenizer.
        """
        data = text.encode("utf-8", errors="replace")
        if len(data) > _PROMPT_BYTES_MAX:
            raise UsageError(f"the prompt has {len(data)} bytes; at most {_PROMPT_BYTES_MAX}")
        room = len(data) + 16
        buffer = (lc.llama_token * room)()
        count = lc.llama_tokenize(self._vocab, data, len(data), buffer, room, add_special, parse_special)
        if count < 0:
            raise UsageError("this model's tokenizer cannot read the prompt")
        return list(buffer[:count])

    def piece(self, token: int) -> bytes:
        """The bytes of one token, b"" for control tokens. Not necessarily whole characters."""
        if token not in self._pieces:
            buffer = ct.create_string_buffer(_PIECE_BYTES)
            n = lc.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, False)
            if n < 0:
                buffer = ct.create_string_buffer(-n)
                n = lc.llama_token_to_piece(self._vocab, token, buffer, -n, 0, False)
            self._pieces[token] = buffer.raw[: max(n, 0)]
        return self._pieces[token]

    def shown(self, token: int) -> bytes:
        """The bytes of one token as they are shown to people: `piece`, and the name of a control token."""
        return self.piece(token) or self._special_text(token).encode()

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(lc.llama_vocab_is_eog(self._vocab, token))

    def _special_text(self, token: int) -> str:
        if token < 0:
            return ""
        text = lc.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace") if text else ""

    def control_token(self, text: str) -> int | None:
        """The control token of that name, if there is one: such a token is no text."""
        tokens = self.tokenize(text, add_special=False) if text else []
        return tokens[0] if len(tokens) == 1 and not self.piece(tokens[0]) else None

    @property
    def tool_form(self) -> ToolForm | None:
        """How the model writes calls of tools; None: it is not taught to, or not in a way that is known here."""
        return None if self.chat_template is None else self._template(self.chat_template).tool_form

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Messages ({"role", "content", ...}) and tools, in OpenAI's shape, as a prompt by the model's own template.

        Raises:
            UsageError: the model has no template, the template refuses the messages, or it knows nothing of tools.
        """
        if self.chat_template is None:
            hint = "Send the prompt as it is: `swarmctl ask --raw`, or /v1/completions."
            raise UsageError("this model has no chat template", hint=hint, parameter="messages")
        prompt = self._template(self.chat_template).render(messages, tools)
        start = self._special_text(lc.llama_vocab_bos(self._vocab))
        # Where the vocabulary adds its start token by itself, a template that writes it too would double it.
        if start and lc.llama_vocab_get_add_bos(self._vocab) and prompt.startswith(start):
            prompt = prompt[len(start) :]
        return prompt

    def _template(self, source: str) -> ChatTemplate:
        if self._made is None or self._made[0] != source:
            start = self._special_text(lc.llama_vocab_bos(self._vocab))
            end = self._special_text(lc.llama_vocab_eos(self._vocab))
            self._made = (source, ChatTemplate(source, start, end))
        return self._made[1]
