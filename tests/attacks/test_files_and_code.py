"""Files and code: pickles, code from models' folders, and files whose numbers are lies (classes 1, 2 and 12)."""

from __future__ import annotations

import contextlib
import json
import pickle
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from slipstream.engine import LoadOptions, Model, load_model
from slipstream.engine.drafters import Speculative, load_candidate, load_speculative
from slipstream.engine.messages import decode_from_engine, decode_to_engine
from slipstream.errors import ModelFileError, SlipstreamError
from slipstream.weights.open import open_checkpoint
from tests.attacks.helpers import SOURCE, bomb, names_in, opened_files
from tests.serving.conftest import Server

UNPICKLE = (
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "copyreg", "multiprocessing",
    "concurrent.futures.ProcessPoolExecutor", "torch.load", "torch.save", "torch.jit.load", "torch.multiprocessing",
    "pandas.read_pickle", "numpy.lib.format.read_array", "allow_pickle=",
)  # fmt: skip
"""What reads or writes pickles, or code that is as good as one."""
OBJECTS = (
    "recv_pyobj", "send_pyobj", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
)  # fmt: skip
"""Methods that do, of whatever they are."""
ALLOWED = {
    ("slipstream/kernels/torch/instruments.py", "torch.multiprocessing"): "starts the ranks that measure all-reduces "
    "among this machine's GPUs, over its own pipes; nothing that anybody sends gets there",
}


def unpicklers(source: str) -> set[str]:
    """Forbidden names in a source."""
    found = set()
    for _, name in names_in(source):
        found |= {bad for bad in UNPICKLE if name == bad or name.startswith(f"{bad}.")}
        found |= {name.rpartition(".")[2]} & set(OBJECTS)
    return found


class Test1Pickle:
    def test_no_source_unpickles(self) -> None:
        found = {
            (str(path.relative_to(SOURCE)), name)
            for path in SOURCE.rglob("*.py")
            for name in unpicklers(path.read_text())
        }
        assert found == set(ALLOWED)

    @pytest.mark.parametrize(
        "source",
        [
            "import pickle", "from pickle import loads", "import torch as t\nt.load(f)", "from torch import load as r",
            "import numpy as np\nnp.load(f, allow_pickle=True)", "import numpy\nread = numpy.lib.format.read_array",
            "import torch\ntorch.save(a, f)", "from multiprocessing import shared_memory", "import marshal as m",
            "import multiprocessing.connection", "import torch.multiprocessing as mp\nmp.Queue()", "import shelve",
            "from concurrent.futures import ProcessPoolExecutor", "self.socket.recv_pyobj()",
            "import torch.distributed as d\nd.all_gather_object(a, b)",
        ],
    )  # fmt: skip
    def test_whatever_unpickles_is_seen(self, source: str) -> None:
        assert unpicklers(source)

    @pytest.mark.parametrize("name", ["model.gguf", "model.safetensors", "model.pt", "pytorch_model.bin"])
    def test_pickles_are_no_weights(self, name: str, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        (tmp_path / name).write_bytes(bomb(mark))
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        with pytest.raises(SlipstreamError):
            open_checkpoint(tmp_path if name == "model.safetensors" else tmp_path / name)
        assert not mark.exists()

    NAMES = ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "pytorch_model-00001-of-00002.bin")

    @pytest.fixture
    def pickled(self, tmp_path: Path) -> Path:
        """A folder whose weights are pickles only, beside a config for a model and a drafter."""
        for name in self.NAMES:
            (tmp_path / name).write_bytes(bomb(tmp_path / "mark"))
        config = {"architectures": ["LlamaForCausalLM"], "speculators_model_type": "eagle3"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
        return tmp_path

    @pytest.fixture(scope="class")
    def model(self, tiny_gguf: Path) -> Model:
        return load_model(str(tiny_gguf), LoadOptions(max_rows=8, threads=1))

    @pytest.mark.parametrize("what", ["model", "draft model", "drafter", "candidate"])
    def test_a_folder_of_pickles_is_refused_unread(
        self, what: str, pickled: Path, model: Model, tiny_gguf: Path
    ) -> None:
        options = LoadOptions(max_rows=8, threads=1)
        loads: dict[str, Callable[[], object]] = {
            "model": lambda: load_model(str(pickled), options),
            "draft model": lambda: load_speculative(str(tiny_gguf), options, Speculative.parse(f"draft:{pickled}")),
            "drafter": lambda: load_speculative(str(tiny_gguf), options, Speculative.parse(str(pickled))),
            "candidate": lambda: load_candidate(pickled, model),
        }
        with opened_files() as opened, pytest.raises(ModelFileError, match=r"no \.safetensors file"):
            loads[what]()
        assert str(pickled / "config.json") in opened, "the watch sees what is read"
        assert not opened & {str(pickled / name) for name in self.NAMES}
        assert not (pickled / "mark").exists()

    def test_an_index_that_names_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(bomb(tmp_path / "mark"))
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "pytorch_model.bin"}}')
        with pytest.raises(ModelFileError, match="header"):
            load_model(str(tmp_path))
        assert not (tmp_path / "mark").exists()

    @pytest.mark.parametrize("decode", [decode_to_engine, decode_from_engine])
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_pickles_are_no_messages(self, decode: Any, protocol: int, tmp_path: Path) -> None:
        with pytest.raises(msgspec.MsgspecError):
            decode(bomb(tmp_path / "mark", protocol))
        assert not (tmp_path / "mark").exists()

    def test_pickles_on_the_engines_socket(self, tenants: Server, tmp_path: Path) -> None:
        """It is out of other users' reach, and who gets there is not listened to: the engine has its one peer."""
        arguments = Path(f"/proc/{tenants.engine_pid()}/cmdline").read_text().split("\0")
        path = Path(arguments[arguments.index("slipstream.engine.worker") + 1])
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket, tenants.client() as http:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{path}")
            for _ in range(10):
                with contextlib.suppress(zmq.Again):
                    socket.send(bomb(tmp_path / "mark"), zmq.NOBLOCK)
                assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
            text = http.get("/metrics").text
        assert 'slipstream_engine_restarts{model_name="tiny"} 0.0' in text
        assert not (tmp_path / "mark").exists()


