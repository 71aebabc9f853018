"""Shapes files, the products of transformer configs (dimensions as published with the models), and recording from PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autogemm.arch import gpu
from autogemm.errors import InputError
from autogemm.model_shapes import model_shapes
from autogemm.shapes import Shape, by_time_saved, merged, read_shapes, record_shapes, write_shapes

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
MIXTRAL = {
    **LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "vocab_size": 129280,
}  # fmt: skip


def products(folder: Path, config: dict[str, Any], tokens: tuple[int, ...], **options: Any) -> set[tuple[int, int, int, int]]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return {(s.m, s.n, s.k, s.count) for s in model_shapes(path, tokens=tokens, **options)}


def test_llama_8b_on_one_gpu_runs_these_products(tmp_path: Path) -> None:
    assert products(tmp_path, LLAMA_8B, (16,)) == {
        (16, 6144, 4096, 32),
        (16, 4096, 4096, 32),
        (16, 28672, 4096, 32),
        (16, 4096, 14336, 32),
        (16, 128256, 4096, 1),
    }


def test_llama_70b_on_eight_ranks_runs_these_products(tmp_path: Path) -> None:
    per_rank = {(1280, 8192, 80), (8192, 1024, 80), (7168, 8192, 80), (8192, 3584, 80), (16032, 8192, 1)}
    expected = {(m, *nk) for m in (1, 4096) for nk in per_rank}
    assert products(tmp_path, LLAMA_70B, (1, 4096), tp=8) == expected


def test_unfused_llama_lists_each_projection_and_adds_up_equal_ones(tmp_path: Path) -> None:
    assert products(tmp_path, LLAMA_8B, (16,), fused=False) == {
        (16, 4096, 4096, 64),  # q and o
        (16, 1024, 4096, 64),  # k and v
        (16, 14336, 4096, 64),  # gate and up
        (16, 4096, 14336, 32),
        (16, 128256, 4096, 1),
    }


def test_mixtral_spreads_tokens_evenly_over_its_experts(tmp_path: Path) -> None:
    assert products(tmp_path, MIXTRAL, (4096,)) == {
        (4096, 6144, 4096, 32),
        (4096, 4096, 4096, 32),
        (4096, 8, 4096, 32),
        (1024, 28672, 4096, 256),
        (1024, 4096, 14336, 256),
        (4096, 32000, 4096, 1),
    }


def test_one_token_of_mixtral_wakes_two_experts(tmp_path: Path) -> None:
    found = products(tmp_path, MIXTRAL, (1,))
    assert {(1, 28672, 4096, 64), (1, 4096, 14336, 64)} <= found


def test_qwen_7b_on_four_ranks_runs_these_products(tmp_path: Path) -> None:
    assert products(tmp_path, QWEN_7B, (128,), tp=4) == {
        (128, 1152, 3584, 28),
        (128, 3584, 896, 28),
        (128, 9472, 3584, 28),
        (128, 3584, 4736, 28),
        (128, 38016, 3584, 1),
    }


def test_deepseek_v3_lists_latent_attention_dense_and_expert_layers(tmp_path: Path) -> None:
    assert products(tmp_path, DEEPSEEK_V3, (4096,)) == {
        (4096, 2112, 7168, 61),
        (4096, 24576, 1536, 61),
        (4096, 32768, 512, 61),
        (4096, 7168, 16384, 61),
        (4096, 36864, 7168, 3),
        (4096, 7168, 18432, 3),
        (4096, 256, 7168, 58),
        (128, 4096, 7168, 58 * 256),
        (128, 7168, 2048, 58 * 256),
        (4096, 4096, 7168, 58),  # the shared expert
        (4096, 7168, 2048, 58),
        (4096, 129280, 7168, 1),
    }


def test_more_ranks_than_key_value_heads_replicate_them(tmp_path: Path) -> None:
    assert (1, (2 + 2) * 128, 4096, 32) in products(tmp_path, LLAMA_8B, (1,), tp=16)


def test_a_multimodal_config_is_read_through_to_its_language_model(tmp_path: Path) -> None:
    wrapped = {"model_type": "mistral3", "text_config": {**LLAMA_8B, "model_type": "mistral"}}
    assert products(tmp_path, wrapped, (16,)) == products(tmp_path, LLAMA_8B, (16,))


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"model_type": "bert"}, 1, "model_type 'bert' is not known"),
        ({"model_type": None}, 1, "model_type None is not known"),
        ({"hidden_size": "4096"}, 1, "hidden_size must be a positive integer, got '4096'"),
        ({"vocab_size": None}, 1, "lacks vocab_size"),
        ({"num_attention_heads": 0}, 1, "num_attention_heads must be a positive integer, got 0"),
        ({"num_attention_heads": 33}, 1, "not a multiple of num_attention_heads=33"),
        ({}, 3, "num_attention_heads=32 can't be split over 3"),
        ({}, 0, "ranks must be at least 1"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_clear_error(tmp_path: Path, change: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        products(tmp_path, {**LLAMA_8B, **change}, (1,), tp=tp)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"llama"', "\x00"])
def test_a_file_that_is_no_config_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match="model config"):
        model_shapes(path, tokens=(1,))


def test_shapes_files_round_trip(tmp_path: Path) -> None:
    shapes = [Shape(m=1, n=2, k=3, count=4, source="x"), Shape(m=5, n=6, k=7, saved_s=0.5)]
    write_shapes(tmp_path / "s.json", shapes)
    assert read_shapes(tmp_path / "s.json") == [shapes[0], Shape(m=5, n=6, k=7)]


def test_lines_and_json_objects_are_both_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("# mine\n1x2x3\n\n4x5x6  # note\n1x2x3\n")
    (tmp_path / "b").write_text('{"shapes": [{"m": 4, "n": 5, "k": 6, "extra": true}]}')
    assert [(s.m, s.n, s.k, s.count) for s in read_shapes(tmp_path / "a")] == [(1, 2, 3, 2), (4, 5, 6, 1)]
    assert read_shapes(tmp_path / "b") == [Shape(m=4, n=5, k=6)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no shapes"),
        ("# only a comment\n", "holds no shapes"),
        ("[]", "holds no shapes"),
        ("1x2x3\n4x5\n", "line 2: shape '4x5' is not MxNxK"),
        ("[1]", "entry 1: expected an object"),
        ('[{"m": 1, "n": 2}]', "entry 1 lacks k"),
        ('[{"m": 1, "n": 2, "k": 0}]', "entry 1: K must be between 1"),
        ('[{"m": 1, "n": 2, "k": 3.0}]', "entry 1: K must be an integer"),
        ('[{"m": 1, "n": 2, "k": 8, "count": 0}]', "count of 1x2x8"),
        ('{"a": 1}', "needs a JSON list"),
        ("[", "not valid JSON"),
    ],
)
def test_a_bad_shapes_file_names_its_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "shapes"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_shapes(path)


def test_equal_shapes_are_merged_and_keep_their_sources() -> None:
    one = Shape(m=1, n=2, k=3, count=2, source="a")
    assert merged([one, Shape(m=1, n=2, k=3, source="b"), one]) == [Shape(m=1, n=2, k=3, count=5, source="a, b")]


def test_the_order_is_by_predicted_time_saved_over_all_runs() -> None:
    shapes = [Shape(m=16, n=4096, k=4096), Shape(m=16, n=4096, k=4096 - 8, count=1000), Shape(m=5, n=5, k=5)]
    ordered = by_time_saved(shapes, gpu("nvidia-h200"))
    assert [s.count for s in ordered] == [1000, 1, 1]
    saved = [s.saved_s for s in ordered]
    assert saved == sorted(saved, reverse=True) and saved[-1] == 0.0  # no kernel takes 5x5x5


def test_recording_sees_every_linear_of_a_model_and_skips_what_no_kernel_takes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32, bias=False)).half()
    with record_shapes(tmp_path / "s.json") as seen, torch.no_grad():
        model(torch.zeros(2, 8, 64, dtype=torch.float16))
        model(torch.zeros(16, 64, dtype=torch.float16))
        torch.zeros(4, 4) @ torch.zeros(4, 4)
        torch.zeros(4, 8).half() @ torch.zeros(8, 4).half()
    expected = {(16, 128, 64): 2, (16, 32, 128): 2}
    assert seen.counts == expected
    assert seen.skipped == {"element type float32": 1, "layout NN": 1}
    assert {(s.m, s.n, s.k): s.count for s in read_shapes(tmp_path / "s.json")} == expected


def test_recording_in_inference_mode_sees_the_same() -> None:
    with record_shapes() as seen, torch.inference_mode():
        torch.nn.functional.linear(torch.zeros(3, 5, 64).bfloat16(), torch.zeros(32, 64).bfloat16())
    assert seen.counts == {(15, 32, 64): 1}


def test_recording_nothing_into_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no shapes to write"), record_shapes(tmp_path / "s.json"):
        pass
    assert not (tmp_path / "s.json").exists()
