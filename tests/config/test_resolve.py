"""resolve(): tables of machines and wishes, and what must come of them."""

from dataclasses import replace

import pytest

from kvant.config.engine import EngineConfig
from kvant.config.hardware import Gpu, Hardware
from kvant.config.model import ModelConfig
from kvant.config.resolve import CPU_KV_MOST, choose_device, choose_dtype, choose_threads, resolve
from kvant.errors import CapacityError, ConfigError, KvantError

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS = 270 * MIB

PLAIN = Hardware(
    cpu_name="Fast 9000",
    cpu_flags=frozenset({"avx2"}),
    num_cpus=8,
    num_cores=4,
    memory_total=16 * GIB,
    memory_available=10 * GIB + WEIGHTS,
    compiler="/usr/bin/g++",
)
BF16 = replace(PLAIN, cpu_flags=frozenset({"avx2", "avx512_bf16"}))
AMX = replace(PLAIN, cpu_flags=frozenset({"amx_bf16"}))
H200 = Gpu(name="H200", memory_total=141 * GIB, memory_free=140 * GIB, compute_capability=(9, 0))
T4 = Gpu(name="T4", memory_total=16 * GIB, memory_free=15 * GIB, compute_capability=(7, 5))
GPU = replace(BF16, gpus=(H200,), torch_cuda="12.8")
OLD_GPU = replace(PLAIN, gpus=(T4,), torch_cuda="12.8")
GPU_UNUSED = replace(BF16, gpus=(H200,), torch_cuda=None)


def llama(**changes) -> ModelConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
    }
    return ModelConfig.from_dict({**raw, **changes})


def gemma(**changes) -> ModelConfig:
    return llama(
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
        max_position_embeddings=32768,
        **changes,
    )


BLOCK = llama().cache_groups()[0].block_bytes(2)  # 30 layers, 16 tokens, 3 heads of 64, bf16


def done(config: EngineConfig | None = None, model: ModelConfig | None = None, hardware: Hardware = BF16, weights=WEIGHTS):
    return resolve(config or EngineConfig(), model or llama(), hardware, weights)


# --- device, dtype, threads, tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device, hardware, expected",
    [
        ("auto", PLAIN, "cpu"),
        ("auto", GPU, "cuda"),
        ("auto", GPU_UNUSED, "cpu"),
        ("cpu", GPU, "cpu"),
        ("cuda", GPU, "cuda"),
    ],
)
def test_device(device, hardware, expected):
    assert choose_device(EngineConfig(device=device), hardware).value == expected


@pytest.mark.parametrize("hardware, words", [(PLAIN, "no NVIDIA GPU"), (GPU_UNUSED, "built for CPUs only")])
def test_cuda_that_is_not_there_is_refused(hardware, words):
    with pytest.raises(ConfigError, match=words) as caught:
        choose_device(EngineConfig(device="cuda"), hardware)
    assert caught.value.param == "device"


def test_an_unused_gpu_is_noticed():
    choice = choose_device(EngineConfig(), GPU_UNUSED)
    assert "H200" in choice.notice and "install torch with CUDA" in choice.notice


@pytest.mark.parametrize(
    "dtype, hardware, trained_in, expected",
    [
        ("auto", PLAIN, "bfloat16", "float32"),
        ("auto", PLAIN, "float16", "float32"),
        ("auto", BF16, "bfloat16", "bfloat16"),
        ("auto", AMX, "float32", "bfloat16"),
        ("auto", BF16, "float16", "bfloat16"),
        ("auto", GPU, "bfloat16", "bfloat16"),
        ("auto", GPU, "float32", "bfloat16"),
        ("auto", GPU, "float16", "float16"),
        ("auto", OLD_GPU, "bfloat16", "float32"),
        ("auto", OLD_GPU, "float16", "float16"),
        ("float32", BF16, "bfloat16", "float32"),
        ("float16", PLAIN, "bfloat16", "float16"),
        ("bfloat16", PLAIN, "bfloat16", "bfloat16"),
    ],
)
def test_dtype(dtype, hardware, trained_in, expected):
    device = "cuda" if hardware.gpus else "cpu"
    assert choose_dtype(EngineConfig(dtype=dtype), hardware, device, trained_in).value == expected


@pytest.mark.parametrize("trained_in", ["bfloat16", "float32"])
@pytest.mark.parametrize("hardware", [PLAIN, BF16, AMX, GPU, OLD_GPU])
def test_R48_auto_never_picks_float16_for_weights_of_a_wider_range(hardware, trained_in):
    for device in ("cpu", "cuda") if hardware.gpus else ("cpu",):
        assert choose_dtype(EngineConfig(), hardware, device, trained_in).value != "float16"


