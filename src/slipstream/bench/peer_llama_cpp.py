"""Drives llama.cpp for `slipstream bench peers`; run by the peer's own interpreter, imports nothing of ours.

Arguments: FILE CONTEXT THREADS. Every line on standard input, "decode CONTEXT STEPS" or "prefill TOKENS 1", is
answered by one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Answer until standard input ends."""
    import llama_cpp  # type: ignore[import-not-found, unused-ignore]

    file, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(file, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        what, first, second = line.split()
        model.reset()
        prompt = [100 + i % 1000 for i in range(int(first))]
        seconds = []
        if what == "decode":
            model.eval(prompt)
            for step in range(int(second)):
                start = time.perf_counter()
                model.eval([100 + step])
                seconds.append(time.perf_counter() - start)
        else:
            start = time.perf_counter()
            model.eval(prompt)
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
