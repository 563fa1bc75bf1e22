"""A hub model's name in, its widths as published out; for models that are not on this machine.

Taken from the repositories' config.json; the numbers of parameters are those that their pages on
huggingface.co count, and a test counts them again with transformers. A name that is not here is planned with
the widths of the published model nearest in size.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")


@dataclass(frozen=True)
class PublishedShape:
    """model_type: transformers' architecture. tied: input and output embeddings are one matrix."""

    name: str
    model_type: str
    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool


PUBLISHED = tuple(
    PublishedShape(*row)
    for row in (
        ("Qwen/Qwen2.5-0.5B", "qwen2", 494_032_768, 24, 896, 4864, 14, 2, 64, 151_936, True),
        ("Qwen/Qwen2.5-1.5B", "qwen2", 1_543_714_304, 28, 1536, 8960, 12, 2, 128, 151_936, True),
        ("Qwen/Qwen2.5-3B", "qwen2", 3_085_938_688, 36, 2048, 11008, 16, 2, 128, 151_936, True),
        ("Qwen/Qwen2.5-7B", "qwen2", 7_615_616_512, 28, 3584, 18944, 28, 4, 128, 152_064, False),
        ("Qwen/Qwen2.5-14B", "qwen2", 14_770_033_664, 48, 5120, 13824, 40, 8, 128, 152_064, False),
        ("Qwen/Qwen2.5-32B", "qwen2", 32_763_876_352, 64, 5120, 27648, 40, 8, 128, 152_064, False),
        ("Qwen/Qwen2.5-72B", "qwen2", 72_706_203_648, 80, 8192, 29568, 64, 8, 128, 152_064, False),
        ("Qwen/Qwen3-0.6B", "qwen3", 596_049_920, 28, 1024, 3072, 16, 8, 128, 151_936, True),
        ("Qwen/Qwen3-1.7B", "qwen3", 1_720_574_976, 28, 2048, 6144, 16, 8, 128, 151_936, True),
        ("Qwen/Qwen3-4B", "qwen3", 4_022_468_096, 36, 2560, 9728, 32, 8, 128, 151_936, True),
        ("Qwen/Qwen3-8B", "qwen3", 8_190_735_360, 36, 4096, 12288, 32, 8, 128, 151_936, False),
        ("Qwen/Qwen3-14B", "qwen3", 14_768_307_200, 40, 5120, 17408, 40, 8, 128, 151_936, False),
        ("Qwen/Qwen3-32B", "qwen3", 32_762_123_264, 64, 5120, 25600, 64, 8, 128, 151_936, False),
        ("meta-llama/Llama-3.2-1B", "llama", 1_235_814_400, 16, 2048, 8192, 32, 8, 64, 128_256, True),
        ("meta-llama/Llama-3.2-3B", "llama", 3_212_749_824, 28, 3072, 8192, 24, 8, 128, 128_256, True),
        ("meta-llama/Llama-3.1-8B", "llama", 8_030_261_248, 32, 4096, 14336, 32, 8, 128, 128_256, False),
        ("meta-llama/Llama-3.1-70B", "llama", 70_553_706_496, 80, 8192, 28672, 64, 8, 128, 128_256, False),
        (
            "meta-llama/Llama-3.1-405B",
            "llama",
            405_853_388_800,
            126,
            16384,
            53248,
            128,
            8,
            128,
            128_256,
            False,
        ),
        ("HuggingFaceTB/SmolLM2-135M", "llama", 134_515_008, 30, 576, 1536, 9, 3, 64, 49_152, True),
        ("HuggingFaceTB/SmolLM2-360M", "llama", 361_821_120, 32, 960, 2560, 15, 5, 64, 49_152, True),
        ("HuggingFaceTB/SmolLM2-1.7B", "llama", 1_711_376_384, 24, 2048, 8192, 32, 32, 64, 49_152, True),
        ("google/gemma-2-2b", "gemma2", 2_614_341_888, 26, 2304, 9216, 8, 4, 256, 256_000, True),
        ("mistralai/Mistral-7B-v0.1", "mistral", 7_241_732_096, 32, 4096, 14336, 32, 8, 128, 32_000, False),
        ("EleutherAI/pythia-1b", "gpt_neox", 1_011_781_632, 16, 2048, 8192, 8, 8, 256, 50_304, False),
    )
)


def published_shape(path: str) -> PublishedShape | None:
    """Of a name in the table, or one of its descendants that only add words: Qwen/Qwen2.5-7B-Instruct."""
    rows = [
        row for row in PUBLISHED if re.match(rf"{re.escape(row.name)}(?![A-Za-z0-9.])", path, re.IGNORECASE)
    ]
    return max(rows, key=lambda row: len(row.name), default=None)


def size_in_name(path: str) -> int | None:
    """`owner/Model-7B-Instruct` says 7e9; None where a name tells no size."""
    found = _SIZE.search(path)
    return None if found is None else round(float(found[1]) * 1e9)


def nearest_published(num_parameters: int) -> PublishedShape:
    """By the ratio of the sizes."""
    return min(PUBLISHED, key=lambda row: abs(math.log(row.num_parameters / max(num_parameters, 1))))
