"""Copy a drafter's folder with random weights in place of what was learned: a drafter that is always wrong.

python benchmarks/scramble.py own eagle3-random
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def scramble(source: Path, to: Path, seed: int = 0) -> None:
    """Matrices get normal numbers of the same spread; norms, and which tokens the draft vocabulary has, stay."""
    shutil.copytree(source, to)
    generator = torch.Generator().manual_seed(seed)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in sorted(tensors.items()):
            if tensor.is_floating_point() and tensor.ndim > 1:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (noise * float(np.std(tensor.float().numpy()))).to(tensor.dtype)
        save_file(tensors, file)


def main() -> None:
    """Read the arguments and copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scramble(options.source, options.to, options.seed)


if __name__ == "__main__":
    main()
