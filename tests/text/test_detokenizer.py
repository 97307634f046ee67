"""Incremental text: the same as decoding at once, never half a character, no stop string leaks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.text import Detokenizer, StopStrings

BYTES = [bytes([i]) for i in range(256)]


@given(st.text())
def test_bytes_in_any_cut_give_the_text(text: str) -> None:
    detokenizer = Detokenizer(BYTES)
    parts = [detokenizer.add(byte) for byte in text.encode("utf-8", "replace")]
    assert detokenizer.finish() == ""
    assert "".join(parts) == text.encode("utf-8", "replace").decode()
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


@given(st.binary())
def test_bytes_that_are_no_text_lose_nothing(raw: bytes) -> None:
    detokenizer = Detokenizer(BYTES)
    parts = "".join(detokenizer.add(byte) for byte in raw) + detokenizer.finish()
    assert parts == raw.decode("utf-8", "replace")


PIECES = [b" a", b"\xc3", b"\xa9", b" ", b"", b"\xf0\x9f", b"\x98\x80", b"z", b"\xff"]


@given(st.lists(st.lists(st.integers(0, len(PIECES)), max_size=8), max_size=8), st.booleans())
def test_what_others_have_learned_changes_nothing(answers: list[list[int]], strip: bool) -> None:
    """Answers share the texts of tokens; each comes to what it comes to alone."""
    texts: dict[int, str] = {}
    for tokens in answers:
        together, alone = Detokenizer(PIECES, strip, texts=texts), Detokenizer(PIECES, strip)
        parts = [together.add(token) for token in tokens] + [together.finish()]
        assert parts == [alone.add(token) for token in tokens] + [alone.finish()]
        raw = b"".join(PIECES[token] for token in tokens if token < len(PIECES))
        first = next((PIECES[token] for token in tokens if token < len(PIECES) and PIECES[token]), b"")
        wanted = raw[1:] if strip and first.startswith(b" ") else raw
        assert "".join(parts) == wanted.decode("utf-8", "replace")


def test_first_space_and_unknown_ids() -> None:
    detokenizer = Detokenizer([b"", b" a", b" b"], strip_first_space=True)
    assert [detokenizer.add(token) for token in (0, 1, 2, 99, -1)] == ["", "a", " b", "", ""]


@given(st.text("abc", max_size=40), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_in_any_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    """What is shown is the text up to the first stop string, however the text arrives."""
    matcher, shown, stopped, at = StopStrings(stops), "", None, 0
    while at < len(text) and stopped is None:
        size = data.draw(st.integers(1, 5))
        piece, stopped = matcher.add(text[at : at + size])
        shown, at = shown + piece, at + size
        assert not any(stop in shown for stop in stops)
    if stopped is None:
        shown += matcher.finish()
    hits = [(text.find(stop), stop) for stop in stops if stop in text]
    if not hits:
        assert (shown, stopped) == (text, None)
    else:
        # Arriving in pieces, a stop string may end earlier than one that begins earlier.
        ends = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        seen = [(text.find(stop), stop) for stop in stops if 0 <= text.find(stop) <= ends]
        assert stopped in [stop for _, stop in seen]
        assert shown == text[: text.find(stopped)]
