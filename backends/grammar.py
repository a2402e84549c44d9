"""Grammars and JSON schemas that an answer has to obey: which of a model's tokens may come next.

llguidance does the work, the engine that llama.cpp itself can be built with. llama.cpp's own grammar code is no match
for strangers: deep nesting overflows its stack, hidden left recursion never ends, and a token that does not fit aborts
the process (tests/test_grammar.py says how). llguidance counts its work, at the start and for each token, and gives up
with an error.

A grammar in GBNF is translated first. One difference remains: a run of characters, like [a-z]+, takes as many as it
can, as a lexer does; it does not leave the last ones to what follows.
"""

from __future__ import annotations

import ctypes as ct
import json
import re
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from llama_cpp import llama_cpp as lc
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from numpy.typing import NDArray

from backends.vocabulary import Vocabulary
from capabilities.errors import UsageError

# Work and memory of one request's grammar. A fraction of llguidance's defaults: its decode step is everybody's.
_LIMITS: Final = LLParserLimits(
    max_items_in_row=500,  # ways to read the text so far: what a schema of 500 optional properties needs; 20 ms a token
    max_lexer_states=25_000,  # up to 2 kB each
    max_grammar_size=100_000,
    initial_lexer_fuel=500_000,
    verbose_errors=False,  # they would quote the grammar and the answer
)
WHITESPACE: Final = r"( |\n[ \t]{0,20})?"  # of JSON: what people write, and nothing in which a model could get lost
_RULES_MAX: Final = 500  # the translator's time grows with their square: half a second for these
_MESSAGE_CHARS: Final = 300

_GBNF_PARTS: Final = re.compile(
    r"""(?P<comment>\#[^\r\n]*)|(?P<literal>"(?:\\.|[^"\\])*")|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<any>\.)""", re.DOTALL
)
_ESCAPES: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


class Grammar:
    """The state of one answer's grammar (scheduler.constraint.Constraint). One thread at a time may use it."""

    def __init__(self, matcher: LLMatcher, n_vocab: int) -> None:
        self._matcher = matcher
        self._n_vocab = n_vocab

    def allowed(self) -> NDArray[np.bool_]:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed: NDArray[np.bool_] = np.unpackbits(bits, count=self._n_vocab, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            raise self._given_up()
        return allowed

    def accept(self, token: int) -> None:
        """Raises UsageError for a token that is not allowed."""
        self.go_on([token])

    def go_on(self, tokens: Sequence[int]) -> None:
        """Accept several tokens. Raises as `accept` does."""
        if self._matcher.try_consume_tokens(list(tokens)) == len(tokens):
            return
        if self._matcher.is_error():
            raise self._given_up()
        raise UsageError("the answer so far is not in the language of its grammar")

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    @staticmethod
    def _given_up() -> UsageError:
        return UsageError("the grammar or schema leaves no next token, or takes too much work", hint="Make it simpler.")


class Grammars:
    """Makes grammars for one model's vocabulary. The first takes a second or two, for a large vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def of_gbnf(self, text: str, answer: Sequence[int] = ()) -> Grammar:
        """The language of a grammar's `root`, after the tokens of an answer so far.

        Raises:
            UsageError: it is no grammar, too large a one, or the answer is not the beginning of one of its texts.
        """
        return self.of_lark(_lark(text), answer)

    def of_schema(self, text: str, answer: Sequence[int] = ()) -> Grammar:
        """JSON that obeys a schema (`{"type": "object"}`: any object). Raises as of_gbnf does."""
        return self._new(schema_grammar(text), answer)

    def of_lark(self, text: str, answer: Sequence[int] = ()) -> Grammar:
        """The language of a Lark grammar's `start`, in llguidance's dialect. Raises as of_gbnf does."""
        return self._new(LLMatcher.grammar_from_lark(text), answer)

    def _new(self, grammar: str, answer: Sequence[int]) -> Grammar:
        matcher = LLMatcher(self._made_tokenizer(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise UsageError(f"the grammar or schema cannot be used: {_first_line(matcher.get_error())}")
        made = Grammar(matcher, self._vocabulary.n_vocab)
        made.go_on(answer)
        if not made.complete:
            made.allowed()  # one that leaves nothing is refused now
        return made

    def _made_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._vocabulary)
            return self._tokenizer


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    tokens = range(vocabulary.n_vocab)
    # What is not shown as text cannot be part of a text: llguidance knows it by this byte, which no UTF-8 begins with.
    pieces = [vocabulary.piece(token) or b"\xff" + vocabulary.shown(token) for token in tokens]
    made: LLTokenizer = LLTokenizer.from_llamacpp(  # type: ignore[attr-defined]
        tokens=pieces,
        vocab_ptr=vocabulary.pointer,
        tokenize_fptr=ct.cast(lc._lib.llama_tokenize, ct.c_void_p).value,
        eos_token=[token for token in tokens if vocabulary.is_end(token)],
        slices=None,
    )
    return made


def schema_grammar(text: str) -> str:
    """A JSON schema as llguidance takes it. UsageError if the text is no JSON object."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("the JSON schema is no JSON") from None
    if not isinstance(schema, dict | bool):
        raise UsageError("a JSON schema is an object")
    return str(LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE}))


def _lark(gbnf: str) -> str:
    if gbnf.count("::=") > _RULES_MAX:
        raise UsageError(f"a grammar has at most {_RULES_MAX} rules")
    try:
        return str(gbnf_to_lark(_GBNF_PARTS.sub(_plain, gbnf)))
    except GbnfToLarkError as error:
        message = str(error).partition(" at line ")  # what follows quotes the grammar
        line = message[2].partition(",")[0]
        raise UsageError(f"the grammar cannot be read: {message[0]}, in line {line}") from None
    except RecursionError:
        raise UsageError("the grammar nests too deep") from None
    except Exception as error:  # the translator has no error of its own for names that are missing or taken
        raise UsageError(f"the grammar cannot be used: {_first_line(str(error))}") from None


def _plain(part: re.Match[str]) -> str:
    """A part of a grammar without what the translator takes for something else."""
    match part.lastgroup:
        case "comment":
            return ""
        case "any":
            return r"[^\x00]"  # its dot would leave out the end of a line
        case _:
            return _ESCAPES.sub(_escape, part[0])


def _escape(escape: re.Match[str]) -> str:
    """An escape in the one form that both literals and classes read: \\xHH, or the character itself."""
    if escape[4] is not None:
        return r"\x2d" if escape[4] == "-" else escape[0]
    code = int(escape[1] or escape[2] or escape[3], 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise UsageError(f"the grammar names a character that there is not: U+{code:X}")
    return chr(code)


def _first_line(text: str) -> str:
    return text.splitlines()[0][:_MESSAGE_CHARS] if text else "it is empty"
