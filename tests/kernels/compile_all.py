"""Compiles every kernel for a GPU that need not be there, as the engine launches it for Llama-3-8B shapes.

    python -m tests.kernels.compile_all 90      one JSON line per kernel: name, bytes of shared memory, wgmma or not

A program of its own: Triton decides once per process whether kernels are compiled or interpreted.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvant.kernels import few_decode, gated, gathered_prefill, linear, one_row, paged_decode, paged_prefill, rms_norm, rotary

B, F, I, L, NUMBER = "*bf16", "*fp32", "*i32", "*i64", "i32"  # noqa: E741
TILE = "tensordesc<bf16[64, 128]>"
ATTENTION = dict(q=B, keys=B, values=B, out=B, block_table=I, query_start=I, kv_lens=I)
SCORES = dict(num_sequences=NUMBER, scale="fp32", cap="fp32", table_stride=NUMBER, cache_stride=NUMBER)
HEADS = dict(GROUP=4, SIZE=128, COLUMNS=128, SEQUENCES=64, BLOCK_SIZE=16, WINDOW=0, CAPPED=False, UPCAST=False)

CASES = [
    (
        rms_norm._rms_norm_kernel,
        dict(x=F, delta=B, weight=F, inner=F, summed=F, out=B, num_rows=NUMBER, num_heads=NUMBER)
        | dict(stride_token=NUMBER, stride_head=NUMBER, eps="fp32"),
        dict(SIZE=4096, COLUMNS=4096, ROWS=1, ADD=True, SANDWICH=True),
        dict(num_warps=8),
    ),
    (
        gated._gated_kernel,
        dict(gate_up=B, out=B, stride=NUMBER),
        dict(SIZE=14336, BLOCK=1024, ACTIVATION="gelu"),
        dict(num_warps=4),
    ),
    (
        rotary._rotary_and_store_kernel,
        dict(q=B, k=B, v=B, positions=L, inv_freq=F, slots=L, keys=B, values=B, out=B, q_weight=F, k_weight=F)
        | dict(
            eps="fp32", scale="fp32", num_tokens=NUMBER, q_stride=NUMBER, k_stride=NUMBER, v_stride=NUMBER, cache_stride=NUMBER
        ),
        dict(HALF=64, TURNING=48, PAIRS=64, GROUP=4, TOKENS=8, NORM=True, SCALED=True),
        dict(num_warps=4),
    ),
    (
        one_row._one_row_kernel,
        dict(x=F, weight=B, out=B, norm_weight=F, residual=F, eps="fp32", num_outs=NUMBER),
        dict(SIZE=4096, ROWS=2, COLUMNS=4096, NORM=True, GATE="silu", ADD=False),
        dict(num_warps=8),
    ),
    (
        linear._skinny_kernel,
        dict(x=B, weight=B, bias=B, out=B, partial=F, arrived=I, num_rows=NUMBER, num_outs=NUMBER, x_stride=NUMBER),
        dict(SIZE=4096, PART_SIZE=1024, ROWS=64, TILE=64, STEP=128, PARTS=4, ALONE=False, BIAS=True, UPCAST=False),
        dict(num_warps=4, num_stages=4),
    ),
    (  # as the deterministic mode launches it for many rows
        linear._skinny_kernel,
        dict(x=B, weight=B, bias=B, out=F, partial=F, arrived=I, num_rows=NUMBER, num_outs=NUMBER, x_stride=NUMBER),
        dict(SIZE=4096, PART_SIZE=2048, ROWS=128, TILE=128, STEP=64, PARTS=2, ALONE=True, BIAS=False, UPCAST=False),
        dict(num_warps=8, num_stages=3),
    ),
    (
        paged_decode._plan_kernel,
        dict(query_start=I, kv_lens=I, ends=I, arrived=I, num_sequences=NUMBER, num_counters=NUMBER),
        dict(SEQUENCES=64, COUNTERS=512, TILE=64, WINDOW=512),
        dict(num_warps=4),
    ),
    (
        paged_decode._decode_kernel,
        ATTENTION | dict(ends=I, arrived=I, shares=F) | SCORES,
        HEADS | dict(ROWS=16, MEMBERS=4, TILE=64, LEAST=2, AT_ONCE=8),
        dict(num_warps=4, num_stages=3),
    ),
    (
        few_decode._few_kernel,
        {name: kind for name, kind in ATTENTION.items() if name != "query_start"}
        | dict(k_new=B, v_new=B, positions=L, inv_freq=F, q_weight=F, k_weight=F, slots=L, arrived=I, shares=F)
        | dict(eps="fp32", turn_scale="fp32", q_stride=NUMBER, k_stride=NUMBER, v_stride=NUMBER)
        | {name: kind for name, kind in SCORES.items() if name != "num_sequences"},
        {name: value for name, value in HEADS.items() if name != "SEQUENCES"}
        | dict(ROWS=16, MEMBERS=4, TILE=64, LEAST=4, AT_ONCE=8, TURNING=48, NORM=True, SCALED=True),
        dict(num_warps=4, num_stages=3),
    ),
    (
        paged_prefill._prefill_kernel,
        ATTENTION | SCORES,
        HEADS | dict(QUERIES=32, ROWS=128, KEYS=128, FIXED=False),
        dict(num_warps=8, num_stages=2),
    ),
    (
        paged_prefill._prefill_kernel,
        ATTENTION | SCORES,
        HEADS | dict(QUERIES=16, ROWS=64, KEYS=64, FIXED=True),
        dict(num_warps=4, num_stages=3),
    ),
    (
        gathered_prefill._gather_kernel,
        dict(keys=B, values=B, gathered_keys=B, gathered_values=B, block_table=I, kv_lens=I, keys_start=I, first_key=I)
        | dict(num_sequences=NUMBER, table_stride=NUMBER),
        dict(WIDTH=1024, COLUMNS=1024, ROWS=16, SEQUENCES=64, BLOCK_SIZE=16),
        dict(num_warps=8),
    ),
    (
        gathered_prefill._attend_kernel,
        dict(q=B, keys=TILE, values=TILE, out=B, query_start=I, kv_lens=I, keys_start=I, first_key=I)
        | dict(num_sequences=NUMBER, factor="fp32", cap="fp32"),
        dict(GROUP=4, QUERIES=16, ROWS=64, SIZE=128, SEQUENCES=64, KEYS=64, WINDOW=512, CAPPED=False, UPCAST=False),
        dict(num_warps=4, num_stages=3),
    ),
]


def compiled(kernel, arguments: dict, constants: dict, options: dict, capability: int) -> dict:
    if "EARLY" in kernel.arg_names:
        constants = constants | {"EARLY": capability >= 90}
    kinds = arguments | dict.fromkeys(constants, "constexpr")
    signature = {name: kinds[name] for name in kernel.arg_names}
    # What the launcher finds out by looking: pointers and strides are multiples of 16, so loads may be 16 bytes wide.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "stride" in name
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"name": kernel.__name__, "shared": binary.metadata.shared, "wgmma": "wgmma" in binary.asm["ptx"]}


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compiled(*case, capability=int(sys.argv[1]))), flush=True)
