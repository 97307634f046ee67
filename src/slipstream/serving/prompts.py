"""Prompts: texts and conversations as token ids that fit into the context. Long ones do not hold up the event loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from slipstream.engine.client import EngineClient
from slipstream.serving.errors import ApiError, bad_request
from slipstream.text import Tokenizer
from slipstream.text.parsers import REASONING
from slipstream.text.sandbox import TemplateError
from slipstream.text.template import ChatTemplate

Result = TypeVar("Result")
TAIL = 16
"""Tokens at a prompt's end in which it may open a thought."""
FILL_IN = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), ("<PRE>", "<SUF>", "<MID>"),
)  # fmt: skip
"""Tokens before a beginning, before an ending, and before what is to be put between, of models that learned to."""


class Prompts:
    """Makes them for one model."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate | None):
        self._client, self.tokenizer, self.template = client, tokenizer, template
        # The tokenizer is not to be used by two threads at once, and a long text must not hold up the loop.
        self._texts = ThreadPoolExecutor(1, "texts")
        self._templates = ThreadPoolExecutor(1, "templates")  # one may take long: only other chats wait for it

    async def off_loop(self, work: Callable[[], Result]) -> Result:
        """Run something on the thread that the tokenizer belongs to."""
        return await asyncio.get_running_loop().run_in_executor(self._texts, work)

    async def of_text(self, text: str, field: str, *, add_bos: bool | None = None) -> list[int]:
        """A text's tokens. Raises ApiError."""
        surrogate_free(text, field)
        self.may_fit(len(text), field)
        return await self.off_loop(lambda: self.tokenizer.encode(text, add_bos=add_bos))

    async def of_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """A conversation's tokens; `variables` are for the template. Raises ApiError."""
        if self.template is None:
            raise bad_request("this model has no chat template; use /v1/completions", "messages")
        template = self.template
        for index, message in enumerate(messages):
            surrogate_free(message["content"], f"messages[{index}].content")
        beside = [variables.get("tools"), *(message["tool_calls"] for message in messages if "tool_calls" in message)]
        size = sum(len(message["content"]) for message in messages) + sum(len(msgspec.json.encode(b)) for b in beside)
        self.may_fit(size, "messages")
        try:
            rendered = await asyncio.get_running_loop().run_in_executor(
                self._templates, lambda: self.tokenizer.render(template, messages, **variables)
            )
        except TemplateError as error:
            raise bad_request(str(error), "messages") from error
        tokens = await self.off_loop(lambda: self.tokenizer.encode_rendered(rendered))
        self.fits(tokens, "messages")
        return tokens

    async def between(self, prefix: str, suffix: str) -> list[int]:
        """The tokens that ask for what is between two texts. Raises ApiError where the model never learned it."""
        look_up = self.tokenizer.inner.token_to_id  # in folders such tokens are often not called special
        ids = await self.off_loop(lambda: {name: look_up(name) for name in itertools.chain(*FILL_IN)})
        known = {name: token for name, token in ids.items() if token is not None}
        names = next((names for names in FILL_IN if all(name in known for name in names)), None)
        if names is None:
            raise bad_request("this model has no tokens for filling in; leave suffix out", "suffix")
        before, after, middle = (known[name] for name in names)
        start = await self.of_text("", "prompt")  # what the model's prompts begin with
        first = await self.of_text(prefix, "prompt", add_bos=False)
        last = await self.of_text(suffix, "suffix", add_bos=False)
        return [*start, before, *first, after, *last, middle]

    def thinks(self, tokens: Sequence[int], reasoning: str) -> bool:
        """Whether a prompt ends inside a thought."""
        tail = tokens[-TAIL:]
        shown = self.tokenizer.detokenizer(tail)
        text = "".join(map(shown.add, tail)) + shown.finish()
        return text.rstrip().endswith(REASONING[reasoning][0])

    def may_fit(self, characters: int, field: str) -> None:
        """Refuse at once what is too long however it is cut into tokens: cutting it would take seconds."""
        info = self._client.info
        if info is not None and characters > info.max_len * self.tokenizer.longest_token:
            raise ApiError(
                400, f"a text of {characters} characters cannot fit into a context of {info.max_len} tokens",
                param=field, code="context_length_exceeded",
            )  # fmt: skip

    def fits(self, tokens: Sequence[int], field: str) -> None:
        """Raise ApiError for what cannot be a prompt."""
        info = self._client.info
        if not tokens:
            raise bad_request(f"{field} has no tokens", field)
        if info is not None and len(tokens) >= info.max_len:
            raise ApiError(
                400, f"the prompt has {len(tokens)} tokens, the context holds {info.max_len}", param=field,
                code="context_length_exceeded",
            )  # fmt: skip
        if info is not None and not all(0 <= token < info.vocabulary for token in tokens):
            raise bad_request(f"{field} has a token that is not from 0 to {info.vocabulary - 1}", field)


def surrogate_free(text: str, param: str) -> None:
    """Raise ApiError for text that cannot be encoded: lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_request(f"{param} has a lone surrogate at character {error.start}", param) from error
