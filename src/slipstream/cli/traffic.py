"""slipstream traffic: look at recorded answers, bring logs in, take records out, delete them."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from slipstream.cli.commands import Argument, Option
from slipstream.cli.options import JsonOption, KvCacheDtype, Quantization, Threads, load_options, progress_bar, table
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.text import Tokenizer
    from slipstream.training.store import Which
    from slipstream.weights.sums import Progress

DatabaseArgument = Annotated[Path, Argument(metavar="TRAFFIC", help="A traffic file, as serve --record writes.")]
Tag = Annotated[str | None, Option("--tag", help="Only records with this tag.")]
Key = Annotated[str | None, Option("--key", help="Only records of this key.")]
Days = Annotated[float | None, Option("--newer-than", help="Only records of the last so many days.")]


def import_(
    log: Annotated[Path, Argument(help="OpenAI-format JSON lines, .gz or not, or what export wrote.")],
    into: DatabaseArgument,
    model: Annotated[str, Option("--model", help="The target whose traffic this is.")],
    regenerate: Annotated[
        bool, Option("--regenerate", help="Have the target answer anew: needed where another model did.")
    ] = False,
    own: Annotated[bool, Option("--own", help="This very model made the answers.")] = False,
    tag: Annotated[str, Option("--tag", help="For exchanges that have none.")] = "",
    system: Annotated[str, Option("--system", help="A system message where there is none.")] = "",
    temperature: Annotated[float, Option(help="Where the log says nothing.")] = 0.0,
    max_tokens: Annotated[int, Option("--max-tokens", help="Of an answer, where the log says nothing.")] = 512,
    most_tokens: Annotated[
        int, Option("--most-tokens", help="Stop when answers of this model have so many tokens.")
    ] = 1 << 40,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    threads: Threads = None,
    json_output: JsonOption = False,
) -> None:
    """Bring a log in, its answers as they are or made anew; an import that was stopped goes on where it was."""
    from slipstream.engine import load_model
    from slipstream.models import read_config
    from slipstream.program.sampling import SamplingParams
    from slipstream.speculation.card import fingerprint_of
    from slipstream.training.imports import MOST_NAMED, STREAMS, Importer
    from slipstream.training.logs import read_log
    from slipstream.training.records import target_of
    from slipstream.training.store import TrafficStore
    from slipstream.training.tables import read_parquet
    from slipstream.weights.open import open_checkpoint
    from slipstream.weights.references import resolve

    if regenerate and own:
        raise UsageError("--regenerate makes answers anew, --own takes them as they are: say one of them")
    if max_tokens < 1 or most_tokens < 1:
        raise UsageError("--max-tokens and --most-tokens must be positive")
    options = load_options(None, kv_cache_dtype, quantization, threads, "native")
    items = read_parquet(log) if log.suffix == ".parquet" else read_log(log, texts=regenerate)
    written = log.stat().st_mtime if log.is_file() else 0.0
    with progress_bar() as bar, TrafficStore(into) as store:
        checkpoint = open_checkpoint(resolve(model, bar))
        loaded = load_model(model, replace(options, sequences=STREAMS if regenerate else 1), bar)
        target = target_of(fingerprint_of(read_config(checkpoint), checkpoint), kv_cache_dtype, quantization)
        importer = Importer(loaded, target, store, tag, system, written)
        if regenerate:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            done = importer.anew(items, params, most_tokens, lambda at, all_: bar("tokens answered", at, all_))
        else:
            done = importer.as_they_are(items, same_target=own)
    if json_output:
        print(json.dumps(asdict(done)))
        return
    print(f"{done.records} records with {done.tokens} tokens of answers, {done.known} that were there already")
    if done.unusable:
        print(f"{done.unusable} could not be used; the first: {done.first_problem}", file=sys.stderr)
    if done.unread:
        lines = ", ".join(map(str, done.unread)) + (", …" if len(done.unread) == MOST_NAMED else "")
        print(f"lines that could not be read: {lines}", file=sys.stderr)
    if done.records and not (regenerate or own):
        print(
            "their answers may be another model's, so no drafter is trained on them: --regenerate, or --own",
            file=sys.stderr,
        )


def export(
    traffic: DatabaseArgument,
    to: Annotated[Path, Argument(help="A file that ends in .jsonl or .parquet.")],
    tag: Tag = None,
    key: Key = None,
    newer_than: Days = None,
    model: Annotated[
        str | None, Option("--model", help="Add text by its tokenizer: messages of a chat, or prompt and completion.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write records to a file that import reads back."""
    from slipstream.text.template import ChatTemplate
    from slipstream.training.conversations import text_of
    from slipstream.training.logs import row_of
    from slipstream.training.predictability import counted
    from slipstream.training.store import TrafficStore
    from slipstream.training.tables import write_parquet

    with TrafficStore(traffic, create=False) as store, progress_bar() as bar:
        which = _which(tag, key, newer_than)
        records = counted(store.records(which), store.count(which)[0], partial(bar, "records written"))
        if to.suffix == ".parquet":
            if model is not None:
                raise UsageError("text goes into .jsonl only")
            count = write_parquet(records, _private(to))
        elif to.suffix == ".jsonl":
            tokenizer, count = _tokenizer(model, bar) if model is not None else None, 0
            template = ChatTemplate(tokenizer.chat_template) if tokenizer and tokenizer.chat_template else None
            with _private(to).open("w", encoding="utf-8") as file:
                for count, record in enumerate(records, 1):  # noqa: B007
                    row = row_of(record)
                    if tokenizer is not None:
                        row |= text_of(record, tokenizer, template)
                    file.write(json.dumps(row) + "\n")
        else:
            raise UsageError(f"{to}: a name that ends in .jsonl or .parquet says in which form")
    print(json.dumps({"records": count, "file": str(to)}) if json_output else f"{count} records in {to}")


