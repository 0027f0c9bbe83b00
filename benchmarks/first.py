"""The first benchmark: Kvant against transformers and against a bare torch loop, on SmolLM2-135M, interleaved.

    prefill     512 prompt tokens: Kvant / a bare torch bf16 loop over the same weights
    one stream  128 tokens after a short prompt: Kvant / transformers bf16 (sdpa)
    batch       16 requests, 128 prompt + 64 output tokens, output tokens per second end to end

Every round measures each engine once, in alternating order; medians and ranges over the rounds are reported, and the ratio of
each round, because the machine's speed moves by a factor of two within minutes. Before anything is timed, the engines are
held against each other: the log-probabilities of the tokens after the prompt.

    python benchmarks/first.py [--rounds 7] [--output benchmarks/first.json]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from torch.nn.functional import embedding, linear, rms_norm, silu
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvant import LLM, SamplingParams
from kvant.checkpoint.store import resolve_model

TEXT = Path(__file__).parent.parent / "LICENSE"
PREFILL, DECODE = 512, 128
BATCH, PROMPT, OUTPUT = 16, 128, 64
GATE = 0.35  # largest difference of top-5 log-probabilities; bf16 and int8 activations each move them by about 0.1


class BareLoop:
    """A Llama forward pass in a dozen torch calls per layer: the speed that plain PyTorch gives without an engine."""

    def __init__(self, hf):
        self.config = hf.config
        self.state = hf.state_dict()
        size = hf.config.hidden_size // hf.config.num_attention_heads
        self.frequencies = 1.0 / hf.config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids` [T] -> logits [V] of the last one."""
        config, w = self.config, self.state
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        eps, size = config.rms_norm_eps, config.hidden_size // config.num_attention_heads
        angles = torch.arange(len(ids)).float()[:, None] * self.frequencies
        cos, sin = (torch.cat((f(angles), f(angles)), -1).bfloat16() for f in (torch.cos, torch.sin))

        def turn(x):
            return x * cos + torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1) * sin

        x = embedding(ids, w["model.embed_tokens.weight"])
        for layer in range(config.num_hidden_layers):
            p = f"model.layers.{layer}."
            h = rms_norm(x, x.shape[-1:], w[p + "input_layernorm.weight"], eps)
            q, k, v = (
                linear(h, w[p + f"self_attn.{name}_proj.weight"]).view(len(ids), n, size).transpose(0, 1)
                for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
            )
            a = sdpa(turn(q)[None], turn(k)[None], v[None], is_causal=True, enable_gqa=True)[0]
            x = x + linear(a.transpose(0, 1).reshape(len(ids), -1), w[p + "self_attn.o_proj.weight"])
            h = rms_norm(x, x.shape[-1:], w[p + "post_attention_layernorm.weight"], eps)
            gate, up = linear(h, w[p + "mlp.gate_proj.weight"]), linear(h, w[p + "mlp.up_proj.weight"])
            x = x + linear(silu(gate) * up, w[p + "mlp.down_proj.weight"])
        return linear(rms_norm(x[-1], x.shape[-1:], w["model.norm.weight"], eps), w["model.embed_tokens.weight"])


def load_transformers():
    import transformers

    path = Path(str(resolve_model("smollm2-135m")))
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()


def seconds(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Kvant:
    """Kvant with its default dtype and, for the record, its arithmetic."""

    def __init__(self):
        self.llm = LLM("smollm2-135m", enable_prefix_caching=False, max_model_len=2048)

    def run(self, prompts, count):
        outputs = self.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        assert all(len(output.outputs[0].token_ids) == count for output in outputs)

    def top5(self, prompt):
        output = self.llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=5))[0]
        return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


@torch.inference_mode()
def transformers_run(hf, prompts, count):
    ids = torch.tensor(prompts)
    out = hf.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=2
    )
    assert out.shape[1] == ids.shape[1] + count


def check_equal(kvant: Kvant, bare: BareLoop, ids: list[int]) -> dict[str, float]:
    """Largest difference of the top-5 log-probabilities after prompts of several lengths. Raises where it is too large."""
    differences = []
    for length in (16, 100, 333, PREFILL):
        expected = bare(torch.tensor(ids[:length])).float().log_softmax(-1)
        differences += [abs(value - expected[token].item()) for token, value in kvant.top5(ids[:length]).items()]
    assert max(differences) < GATE, f"the engines disagree by {max(differences):.3f}"
    return {"mean": round(statistics.mean(differences), 4), "max": round(max(differences), 4)}


def summary(rounds: list[dict[str, float]], numerator: str, denominator: str, work: int) -> dict:
    """Speeds of two engines (tokens per second) and the ratio per round."""

    def speeds(name):
        values = sorted(work / r[name] for r in rounds)
        return {"median": round(statistics.median(values), 1), "min": round(values[0], 1), "max": round(values[-1], 1)}

    ratios = sorted(r[denominator] / r[numerator] for r in rounds)
    return {
        numerator: speeds(numerator),
        denominator: speeds(denominator),
        "ratio": {"median": round(statistics.median(ratios), 2), "min": round(ratios[0], 2), "max": round(ratios[-1], 2)},
    }


def measure(rounds: int) -> dict:
    kvant, hf = Kvant(), load_transformers()
    bare = BareLoop(hf)
    ids = kvant.llm.tokenizer.encode(TEXT.read_text())
    prompt, short = ids[:PREFILL], ids[:8]
    many = [ids[i * 100 : i * 100 + PROMPT] for i in range(BATCH)]
    equality = check_equal(kvant, bare, ids)
    work = {
        "prefill.kvant": lambda: kvant.run([prompt], 1),
        "prefill.bare_torch": lambda: bare(torch.tensor(prompt)),
        "one.kvant": lambda: kvant.run([short], DECODE),
        "one.transformers": lambda: transformers_run(hf, [short], DECODE),
        "batch.kvant": lambda: kvant.run(many, OUTPUT),
        "batch.transformers": lambda: transformers_run(hf, many, OUTPUT),
    }
    results = []
    for number in range(rounds + 1):  # the first round warms up
        names = list(work) if number % 2 else list(reversed(work))
        results.append({name: seconds(work[name]) for name in names})
        print(
            f"round {number}: " + "  ".join(f"{name} {value:.2f} s" for name, value in sorted(results[-1].items())), flush=True
        )
    rounds_ = results[1:]
    return {
        "equality_top5_logprobs": equality,
        "prefill_512": summary(rounds_, "prefill.kvant", "prefill.bare_torch", PREFILL),
        "one_stream_128": summary(rounds_, "one.kvant", "one.transformers", DECODE),
        "batch_16x64": summary(rounds_, "batch.kvant", "batch.transformers", BATCH * OUTPUT),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    result = {
        "date": date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "model": "SmolLM2-135M-Instruct Q4_1",
        "machine": {"threads": torch.get_num_threads(), "processor": _processor(), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
        "unit": "tokens per second; ratio = Kvant over the other",
        **measure(arguments.rounds),
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
