"""Grammars and schemas: what they allow is what they say, and no text of a stranger does more than be refused."""

from __future__ import annotations

import ctypes as ct
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_cpp import llama_cpp as lc
from numpy.typing import NDArray

from backends.grammar import Grammar, Grammars
from backends.llama import LlamaModel, LlamaSettings
from backends.vocabulary import Vocabulary
from capabilities.errors import UsageError
from tests.expert_models import tiny_file
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[Vocabulary]:
    with LlamaModel(tiny_file("olmoe", "f32"), LlamaSettings(context_tokens=64, batch_tokens=48)) as model:
        yield model.vocabulary


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary)


def allows(grammar: Grammar, text: str) -> tuple[bool, bool]:
    """Whether a text is the beginning of one of the language, and whether it is one. Byte by byte: tokens below 256."""
    for byte in text.encode():
        if not grammar.allowed()[byte]:
            return False, False
        grammar.accept(byte)
    return True, grammar.complete or bool(grammar.allowed()[256:].any() and may_end(grammar))


def may_end(grammar: Grammar) -> bool:
    return bool(grammar.allowed()[END])


def generate(grammar: Grammar, text: str) -> None:
    for byte in text.encode():
        grammar.allowed()
        grammar.accept(byte)


END = 256 + 6  # <|endoftext|> of the byte vocabulary


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        (r'root ::= "yes" | "no"', ["yes", "no"], ["maybe", "yes "]),
        ('# a list\nroot ::= ("- " item)+ # items\nitem ::= [^\\n]+ "\\n"', ["- a\n- b\n"], ["a", "- \n"]),
        (r'root ::= num (" + " num){1,2}' + "\n" r'num ::= [0-9]{1,3}', ["1 + 22", "1 + 2 + 333"], ["1234", " 1"]),
        (r'root ::= "\x41" "\u0042" [\u0043-\u0045\-\]x] . "\U0001F600"', ["ABD\n😀", "AB-x😀", "AB]é😀"], ["ABF"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], [")", "(x))"]),
        ('root ::= "a" rest\nrest ::= "" | "b" rest', ["a", "abbb"], ["b"]),
        ("root ::= [é-ü]+ \"ß\"?", ["éü", "êß"], ["e", "ß"]),
    ],
)  # fmt: skip
def test_a_grammar_allows_its_language(grammars: Grammars, gbnf: str, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert allows(grammars.of_gbnf(gbnf), text) == (True, True), text
        begun = text.encode()[: len(text) // 2]
        rest = grammars.of_gbnf(gbnf, list(begun))  # as after a change of the leader, mid-character or not
        assert all(rest.allowed()[byte] and rest.accept(byte) is None for byte in text.encode()[len(begun) :])
    for text in bad:
        assert allows(grammars.of_gbnf(gbnf), text) == (False, False), text


@pytest.mark.parametrize(
    "gbnf",
    [
        'root ::= "yes" | "no" | "yesterday"',
        'root ::= obj\nobj ::= "{" ws (pair ("," ws pair)*)? "}"\npair ::= "a" [b-d]* ":" ws [0-9]+\nws ::= " "?',
        'root ::= ("(" root ")")? [xyz]',
        'root ::= (" the" | " then" | "in" | "ing")+ "!"',
    ],
)
def test_what_may_come_next_is_what_llama_cpp_says(grammars: Grammars, vocabulary: Vocabulary, gbnf: str) -> None:
    """Along random texts of the language, over the whole vocabulary, merged tokens and end tokens included.

    Where only one text can follow, ours allows no other tokens for it than the tokenizer's.
    """
    choose = random.Random(gbnf)
    for _ in range(4):
        ours, theirs = grammars.of_gbnf(gbnf), LlamaGrammar(vocabulary, gbnf)
        for _ in range(12):
            allowed, reference = ours.allowed(), theirs.allowed()
            token = choose.choice(np.flatnonzero(allowed).tolist())
            assert np.array_equal(allowed, reference) or (allowed.sum() == 1 and reference[token])
            if vocabulary.is_end(token):
                break
            ours.accept(token)
            theirs.accept(token)
            if ours.complete:
                break


class LlamaGrammar:
    """llama.cpp's own, for grammars that do it no harm."""

    def __init__(self, vocabulary: Vocabulary, gbnf: str) -> None:
        self._n = vocabulary.n_vocab
        self._sampler = lc.llama_sampler_init_grammar(vocabulary.pointer, gbnf.encode(), b"root")
        assert self._sampler

    def allowed(self) -> NDArray[np.bool_]:
        data = (lc.llama_token_data * self._n)(*((i, 0.0, 0.0) for i in range(self._n)))
        array = lc.llama_token_data_array(data, self._n, -1, False)
        lc.llama_sampler_apply(self._sampler, ct.byref(array))
        return np.array([data[i].logit == 0.0 for i in range(self._n)])

    def accept(self, token: int) -> None:
        lc.llama_sampler_accept(self._sampler, token)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "is_one"),
    [('{"name":"x","age":5}', True), ('{"name": "x", "age": 150, "tags": ["a", "b"]}', True),
     ('{\n  "name": "é",\n  "age": 7\n}', True), ('{"name":"x","age":151}', False), ('{"age":5', False),
     ('{"name":"123456789', False), ('{"name":"x","age":5,"more"', False), ('{   "name"', False), ("[", False)],
)  # fmt: skip
def test_a_schema_allows_what_obeys_it(grammars: Grammars, text: str, is_one: bool) -> None:
    assert allows(grammars.of_schema(json.dumps(SCHEMA)), text) == (is_one, is_one)


