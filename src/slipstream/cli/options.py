"""Options that several commands share, and loading a model with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from slipstream.cli.commands import Argument, Option
from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.errors import UsageError
from slipstream.program import KVFormat

if TYPE_CHECKING:
    from slipstream.roofline.cost import CostModel
    from slipstream.speculation import Controller, Verification
    from slipstream.speculation.settings import Drawing

ModelArgument = Annotated[
    str,
    Argument(
        metavar="MODEL",
        help="A GGUF file, a folder with safetensors, hf:org/name[@rev][:variant], pypi:package==version, or an alias.",
    ),
]
JsonOption = Annotated[bool, Option("--json", help="Print JSON instead of text.")]
MaxModelLen = Annotated[int | None, Option("--max-model-len", help="Longest context, prompt and answer together.")]
KvCacheDtype = Annotated[str, Option("--kv-cache-dtype", help="bf16 or int8.")]
Quantization = Annotated[str, Option("--quantization", help="For models in floats: none, int8 or int4.")]
Threads = Annotated[int | None, Option("--threads", help="Default: all cores this process may use.")]
Backend = Annotated[str, Option("--backend", help="native, reference or torch[:DEVICE][:bf16].")]

Speculation = Annotated[
    str,
    Option(
        "--speculative",
        help="Drafts: auto, off, ngram, suffix, draft:MODEL, or a drafter's folder. They never change an answer.",
    ),
]
Verify = Annotated[str, Option("--verify", help="exact: as plain decoding; rejection: equal in distribution only.")]


def load_options(
    max_model_len: int | None, kv_cache_dtype: str, quantization: str, threads: int | None, backend: str
) -> LoadOptions:
    """Checked options. Raises UsageError."""
    if kv_cache_dtype not in ("bf16", "int8"):
        raise UsageError(f"--kv-cache-dtype must be bf16 or int8, not {kv_cache_dtype!r}")
    if quantization not in ("none", "int8", "int4"):
        raise UsageError(f"--quantization must be none, int8 or int4, not {quantization!r}")
    if backend.partition(":")[0] not in ("native", "reference", "torch") or backend.startswith("native:"):
        raise UsageError(f"--backend must be native, reference or torch[:DEVICE][:bf16], not {backend!r}")
    for name, value in (("--max-model-len", max_model_len), ("--threads", threads)):
        if value is not None and not 1 <= value <= 1 << 24:
            raise UsageError(f"{name} must be positive, not {value}")
    if threads is not None:
        from slipstream.kernels.native import check_threads

        check_threads("--threads", threads)
    return LoadOptions(
        backend=backend,
        max_len=max_model_len,
        kv_format=KVFormat(kv_cache_dtype),
        quantization=quantization,  # type: ignore[arg-type]
        threads=threads,
    )


class _Bar:
    """A progress bar on standard error, shown only on a terminal and imported only when needed."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._title = ""

    def __call__(self, title: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if title != self._title or self._bar is None:
            from tqdm import tqdm

            self.close()
            self._title = title
            look = "{desc} {percentage:3.0f} % |{bar}| {remaining}"
            self._bar = tqdm(desc=title, leave=False, bar_format=look)
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def progress_bar() -> Iterator[_Bar]:
    """A bar that vanishes when the block ends."""
    bar = _Bar()
    try:
        yield bar
    finally:
        bar.close()


def open_model(reference: str, options: LoadOptions) -> Model:
    """Load a model, showing progress on a terminal."""
    with progress_bar() as bar:
        return load_model(reference, options, bar)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A model with what drafts for it, what its steps cost, and the rule by which drafts hold."""

    model: Model
    controller: Controller | None
    cost: CostModel | None
    verification: Verification

    def engine(self) -> Engine:
        """An engine that drafts where it pays."""
        return Engine(self.model, self.cost, controller=self.controller, verification=self.verification)


def open_drafted(
    reference: str,
    options: LoadOptions,
    speculative: str,
    verify: str,
    *,
    quick: bool = True,
    fresh: bool = False,
    drawing: Drawing | None = None,
) -> Drafted:
    """Load a model and its drafter, showing progress on a terminal.

    `quick`: the cost model is for one user; `fresh`: it is fitted now, whatever was kept.
    """
    from slipstream.engine.cost import cost_model
    from slipstream.engine.drafters import Speculative, load_speculative, verification_of

    wanted, verification = Speculative.parse(speculative), verification_of(verify)
    if options.backend != "native" and wanted.kind in ("auto", "off"):
        return Drafted(open_model(reference, options), None, None, verification)
    with progress_bar() as bar:
        drawing = "own" if verification.wants_logits else drawing
        model, controller = load_speculative(reference, options, wanted, bar, drawing)
        cost = None
        if controller is not None or not quick:
            cost = cost_model(model, lambda i, n: bar("fitting the cost model", i, n), fresh=fresh, quick=quick)
    return Drafted(model, controller, cost, verification)


def running_on(model: Model) -> str:
    """The path in use: an instruction set and its threads, or a backend."""
    executable = model.executable
    isa, threads = getattr(executable, "isa", None), getattr(executable, "threads", None)
    return f"{isa}, {threads} threads" if isa else executable.numerics


def table(title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ()) -> None:
    """Print a table for people: columns of numbers to the right, all others to the left."""
    columns = list(zip(*([header] if header else []), *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numbers = [
        index > 0 and all(row[index][:1] in "0123456789+-." for row in rows if row[index])
        for index in range(len(columns))
    ]

    def line(cells: Sequence[str]) -> str:
        parts = zip(cells, widths, numbers, strict=True)
        return "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in parts).rstrip()

    print(title)
    if header:
        print(line(header))
    print("  ".join("-" * width for width in widths))
    for row in rows:
        print(line(row))
    print()