class Test2ForeignCode:
    @pytest.mark.parametrize("field", ["auto_map", "custom_code"])
    def test_code_in_a_models_folder_is_not_run(self, field: str, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        (tmp_path / "modeling_evil.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")
        config = {"architectures": ["EvilForCausalLM"], field: {"AutoModelForCausalLM": "modeling_evil.Evil"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({field: {"AutoTokenizer": ["modeling_evil.Evil"]}}))
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        with pytest.raises(SlipstreamError):
            load_model(str(tmp_path))
        assert not mark.exists()

    def test_checks_do_not_vanish_with_optimisation(self, tiny_gguf: Path) -> None:
        """Under python -O assertions are gone; what is refused must still be."""
        program = (
            "import sys\nfrom slipstream.engine import Engine, LoadOptions, load_model\n"
            "from slipstream.errors import SlipstreamError\nfrom slipstream.program.sampling import SamplingParams\n"
            "engine = Engine(load_model(sys.argv[1], LoadOptions(threads=1)))\n"
            "for prompt, settings in (([], {}), ([999], {}), ([-1], {}), ([1] * 600, {}), ([1], {'temperature': -1}),\n"
            "                         ([1], {'n': 16384}), ([1], {'logit_bias': {999: 1.0}})):\n"
            "    try:\n        engine.add(prompt, SamplingParams(**settings))\n"
            "        print('taken', prompt[:3], settings)\n"
            "    except SlipstreamError:\n        pass\n"
        )
        done = subprocess.run(
            [sys.executable, "-O", "-c", program, str(tiny_gguf)], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr


class Test12Files:
    @pytest.mark.parametrize("count", [1 << 62, (1 << 64) - 1, 1 << 32])
    @pytest.mark.parametrize("field", ["tensors", "pairs", "length"])
    def test_counts_that_cannot_be(self, count: int, field: str, tmp_path: Path) -> None:
        tensors, pairs = (count, 0) if field == "tensors" else (0, count if field == "pairs" else 1)
        raw = b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)
        if field == "length":
            raw += struct.pack("<Q", count) + b"general.architecture"
        (tmp_path / "x.gguf").write_bytes(raw + bytes(64))
        with pytest.raises(SlipstreamError):
            open_checkpoint(tmp_path / "x.gguf")

    def test_a_text_longer_than_any_context(self, tenants: Server) -> None:
        begun = time.monotonic()
        with tenants.client() as http:
            for path, body in (
                ("/v1/completions", {"prompt": "a" * (7 << 20)}), ("/tokenize", {"prompt": "a" * (7 << 20)}),
                ("/v1/embeddings", {"input": "a" * (7 << 20)}),
                ("/v1/messages", {"messages": [{"role": "user", "content": "a" * (7 << 20)}], "max_tokens": 5}),
            ):  # fmt: skip
                assert http.post(path, json=body).status_code == 400
        assert time.monotonic() - begun < 20.0