def test_R48_explicit_float16_is_noticed():
    assert "overflow" in choose_dtype(EngineConfig(dtype="float16"), GPU, "cuda", "bfloat16").notice
    assert choose_dtype(EngineConfig(dtype="float16"), GPU, "cuda", "float16").notice == ""


def test_slow_bfloat16_is_noticed():
    assert "slow" in choose_dtype(EngineConfig(dtype="bfloat16"), PLAIN, "cpu", "bfloat16").notice
    assert choose_dtype(EngineConfig(dtype="bfloat16"), AMX, "cpu", "bfloat16").notice == ""


@pytest.mark.parametrize("threads, expected, noticed", [(None, 4, False), (2, 2, False), (8, 8, False), (9, 9, True)])
def test_threads(threads, expected, noticed):
    choice = choose_threads(EngineConfig(threads=threads), PLAIN)
    assert (choice.value, bool(choice.notice)) == (expected, noticed)


@pytest.mark.parametrize(
    "config, hardware, expected",
    [
        (EngineConfig(), BF16, 512),
        (EngineConfig(), GPU, 8192),
        (EngineConfig(max_num_batched_tokens=7), BF16, 7),
        (EngineConfig(max_num_seqs=1000), BF16, 1000),
    ],
)
def test_tokens_per_step(config, hardware, expected):
    assert done(config, hardware=hardware).config.max_num_batched_tokens == expected


@pytest.mark.parametrize(
    "config, hardware, expected",
    [
        (EngineConfig(), PLAIN, "native"),
        (EngineConfig(), GPU, "torch"),
        (EngineConfig(device="cpu"), GPU, "native"),
        (EngineConfig(dtype="float32"), PLAIN, "torch"),
        (EngineConfig(dtype="bfloat16"), AMX, "torch"),
        (EngineConfig(block_size=8), PLAIN, "torch"),
        (EngineConfig(block_size=64), PLAIN, "native"),
        (EngineConfig(), replace(PLAIN, compiler=None), "torch"),
    ],
)
def test_executor(config, hardware, expected):
    assert done(config, hardware=hardware).executor == expected


@pytest.mark.parametrize("changes", [{"dtype": "float32"}, {"device": "cuda"}])
def test_deterministic_is_refused_where_it_is_not_kept(changes):
    with pytest.raises(ConfigError, match="native executor"):
        done(EngineConfig(deterministic=True, **changes), hardware=GPU)
    assert done(EngineConfig(deterministic=True, device="cpu"), hardware=GPU).executor == "native"


def test_a_missing_compiler_is_noticed_with_the_remedy():
    (notice,) = done(hardware=replace(PLAIN, compiler=None)).notices
    assert "install g++" in notice


# --- memory and context -------------------------------------------------------------------------------------------------


def test_everything_is_decided_and_explained():
    resolved = done()
    config = resolved.config
    assert "auto" not in (config.device, config.dtype)
    assert None not in (config.threads, config.max_num_batched_tokens, config.max_model_len, config.kv_cache_memory_bytes)
    assert [reason.split(":")[0] for reason in resolved.reasons] == [
        "device",
        "executor",
        "dtype",
        "threads",
        "max_num_batched_tokens",
        "max_model_len",
        "kv_cache_memory_bytes",
    ]
    assert resolved.notices == ()
    assert done(config).reasons == (), "what was decided needs no reason any more"


def test_resolving_twice_changes_nothing():
    for hardware in (PLAIN, BF16, GPU, OLD_GPU):
        once = done(hardware=hardware)
        assert done(once.config, hardware=hardware).num_blocks == once.num_blocks


