"""OpenAI's requests: their fields, what each becomes, and what is refused by name."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from slipstream.errors import UsageError
from slipstream.program.sampling import SamplingParams
from slipstream.serving.bodies import object_of
from slipstream.serving.errors import ApiError, bad_request
from slipstream.serving.structured import Form, form_of

MAX_MESSAGES, MAX_STOP_STRINGS, MAX_PROMPTS = 10_000, 64, 64
MOST_TOKEN = (1 << 31) - 1
"""No vocabulary is larger, and larger numbers could not be told to the engine."""
ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""Templates know roles of their own; none of them is markup."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKEN)]


class StreamOptions(msgspec.Struct):
    """What a stream also carries."""

    include_usage: bool = False


class Common(msgspec.Struct, kw_only=True):
    """Fields that chat and plain completions share; `None` is the same as leaving a field out."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    metadata: dict[str, str] | None = None
    timings: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def form(self, called: str = "response_format") -> Form:
        """What form the answer must have. Clients may have `called` the response_format otherwise. Raises ApiError."""
        guided = {
            "json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }  # fmt: skip
        return form_of(self.response_format, self.structured_outputs, guided, called)


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "best_of": (None, 1),
    "guided_decoding_backend": (None,),
    "prompt_embeds": (None, []),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "truncate_prompt_tokens": (None,),
    "prompt_logprobs": (None, 0),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "chat_template": (None,),
    "documents": (None, []),
    "logits_processors": (None, []),
    "web_search_options": (None,),
}
"""Fields that would change the answer and are not there yet, with the values that ask for nothing."""


def parse(body: bytes, kind: type[Any], more: Mapping[str, tuple[Any, ...]] | None = None) -> Any:
    """A request of `kind`, in which `more` fields are not supported. Raises ApiError that names the field."""
    raw = object_of(body)
    refuse_unsupported(raw, more)
    return convert(raw, kind)


def refuse_unsupported(raw: Mapping[str, Any], more: Mapping[str, tuple[Any, ...]] | None = None) -> None:
    """Raise ApiError for a field that would change the answer, and cannot."""
    for name, harmless in {**UNSUPPORTED, **(more or {})}.items():
        if name in raw and raw[name] not in harmless:
            raise bad_request(f"{name} is not supported yet", name)


def convert(raw: dict[str, Any], kind: type[Any]) -> Any:
    """A JSON object as a request of `kind`. Raises ApiError that names the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        where = message.rpartition("at `$.")[2].rstrip("`") if "at `$." in message else None
        missing = message.partition("missing required field `")[2].partition("`")[0]
        raise bad_request(message.replace("at `$.", "at `"), where or missing or None) from error


def sampling(request: Common, logprobs: int | None, grammar: str = "", shown: tuple[int, ...] = ()) -> SamplingParams:
    """Sampling settings. Raises ApiError that names the field at fault."""
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    if len(stops) > MAX_STOP_STRINGS:
        raise bad_request(f"stop has {len(stops)} strings, at most {MAX_STOP_STRINGS} are taken", "stop")
    values: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "n": request.n,
        "seed": None if request.seed is None else request.seed % (1 << 64),
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "min_tokens": request.min_tokens,
        "max_tokens": request.max_tokens,
        "ignore_eos": request.ignore_eos,
        "logprobs": logprobs,
        "stop": tuple(stop for stop in stops if stop),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "logit_bias": _bias(request.logit_bias),
        "grammar": grammar,
        "shown": shown,
    }
    try:
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except UsageError as error:
        raise bad_request(str(error), _field_of(error)) from error


def _field_of(error: UsageError) -> str | None:
    """The setting that a problem's first word names: `logit_bias[7] must be …`."""
    name = str(error).split()[0].partition("[")[0]
    return name if name in SamplingParams.__dataclass_fields__ else None


def _bias(entries: dict[str, float] | None) -> dict[int, float]:
    try:
        found = {int(token): bias for token, bias in (entries or {}).items()}
    except ValueError as error:
        raise bad_request("the keys of logit_bias must be token ids", "logit_bias") from error
    if not all(0 <= token <= MOST_TOKEN for token in found):
        raise bad_request("the keys of logit_bias must be token ids", "logit_bias")
    return found


