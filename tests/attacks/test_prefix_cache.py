"""Prefixes of others: nobody finds them, nor learns from anything that they exist (class 11)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from slipstream.engine import Engine, LoadOptions, Model, Terms, load_model
from slipstream.kvcache import BlockPool, PrefixCache, Shelf
from slipstream.program import BLOCK_SLOTS, KVFormat, Namespace
from slipstream.program.sampling import SamplingParams
from tests.serving.conftest import KEY, LIMITED, Server
from tests.speculation.test_identity import answers


@pytest.fixture(scope="module")
def model(tiny_gguf: Path) -> Model:
    return load_model(str(tiny_gguf), LoadOptions(max_rows=64, threads=1))


class Test11PrefixCache:
    PROMPT = "a secret that takes more than one block of the cache to say, whoever says it: " * 3

    def cached(self, server: Server, key: str, **fields: Any) -> int:
        body = {"prompt": self.PROMPT, "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def test_another_key_does_not_find_it(self, tenants: Server) -> None:
        self.cached(tenants, KEY)
        assert self.cached(tenants, KEY) > 100
        assert self.cached(tenants, LIMITED) == 0

    def test_another_salt_does_not_find_it(self, tenants: Server) -> None:
        self.cached(tenants, KEY)
        assert self.cached(tenants, KEY, cache_salt="mine") == 0
        assert self.cached(tenants, KEY, cache_salt="mine") > 100

    def test_a_salt_cannot_name_another_tenant(self, tenants: Server) -> None:
        """Names are joined with a mark that could be in them."""
        self.cached(tenants, KEY)
        for salt in ("/key-1", "key-1/", "../key-1", "drafter 1"):
            assert self.cached(tenants, LIMITED, cache_salt=salt) == 0

    def test_another_keys_response_is_not_found(self, tenants: Server) -> None:
        body = {"input": "hello", "max_output_tokens": 2}
        made = httpx.post(
            f"{tenants.url}/v1/responses", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=60
        ).json()
        other = {"Authorization": f"Bearer {LIMITED}"}
        assert httpx.get(f"{tenants.url}/v1/responses/{made['id']}", headers=other).status_code == 404
        again = {"input": "x", "previous_response_id": made["id"]}
        assert httpx.post(f"{tenants.url}/v1/responses", json=again, headers=other).status_code == 404

    def shared(self, engine: Engine, prompt: list[int], tenant: str, salt: str) -> tuple[int, set[int]]:
        """Tokens of a prompt found in the cache, and the blocks that its full ones are in."""
        number = engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True), Terms(tenant, cache_salt=salt))
        held: set[int] = set()
        while engine.busy:
            engine.step()
            held |= {block for sequence in engine.sequences for block in sequence.blocks[: len(prompt) // BLOCK_SLOTS]}
            engine.check()
        return engine.timings[number].cached_tokens, held

    def test_it_cannot_be_timed(self, model: Model) -> None:
        """Cold for one tenant, however warm for another: the same rows are computed, in blocks of its own."""
        engine, prompt = Engine(model, ahead=False), [n % 251 for n in range(4 * BLOCK_SLOTS + 1)]
        known: dict[tuple[str, str], set[int]] = {}
        others = [("a", ""), ("b", ""), ("a", "salt"), ("b", "salt"), ("", "a"), ("a/", ""), ("", "1 a/"), ("a", "/")]
        for who in others:
            before = engine.accounting.totals.rows["prefill"]
            cached, held = self.shared(engine, prompt, *who)
            assert cached == 0
            assert engine.accounting.totals.rows["prefill"] - before == len(prompt)
            assert not held & set().union(*known.values())
            known[who] = held
        for who, blocks in known.items():
            cached, held = self.shared(engine, prompt, *who)
            assert cached == 4 * BLOCK_SLOTS, "its own it finds"
            assert held == blocks

    def test_hashes_that_are_equal(self) -> None:
        """Blocks are told apart by their tokens, whatever their hashes are."""
        pool, namespace = BlockPool(8), Namespace("", "", KVFormat.F32)
        cache = PrefixCache(pool)
        one, other = ([token] * BLOCK_SLOTS for token in (5, 5 + sys.hash_info.modulus))
        assert hash(tuple(one)) == hash(tuple(other))
        (block,) = pool.take(1)
        node, _ = cache.extend(namespace, None, tuple(one), block)
        assert cache.match(namespace, [*other, 1])[0] == []
        assert cache.peek(namespace, [*other, 1]) == 0
        assert cache.find(namespace, other, 1) is None
        (second,) = pool.take(1)
        assert cache.extend(namespace, None, tuple(other), second)[1] == second, "it is kept beside it"
        assert cache.match(namespace, [*one, 1]) == ([block], node)

    def test_names_that_are_equal_on_disk(self, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If two blocks' names were the same, the tokens in the file would tell."""
        monkeypatch.setattr(Shelf, "name", staticmethod(lambda before, tokens: "same"))
        size = model.executable.operands.cache.block_bytes  # type: ignore[attr-defined]
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        for first in (1, 2, 3):
            prompt = [first] * (BLOCK_SLOTS + 1)
            plain = answers(Engine(model, prefix_cache=False), [(prompt, params)])
            engine, shelf = Engine(model), Shelf(tmp_path, 1 << 20, size, "weights")
            engine.keep_blocks(shelf)
            assert len(shelf) == (first > 1), "there is one by that name"
            assert answers(engine, [(prompt, params)]) == plain
            assert shelf.damaged == (first > 1)
            while engine.shelving:
                engine.shelve()
