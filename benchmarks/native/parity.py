"""How far the native step is from transformers in fp32: log-probabilities along the reference's greedy path.

python -m benchmarks.native.parity MODEL.gguf REFERENCE.json [isa]
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.native.models import gemma3, llama, read
from benchmarks.native.stepping import batch
from kvant.native.build import load


def main(path: str, reference: str, isa: str = "native") -> None:
    library = load(print, isa=isa)
    assert library is not None
    file = read(Path(path))
    program = gemma3(file) if file.fields["general.architecture"] == "gemma3" else llama(file)
    started = time.perf_counter()
    model = program.finish(library, threads=2)
    print(
        f"packed {model.weight_bytes / 1e6:.1f} MB in {time.perf_counter() - started:.3f} s; {library.vector_level}, "
        f"tiles {model.uses_tiles}, {len(model.operations)} operations"
    )
    cache = model.new_cache([64] * len(model.groups))
    differences, firsts, agreed, total = [], [], 0, 0
    for item in json.loads(Path(reference).read_text())["items"]:
        prompt, out = item["prompt_ids"], item["out_ids"]
        rows = [model.run(batch([(0, prompt)], len(model.groups), 32), cache).logits[0].astype(np.float64)]
        for n, token in enumerate(out[:-1]):
            step = model.run(batch([(len(prompt) + n, [token])], len(model.groups), 32), cache)
            rows.append(step.logits[0].astype(np.float64))
        for n, (row, top) in enumerate(zip(rows, item["top5"], strict=True)):
            logprobs = row - row.max()
            logprobs -= np.log(np.exp(logprobs).sum())
            difference = [abs(logprobs[token] - value) for token, value in top]
            differences += difference
            if n == 0:
                firsts.append(max(difference))
            agreed += int(row.argmax() == out[n])
            total += 1
    print(
        f"mean |difference| {np.mean(differences):.4f}, max {max(differences):.3f}, of first tokens {max(firsts):.3f}; "
        f"greedy agreement {agreed}/{total}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