def _private(path: Path) -> Path:
    """A file that its owner only can read, as records can."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    return path


def _tokenizer(model: str, progress: Progress) -> Tokenizer:
    from slipstream.text import load_tokenizer
    from slipstream.weights.open import open_checkpoint
    from slipstream.weights.references import resolve

    return load_tokenizer(open_checkpoint(resolve(model, progress)))


def stats(
    traffic: DatabaseArgument,
    tag: Tag = None,
    key: Key = None,
    newer_than: Days = None,
    limit: Annotated[int, Option("--limit", help="The newest so many records; replaying them takes time.")] = 5000,
    model: Annotated[str | None, Option("--model", help="The target, for --drafter.")] = None,
    drafter: Annotated[
        Path | None, Option("--drafter", help="What this drafter would reach as well; runs the target.")
    ] = None,
    kv_cache_dtype: KvCacheDtype = "bf16",
    quantization: Quantization = "none",
    json_output: JsonOption = False,
) -> None:
    """Tags, tokens, how much text repeats itself, and what drafting would reach on it."""
    from slipstream.training.predictability import counted, of_drafter, predictability
    from slipstream.training.store import TrafficStore

    if (model is None) != (drafter is None):
        raise UsageError("--model and --drafter go together")
    if limit < 1:
        raise UsageError("--limit must be at least 1")
    which = _which(tag, key, newer_than)
    with TrafficStore(traffic, create=False) as store:
        count, tokens = store.count(which)
        records = list(store.records(which, limit))
        size = store.bytes
    names = ["ngram", "suffix"]
    with progress_bar() as bar:
        found = predictability(counted(records, len(records), partial(bar, "replaying text")))
        if model is not None and drafter is not None:
            served = load_options(None, kv_cache_dtype, quantization, None, "native")
            names.append(of_drafter(records, model, drafter, found, served, bar))
    report = {
        "records": count,
        "answer_tokens": tokens,
        "bytes": size,
        "targets": len({record.target for record in records}),
        "replayed": len(records),
        "tags": {
            name: {
                "records": p.records,
                "answer_tokens": p.tokens,
                "prompt_tokens": p.prompt_tokens,
                "repetition": p.repetition,
                "drafters": {
                    drafter: {
                        "tau": counts.tau,
                        "acceptance": counts.acceptance,
                        "verifications": counts.rounds,
                        "tokens_a_step": p.tokens_a_step(drafter),
                    }
                    for drafter, counts in p.drafts.items()
                },
            }
            for name, p in found.items()
        },
    }
    if json_output:
        print(json.dumps(report))
        return
    rows = [
        (
            name or "(none)", str(p.records), str(p.tokens), f"{p.repetition:.0%}",
            *(f"{p.drafts[d].tau:.2f} ({p.tokens_a_step(d):.2f})" if d in p.drafts else "" for d in names),
        )
        for name, p in found.items()
    ]  # fmt: skip
    title = f"{traffic}: {count} records, {tokens} tokens of answers, {size / 1e6:.1f} MB; {len(records)} replayed"
    header = ("tag", "records", "answer tokens", "repetition", *(f"{name}: tau (tokens/step)" for name in names))
    if rows:
        table(title, rows, header)
    else:
        print(title)


def delete(
    traffic: DatabaseArgument,
    request: Annotated[str | None, Option("--request", help="Records of this request.")] = None,
    key: Key = None,
    tag: Tag = None,
    older_than: Annotated[float | None, Option("--older-than", help="Records older than so many days.")] = None,
    json_output: JsonOption = False,
) -> None:
    """Delete records for good: their bytes are overwritten."""
    from slipstream.training.store import TrafficStore, Which

    if request is None and key is None and tag is None and older_than is None:
        raise UsageError("say which: --request, --key, --tag or --older-than; or delete the file")
    if older_than is not None and not older_than > 0:
        raise UsageError("--older-than must be positive; to delete all of it, delete the file")
    before = None if older_than is None else time.time() - 86400.0 * older_than
    with TrafficStore(traffic, create=False) as store:
        count = store.delete(Which(request, key, tag, before=before))
    print(json.dumps({"deleted": count}) if json_output else f"{count} records deleted")


def _which(tag: str | None, key: str | None, newer_than: float | None) -> Which:
    from slipstream.training.store import Which

    return Which(tag=tag, key=key, since=None if newer_than is None else time.time() - 86400.0 * newer_than)
