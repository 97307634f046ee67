"""Conversations: the messages of a recorded prompt, where the template makes exactly that prompt of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.text import Tokenizer
from slipstream.text.template import ChatTemplate
from slipstream.training.records import Record

Message = dict[str, Any]
_SAID = {name: f"what {name} says" for name in ("system", "user", "assistant", "user again")}


def text_of(record: Record, tokenizer: Tokenizer, template: ChatTemplate | None) -> dict[str, Any]:
    """A record's last answer after all that came before it: `messages` of a chat, else `prompt` and `completion`."""
    start, stop = record.spans[-1]
    said, asked = tokenizer.decode(record.tokens[start:stop]), record.tokens[:start]
    if template is not None and (messages := conversation_of(asked, tokenizer, template)):
        return {"messages": [*messages, {"role": "assistant", "content": said}]}
    begun = tokenizer.add_bos and asked[0] == tokenizer.bos  # written by the tokenizer, whoever reads the text
    return {"prompt": _shown(asked[1 if begun else 0 :], tokenizer), "completion": said}


def conversation_of(prompt: Sequence[int], tokenizer: Tokenizer, template: ChatTemplate) -> list[Message] | None:
    """Messages of which the template makes this prompt, token by token; None where none are found."""
    text = _shown(prompt, tokenizer)
    turns = ("user", "assistant", "user again")
    for roles in (turns, ("system", *turns)):  # a system message that the template has of its own is none that was sent
        try:
            found = _taken_apart(text, _between(roles, tokenizer, template))
            if found and tokenizer.encode_chat(template, found) == [*prompt]:
                return found
        except SlipstreamError:  # a template that does not take such messages made no prompt of any
            continue
    return None


def _shown(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    detokenizer = tokenizer.detokenizer(tokenizer.special.values())
    return "".join(map(detokenizer.add, tokens)) + detokenizer.finish()


def _between(roles: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate) -> Mapping[str, str]:
    """What the template writes before each role's words, and at the end."""
    messages = [{"role": role.split()[0], "content": _SAID[role]} for role in roles]
    text = _shown(tokenizer.encode_chat(template, messages), tokenizer)
    written = {}
    for role in roles:
        written[role], _, text = text.partition(_SAID[role])
    return {**written, "end": text}


def _taken_apart(text: str, written: Mapping[str, str]) -> list[Message] | None:
    """The messages in a prompt's text: an optional system message, then user and assistant in turns."""
    if not all(written.values()) or not text.startswith(next(iter(written.values()))):
        return None
    text = text[len(next(iter(written.values()))) :]
    messages: list[Message] = []
    if "system" in written:
        said, found, text = text.partition(written["user"])
        if not found:
            return None
        messages.append({"role": "system", "content": said})
    while True:
        said, found, rest = text.partition(written["assistant"])
        if not found or not rest:  # what comes before an answer is also what asks for one
            messages.append({"role": "user", "content": text.removesuffix(written["end"])})
            return messages
        messages.append({"role": "user", "content": said})
        said, found, text = rest.partition(written["user again"])
        if not found:
            return None
        messages.append({"role": "assistant", "content": said})