def chat_logprobs(request: ChatRequest) -> int | None:
    """How many log-probabilities a chat asks for; None: none at all."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    if not request.logprobs:
        return None
    count = request.top_logprobs or 0
    if not 0 <= count <= 20:
        raise bad_request(f"top_logprobs must be from 0 to 20, not {count}", "top_logprobs")
    return count


def messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Messages with plain text in them. Raises ApiError for parts that are no text."""
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        raise bad_request(f"messages must be 1 to {MAX_MESSAGES}, not {len(request.messages)}", "messages")
    result = []
    for index, message in enumerate(request.messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or not ROLE.fullmatch(role):
            raise bad_request(f"{where}.role is system, user, assistant, tool, or another plain word", f"{where}.role")
        role = "system" if role == "developer" else role
        content = _text(message.get("content"), where)
        if message.keys() <= {"role", "content"}:
            result.append({"role": role, "content": content})
        else:
            result.append({**message, "role": role, "content": content, **_calls(message.get("tool_calls"), where)})
    return result


def _calls(calls: Any, where: str) -> dict[str, Any]:
    """Calls of tools as chat templates want them: their arguments an object, not a text."""
    if calls is None:
        return {}
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.tool_calls[{index}] has no function with a name", f"{where}.tool_calls")
        arguments = {} if function.get("arguments") is None else function["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                arguments = msgspec.json.decode(arguments)
        elif not isinstance(arguments, dict):
            raise bad_request(f"{where}.tool_calls[{index}]: arguments are a text or an object", f"{where}.tool_calls")
        found.append({**call, "function": {**function, "arguments": arguments}})
    return {"tool_calls": found}


def written(calls: list[dict[str, Any]]) -> str:
    """Calls as the JSON that a model is taught to write."""
    return json.dumps(calls, ensure_ascii=False)


TEMPLATE_SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""What a request may tell the chat template. Anything else could change what it means."""
LONGEST_SWITCH = 256


def template_switches(request: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. Raises ApiError for those that a request has no business to set."""
    found: dict[str, Any] = {}
    if request.reasoning_effort is not None:
        found["reasoning_effort"] = request.reasoning_effort
        found["enable_thinking"] = request.reasoning_effort not in ("none", "minimal")
    for name, value in (request.chat_template_kwargs or {}).items():
        if name not in TEMPLATE_SWITCHES:
            raise bad_request(
                f"chat_template_kwargs.{name[:40]} is none of {', '.join(TEMPLATE_SWITCHES)}", "chat_template_kwargs"
            )
        if not isinstance(value, bool | int | str) or len(str(value)) > LONGEST_SWITCH:
            raise bad_request(f"chat_template_kwargs.{name} is a switch or a short text", "chat_template_kwargs")
        found[name] = value
    return found


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be text, or parts of type text", f"{where}.content")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"{where}.content: only parts of type text are supported", f"{where}.content")
        texts.append(part["text"])
    return "".join(texts)


def prompts(request: CompletionRequest) -> list[str] | list[list[int]]:
    """The prompts of a completion, all texts or all token ids. Raises ApiError."""
    return texts_or_tokens(request.prompt, "prompt", MAX_PROMPTS)


def texts_or_tokens(given: Any, field: str, most: int) -> list[str] | list[list[int]]:
    """One text or several, one list of token ids or several. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    problem = f"{field} must be a text, a list of texts, or one or more lists of token ids"
    if not isinstance(given, list) or not given:
        raise bad_request(problem, field)
    if all(type(token) is int for token in given):
        given = [given]
    if len(given) > most:
        raise bad_request(f"{field} has {len(given)} entries, at most {most} are taken", field)
    texts = all(isinstance(entry, str) for entry in given)
    ids = all(isinstance(entry, list) and all(type(token) is int for token in entry) for entry in given)
    if not texts and not ids:
        raise bad_request(problem, field)
    return list(given)


def finite(request: Common) -> None:
    """Raise ApiError for numbers that are none."""
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        value = getattr(request, name)
        if value is not None and not math.isfinite(value):
            raise bad_request(f"{name} must be a finite number", name)


def engine_refused(error: UsageError, param: str, form: str = "") -> ApiError:
    """What the engine itself refuses: a grammar, which comes from the field `form`, a setting, or a prompt, which is in
    the field `param`.
    """
    if form and "grammar" in str(error):
        return bad_request(f"{form}: {error}", form)
    if (setting := _field_of(error)) is not None:
        return bad_request(str(error), setting)
    too_long = " holds " in str(error)  # the context, or the whole cache
    return ApiError(400, str(error), param=param, code="context_length_exceeded" if too_long else None)


TAG_HEADER, LONGEST_TAG = "x-slipstream-tag", 64


def tag_of(headers: Mapping[str, str], request: Common) -> str:
    """What kind of traffic a request says it is: a header, or `metadata.tag`. Raises ApiError for one too long."""
    tag = headers.get(TAG_HEADER) or (request.metadata or {}).get("tag", "")
    if len(tag) > LONGEST_TAG:
        raise bad_request(f"a tag has at most {LONGEST_TAG} characters", "metadata")
    return tag