@pytest.mark.parametrize(
    "free, expected",
    [
        (100 * GIB, CPU_KV_MOST),  # at most 4 GiB
        (5 * GIB, 2 * GIB),  # 40%
        (GIB, int(0.4 * GIB)),
    ],
)
def test_cpu_default_is_a_share_of_what_is_available(free, expected):
    resolved = done(hardware=replace(BF16, memory_available=free + WEIGHTS))
    assert expected - BLOCK < resolved.kv_bytes <= expected
    assert resolved.num_blocks == (resolved.kv_bytes // BLOCK,)
    assert resolved.config.max_model_len == 8192


def test_cpu_default_is_at_most_what_the_sequences_can_use():
    resolved = done(EngineConfig(max_num_seqs=2, max_model_len=1000))
    assert resolved.num_blocks == (1 + 2 * 63,)
    assert "can use" in resolved.reasons[-1]


@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_block_size_is_honoured(block_size):
    resolved = done(EngineConfig(block_size=block_size, max_num_seqs=1, max_model_len=1024))
    assert [group.block_size for group in resolved.groups] == [block_size]
    assert resolved.num_blocks == (1 + 1024 // block_size,)


@pytest.mark.parametrize("bytes_, blocks", [(1000 * BLOCK, 1000), (1000 * BLOCK + BLOCK - 1, 1000), (1001 * BLOCK, 1001)])
def test_exact_memory(bytes_, blocks):
    resolved = done(EngineConfig(kv_cache_memory_bytes=bytes_, max_num_seqs=1))
    assert resolved.num_blocks == (blocks,)
    assert resolved.config.kv_cache_memory_bytes == bytes_


def test_sliding_layers_need_only_their_window():
    resolved = done(EngineConfig(max_num_seqs=3), gemma(), replace(BF16, memory_available=100 * GIB))
    by_name = dict(zip((group.name for group in resolved.groups), resolved.num_blocks, strict=True))
    assert by_name == {"sliding512": 1 + 3 * ((512 + 512) // 16 + 1), "full": 1 + 3 * 2048}


def test_a_context_that_cannot_fit_is_reduced_with_a_notice():
    resolved = done(EngineConfig(kv_cache_memory_bytes=101 * BLOCK))
    assert resolved.config.max_model_len == 1600
    [notice] = resolved.notices
    assert "1600" in notice and "8192" in notice and "kv_cache_memory_bytes" in notice
    assert resolved.num_blocks == (101,)


def test_reduced_by_available_memory():
    resolved = done(hardware=replace(BF16, memory_available=WEIGHTS + 100 * MIB))
    assert resolved.config.max_model_len == (40 * MIB // BLOCK - 1) * 16
    assert len(resolved.notices) == 1


def test_an_explicit_context_that_fits_exactly_works():
    config = EngineConfig(max_model_len=1600, kv_cache_memory_bytes=101 * BLOCK)
    assert done(config).config.max_model_len == 1600
    assert done(config).notices == ()
    with pytest.raises(CapacityError, match="1600 or less"):
        done(replace(config, max_model_len=1601))


@pytest.mark.parametrize(
    "config, hardware, error, words",
    [
        (EngineConfig(max_model_len=8193), BF16, ConfigError, ["8193", "8192"]),
        (
            EngineConfig(max_model_len=4000, kv_cache_memory_bytes=10 * MIB),
            BF16,
            CapacityError,
            ["4000", "88.2 MiB", "10.0 MiB", "max_model_len of", "kv_cache_memory_bytes"],
        ),
        (EngineConfig(kv_cache_memory_bytes=BLOCK), BF16, CapacityError, ["no room", "kv_cache_memory_bytes"]),
        (EngineConfig(kv_cache_memory_bytes=11 * GIB), BF16, CapacityError, ["11.0 GiB", "10.0 GiB", "ask for less"]),
        (EngineConfig(), replace(BF16, memory_available=100 * MIB), CapacityError, ["270.0 MiB", "100.0 MiB", "smaller model"]),
        (EngineConfig(), replace(BF16, memory_available=WEIGHTS + MIB), CapacityError, ["no room"]),
        (EngineConfig(gpu_memory_utilization=0.01), GPU, CapacityError, ["gpu_memory_utilization", "1.4 GiB"]),
        (EngineConfig(device="cuda"), BF16, ConfigError, ["cuda"]),
    ],
)
def test_what_cannot_be_says_numbers_and_remedy(config, hardware, error, words):
    with pytest.raises(error) as caught:
        done(config, hardware=hardware)
    assert type(caught.value) is error and isinstance(caught.value, KvantError)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_tiny_contexts():
    assert done(EngineConfig(max_model_len=1, max_num_seqs=1)).num_blocks == (2,)
    assert done(model=llama(max_position_embeddings=8), config=EngineConfig(max_num_seqs=1)).config.max_model_len == 8


def test_gpu_memory_is_its_share_less_what_is_taken():
    resolved = done(hardware=GPU)
    spent = 0.9 * 141 * GIB - GIB - WEIGHTS
    assert spent - 2 * GIB < resolved.kv_bytes < spent
    less = done(EngineConfig(gpu_memory_utilization=0.5), hardware=GPU)
    assert less.kv_bytes == pytest.approx(resolved.kv_bytes - 0.4 * 141 * GIB, rel=1e-3)
