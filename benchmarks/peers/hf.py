"""transformers, the way most people first run a model: bf16 weights, its own attention, greedy, a dynamic cache.

The loop is written out, because `generate` does not say where the prompt ends. It spares transformers the cost of
`generate` itself, about a millisecond per token.
"""

import time
from pathlib import Path

import torch
import transformers

from benchmarks.peers.scenario import Load, Pace


class Transformers:
    """One model file, turned into bf16."""

    def __init__(self, model: Path, threads: int):
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model.parent,
            gguf_file=model.name,
            dtype=torch.bfloat16,
            attn_implementation="sdpa",
            quantization_config=transformers.GgufConfig(dequantize=True),  # dense, whatever this version does by itself
        ).eval()

    @torch.inference_mode()
    def pace(self, load: Load, prompts: list[list[int]]) -> Pace:
        """One run of `load` over `prompts`, ids of equal length."""
        start = time.perf_counter()
        step = self.model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        ids = step.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter()
        for _ in range(load.new - 1):
            step = self.model(ids, past_key_values=step.past_key_values, use_cache=True)
            ids = step.logits[:, -1].argmax(-1, keepdim=True)
        last = time.perf_counter()
        decode = load.streams * (load.new - 1) / (last - first) if load.new > 1 else None
        return Pace(load.streams * load.prompt / (first - start), decode, load.streams * load.new / (last - start))
