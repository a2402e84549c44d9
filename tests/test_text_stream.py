"""Text for people: whole characters only, and nothing of a stop string."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import UsageError
from scheduler.text_stream import STOP_CHARACTERS_MAX, STOPS_MAX, TextDelta, TextStream


def stream(pieces: list[bytes], *stops: str) -> tuple[list[str], bool]:
    """The delta of each piece, the last one of finish()."""
    text = TextStream(stops)
    deltas = []
    for piece in pieces:
        delta = text.feed(piece)
        deltas.append(delta.text)
        if delta.stopped:
            return deltas, True
    end = text.finish()
    return [*deltas, end.text], end.stopped


def test_plain_text_passes_at_once() -> None:
    assert stream([b"Hello", b", ", b"world"]) == (["Hello", ", ", "world", ""], False)


def test_a_character_is_never_cut() -> None:
    wave = "a👋🏽b".encode()
    deltas, _ = stream([wave[i : i + 1] for i in range(len(wave))])
    assert deltas == ["a", "", "", "", "👋", "", "", "", "🏽", "b", ""]


def test_invalid_bytes_show_as_soon_as_they_are_provably_so() -> None:
    assert stream([b"\xff", b"a"]) == (["\ufffd", "a", ""], False)
    assert stream([b"\xf0\x9f", b"a"]) == (["", "\ufffda", ""], False)  # the second piece proves it
    assert stream([b"\xed\xa0\x80"])[0][0] == "\ufffd\ufffd\ufffd"  # a surrogate is no UTF-8


def test_a_stop_string_over_several_tokens_leaks_nothing() -> None:
    assert stream([b"Hi ", b"<", b"|en", b"d|", b">", b"never"], "<|end|>") == (["Hi ", "", "", "", ""], True)


def test_text_that_only_looked_like_a_stop_string_comes_whole() -> None:
    assert stream([b"a<", b"|e", b"lse"], "<|end|>") == (["a", "", "<|else", ""], False)
    assert stream([b"a<|en"], "<|end|>") == (["a", "<|en"], False)


def test_text_around_the_stop_string_in_one_token() -> None:
    assert stream([b"one STOP two"], "STOP") == (["one "], True)


def test_a_stop_string_that_begins_inside_a_broken_attempt() -> None:
    assert stream([b"aab"], "ab") == (["a"], True)
    assert stream([b"ab", b"ab", b"ac"], "abac") == (["", "ab", ""], True)
    assert stream([b"\n", b"\n", b"\n", b"x"], "\n\nx") == (["", "", "\n", ""], True)


def test_several_stop_strings() -> None:
    # A field report: text came twice with these two.
    assert stream([b"Bob: hi", b"\n", b"Alice: ho"], "\n", "Alice:") == (["Bob: hi", ""], True)
    assert stream([b"x Ali", b"ce", b": y"], "\n", "Alice:") == (["x ", "", ""], True)
    assert stream([b"x bc abc"], "abc", "bc") == (["x "], True)
    assert stream([b"abc"], "bc", "abc") == ([""], True)  # both complete together: the longest
    assert stream([b"abcd"], "abcd", "bc") == (["a"], True)  # "bc" completes first


def test_stop_strings_of_several_bytes_a_character() -> None:
    end = "終わり".encode()
    for cut in range(1, len(end)):
        deltas, stopped = stream(["前".encode() + end[:cut], end[cut:] + "後".encode()], "終わり")
        assert ("".join(deltas), stopped) == ("前", True)
    assert stream(["é".encode()[:1], "é".encode()[1:] + b"!"], "é!") == (["", ""], True)
    # The same first byte, another character.
    assert stream(["終".encode(), "え".encode()], "終わり") == (["", "終え", ""], False)


def test_a_character_that_the_end_cuts_is_left_out() -> None:
    assert stream([b"a\xf0\x9f"]) == (["a", ""], False)
    assert stream([b"a<", b"\xf0\x9f\x98"], "<end>") == (["a", "", "<"], False)


def test_nothing_comes_after_a_stop() -> None:
    text = TextStream(["."])
    assert text.feed(b"a.b") == TextDelta("a", True)
    assert text.feed(b"c") == TextDelta("", True)
    assert text.finish() == TextDelta("", True)


@pytest.mark.parametrize(
    "stops", [[""], ["a", ""], ["x" * (STOP_CHARACTERS_MAX + 1)], ["x"] * (STOPS_MAX + 1), "abc", [b"x"], [1]]
)
def test_bad_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="stop"):
        TextStream(stops)


def reference(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: of all occurrences the one that ends first, then the one that begins first."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(st.data())
def test_the_result_does_not_depend_on_where_tokens_cut(data: st.DataObject) -> None:
    alphabet = st.sampled_from("aab👋é")
    text = data.draw(st.text(alphabet, max_size=30))
    stops = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=4))
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))))
    pieces = [encoded[a:b] for a, b in zip([0, *cuts], [*cuts, len(encoded)], strict=True)]
    deltas, stopped = stream(pieces, *stops)
    assert ("".join(deltas), stopped) == reference(text, stops)


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_any_bytes_give_the_text_that_python_gives(pieces: list[bytes]) -> None:
    deltas, _ = stream(pieces)
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces))  # but for an unfinished tail
    assert "".join(deltas) == whole


@given(st.text(st.sampled_from("ab"), max_size=40), st.text(st.sampled_from("ab"), min_size=1, max_size=6))
def test_no_more_is_held_back_than_could_become_the_stop_string(text: str, stop: str) -> None:
    shown = ""
    stream = TextStream([stop])
    for n, character in enumerate(text, 1):
        delta = stream.feed(character.encode())
        shown += delta.text
        if delta.stopped:
            return
        assert text[:n].startswith(shown)
        held = text[len(shown) : n]
        assert stop.startswith(held)
