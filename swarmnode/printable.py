"""Text from elsewhere (a peer's name, a model's words, a file's metadata) made harmless for terminals and logs.

Control characters can move the cursor, set the window's title or hide what follows, and some can turn the direction of
text: they become visible escapes. Everything else, emoji and their joiners included, stays as it is.
"""

from __future__ import annotations

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_DIRECTIONS = {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_LINE = _CONTROLS | _DIRECTIONS
_LINES = {code: text for code, text in _LINE.items() if chr(code) not in "\n\t"}


def printable_line(text: str) -> str:
    """Without any control character, line breaks included."""
    return text.translate(_LINE)


def printable_text(text: str) -> str:
    """Without control characters except line breaks and tabs."""
    return text.translate(_LINES)