def test_any_object_is_an_object(grammars: Grammars) -> None:
    assert allows(grammars.of_schema('{"type":"object"}'), '{"a": [1, {"b": null}]}') == (True, True)
    assert allows(grammars.of_schema('{"type":"object"}'), "[")[0] is False


def test_an_answer_so_far_that_is_not_of_the_language_is_refused(grammars: Grammars) -> None:
    with pytest.raises(UsageError, match="so far"):
        grammars.of_gbnf('root ::= "yes"', list(b"no"))
    with pytest.raises(UsageError, match="so far"):
        grammars.of_gbnf('root ::= "yes"', [*b"yes", END])
    grammar = grammars.of_gbnf('root ::= "yes"')
    with pytest.raises(UsageError, match="so far"):
        grammar.accept(ord("n"))
    assert grammars.of_gbnf('root ::= "yes"', list(b"yes")).complete


DEEP = '{"items":' * 2_000 + "{}" + "}" * 2_000
BROAD = {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)]}
HOSTILE_GRAMMARS = [
    "", "root", "root ::= x", 'x ::= "a"', 'root ::= "a',
    "root ::= [a", "root ::= [z-a]", 'root ::= "a"{5,2}',
    "root ::= root", 'root ::= b root "x"\nb ::= c\nc ::= ""', "root ::= \x00", 'root ::= "\\q"', 'root ::= "\\ud800"',
    'root ::= "a"{' + "9" * 9_000 + "}",
    "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000, 'root ::= ("a"{1000}){1000}',
    'start ::= "a"\nroot ::= start', 'root ::= "\\U00110000"', "root ::= " + " | ".join(f"x{i}" for i in range(5_000)),
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(4_000)) + '\nr4000 ::= "a"',
]  # fmt: skip
HOSTILE_SCHEMAS = [
    "", "x", "[]", "1", "null", '{"$ref":"#"}', '{"$ref":"http://127.0.0.1:1/x"}', '{"type":"nothing"}', DEEP,
    json.dumps(BROAD), '{"type":"string","pattern":"("}', '{"type":"string","format":"no such thing"}', "{" * 60_000,
    '{"enum":[]}', '{"type":"integer","minimum":2,"maximum":1}',
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "text"),
    [*(("gbnf", text) for text in HOSTILE_GRAMMARS), *(("schema", text) for text in HOSTILE_SCHEMAS)],
    ids=lambda text: repr(text)[:30],
)
def test_texts_that_cannot_be_used_are_refused_at_once(grammars: Grammars, kind: str, text: str) -> None:
    make: Any = {"gbnf": grammars.of_gbnf, "schema": grammars.of_schema}[kind]
    started = time.process_time()
    with pytest.raises(UsageError) as caught:
        make(text)
    assert time.process_time() - started < 5  # each is a matter of milliseconds
    assert len(caught.value.message) < 500


def test_a_grammar_whose_work_grows_is_given_up(grammars: Grammars) -> None:
    """Every text of it can be read in ever more ways: a hundred tokens take 0.3 s, and then there are no more."""
    grammar = grammars.of_gbnf('root ::= s\ns ::= s s | s s s | s "a" s | s "b" s | s "c" s | "a"')
    with pytest.raises(UsageError, match="too much work"):
        generate(grammar, "a" * 200)


@pytest.mark.parametrize("gbnf", ["root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000], ids=["nested"])
def test_why_llama_cpp_is_not_asked(gbnf: str) -> None:
    """The day on which this fails, llama.cpp may be looked at again."""
    program = (
        "import sys; from llama_cpp import llama_cpp as lc; from pathlib import Path\n"
        "p = lc.llama_model_default_params(); p.vocab_only = True\n"
        "m = lc.llama_model_load_from_file(sys.argv[1].encode(), p)\n"
        "lc.llama_sampler_init_grammar(lc.llama_model_get_vocab(m), sys.stdin.read().encode(), b'root')\n"
    )
    command = [sys.executable, "-c", program, str(tiny_file("olmoe", "f32"))]
    done = subprocess.run(command, check=False, input=gbnf, text=True, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode < 0
