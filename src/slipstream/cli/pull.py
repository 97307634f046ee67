"""slipstream pull: fetch a model, verify it, say where it is."""

from __future__ import annotations

import json

from slipstream.cli.options import JsonOption, ModelArgument, progress_bar


def pull(model: ModelArgument, json_output: JsonOption = False) -> None:
    """Fetch a model and verify its checksums; what is already here is not fetched again."""
    from slipstream.models import read_config
    from slipstream.weights.open import open_checkpoint
    from slipstream.weights.references import resolve, verify

    with progress_bar() as bar:
        path = resolve(model, bar)
        verified = verify(model, path, bar)
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    size = sum(file.stat().st_size for file in checkpoint.files)
    if json_output:
        fields = {"model": model, "path": str(path), "bytes": size, "architecture": config.architecture}
        fields["verified_files"] = verified
        print(json.dumps(fields))
    else:
        print(f"{path}\n{config.architecture}, {config.layers} layers, {size / 1e6:.0f} MB")
        print(
            f"{verified} file(s) verified by their checksums"
            if verified
            else "a path of one's own: nothing to verify it by"
        )
