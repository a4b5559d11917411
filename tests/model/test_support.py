"""What a model folder may not ask for: each is refused by name, nothing is silently ignored."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ratoon.errors import ErrorCode
from ratoon.model.config_fields import FIELD_RULES, ROPE_FIELDS
from ratoon.model.families import FAMILIES, family_of
from ratoon.model.folder import ModelFolder
from ratoon.model.safetensors_files import open_tensors
from ratoon.model.support import (
    add_undeclared,
    longest_sequence,
    read_config,
)
from ratoon.planner.layer_kinds import window_of
from tests.model.builders import error_of, hidden_of, load
from tests.model.packing import pack
from tests.model.test_policy_model import relative
from tests.tiny_models import ARCHITECTURES, write_folder

ROPE = {"rope_theta": 10_000.0}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
FULL_SLIDING = ["full_attention", "sliding_attention"]
LONG = {"short_factor": [1.0] * 2, "long_factor": [2.0] * 2, "original_max_position_embeddings": 16}


def edited(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> Path:
    folder = write_folder(tmp_path / "base", architecture)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def config_of(folder: Path) -> Any:
    config, said = read_config(ModelFolder.of(folder))
    add_undeclared(config, said)
    return config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_folder_is_read(tmp_path: Path, architecture: str) -> None:
    config = config_of(write_folder(tmp_path / "base", architecture))
    assert config.num_hidden_layers == 2


@pytest.mark.parametrize(
    ("architecture", "changes", "field", "got"),
    [
        ("llama", {"architectures": ["Gemma2ForCausalLM"]}, "architectures", "Gemma2ForCausalLM"),
        ("llama", {"architectures": ["LlamaModel"]}, "architectures", "LlamaModel"),
        ("llama", {"architectures": None}, "architectures", "None"),
        ("llama", {"architectures": []}, "architectures", "[]"),
        ("llama", {"model_type": "mistral"}, "model_type", "mistral"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map", "m.M"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types",
            "sliding_attention",
        ),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout", "0.1"),
        ("llama", {"resid_pdrop": 0.2}, "resid_pdrop", "0.2"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "50.0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
        ("llama", {"num_attention_sinks": 4}, "num_attention_sinks", "4"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "gptq"),
        ("llama", {"is_causal": False}, "is_causal", "False"),
        ("qwen3_moe", {"output_router_logits": True}, "output_router_logits", "True"),
        ("qwen3_moe", {"router_jitter_noise": 0.1}, "router_jitter_noise", "0.1"),
        (
            "llama",
            {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 2.0}},
            "rope_parameters.rope_type",
            "dynamic",
        ),
        (
            "llama",
            {"rope_parameters": ROPE | LONG | {"rope_type": "longrope"}},
            "rope_parameters.rope_type",
            "longrope",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_parameters.rope_type",
            "dynamic",
        ),
        *(
            (
                "llama",
                {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": factor}},
                "rope_parameters.factor",
                str(factor),
            )
            for factor in (0.5, float("inf"), "4")
        ),
        *(
            ("llama", {"rope_parameters": {"rope_theta": theta}}, "rope_parameters.rope_theta", got)
            for theta, got in ((0, "0"), (-1.0, "-1.0"), (float("nan"), "nan"), ("x", "x"))
        ),
        (
            "qwen3",
            {"rope_parameters": None, "rope_theta": None},
            "rope_parameters.rope_theta",
            "None",
        ),
        ("qwen3", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor", "0.5"),
        # transformers has the window in all layers, or in none, whatever the kinds are.
        ("mistral", {"sliding_window": 8, "layer_types": FULL_SLIDING}, "layer_types", "full"),
        ("llama", {"sliding_window": 8, "layer_types": FULL_SLIDING}, "layer_types", "sliding"),
        ("qwen2", {"sliding_window": 8, "layer_types": FULL_SLIDING}, "layer_types", "sliding"),
        ("olmo3", {"sliding_window": None}, "layer_types", "sliding"),
        # Readers differ in which layers have a base that is not said by their kind.
        ("olmo3", {"rope_parameters": None, "rope_theta": 1e4}, "rope_parameters.rope_theta", "1"),
        ("olmo3", {"rope_parameters": ROPE}, "rope_parameters", "rope_theta"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention.rope_type",
            "linear",
        ),
        ("gemma3", {"rope_local_base_freq": 5.0}, "rope_parameters.rope_theta", "5.0"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "30.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
        *(
            ("qwen3_5", {"rope_parameters": ROPE | {name: value}}, f"rope_parameters.{name}", got)
            for name, value, got in (
                ("partial_rotary_factor", 0.1, "0.1"),
                ("mrope_section", [1, 2], "[1, 2]"),
                ("mrope_interleaved", 1, "1"),
            )
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value)[:20],
)
def test_unsupported_configuration_is_refused_by_field(
    tmp_path: Path, architecture: str, changes: dict[str, Any], field: str, got: str
) -> None:
    error = error_of(lambda: config_of(edited(tmp_path, architecture, changes)))
    assert (error.code, error.field) == (ErrorCode.UNSUPPORTED, f"config.{field}")
    assert got in error.got
    assert error.expected
    assert error.field in error.message


@pytest.mark.parametrize(
    ("architecture", "changes", "field"),
    [
        ("deepseek_v3", {"n_group": 4}, "n_group"),
        ("deepseek_v3", {"n_group": 6, "topk_group": 6}, "n_group"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group"),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("deepseek_v3", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("deepseek_v3", {"n_routed_experts": 1}, "n_routed_experts"),
        ("deepseek_v3", {"n_routed_experts": None}, "n_routed_experts"),
        ("deepseek_v3", {"n_shared_experts": 0}, "n_shared_experts"),
        ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("deepseek_v3", {"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ("deepseek_v3", {"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        ("deepseek_v3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
        ("deepseek_v3", {"v_head_dim": None}, "v_head_dim"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"head_dim": 10}, "head_dim"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "group_limited_greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("glm4_moe", {"topk_group": 2}, "topk_group"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 2}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "moe"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"q_lora_rank": 0}, "q_lora_rank"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("gpt_oss", {"num_local_experts": 1}, "num_experts"),
        ("gpt_oss", {"swiglu_limit": float("nan")}, "swiglu_limit"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window"),
        ("gpt_oss", {"layer_types": FULL_SLIDING[:1]}, "layer_types"),
    ],
)
def test_fields_of_routers_and_latents_are_refused_by_name(
    tmp_path: Path, architecture: str, changes: dict[str, Any], field: str
) -> None:
    """Before a model of such sizes is made."""
    error = error_of(lambda: config_of(edited(tmp_path, architecture, changes)))
    assert (error.code, error.field) == (ErrorCode.INVALID_ARGUMENT, f"config.{field}")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}),
        ("deepseek_v3", {"num_key_value_heads": None, "num_nextn_predict_layers": 1}),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "num_nextn_predict_layers": 1}),
        ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 1}),
        ("gpt_oss", {"layer_types": None, "num_local_experts": None, "num_experts": 4}),
        ("gpt_oss", {"rope_scaling": None, "experts_per_token": 2, "initial_context_length": 4096}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4096}),
        ("llama", {"attention_bias": False}),
        ("llama", {"attention_dropout": 0}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.01}),
        ("llama", {"attn_logit_softcapping": None}),
        ("llama", {"pad_token_id": -1}),
        ("llama", {"pad_token_id": 63}),
        ("llama", {"pad_token_id": 64, "bos_token_id": 64, "eos_token_id": [64, 2]}),
        ("gemma3", {"pad_token_id": 10**6}),
        ("qwen3", {"dtype": "auto"}),
        ("qwen2", {"dtype": None, "torch_dtype": "auto"}),
        ("qwen2", {"head_dim": None}),
        ("mistral", {"layer_types": ["full_attention"] * 2}),
        ("llama", {"partial_rotary_factor": 1.0}),
        # As Qwen3.5 is published.
        (
            "qwen3_5",
            {
                "attn_output_gate": True,
                "full_attention_interval": 2,
                "mamba_ssm_dtype": "float32",
                "mlp_only_layers": [],
                "mtp_num_hidden_layers": 1,
                "rope_parameters": ROPE
                | {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
                | {"partial_rotary_factor": 0.25},
            },
        ),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 2}),
        ("qwen3_5", {"partial_rotary_factor": 0.25}),
    ],
)
def test_what_changes_nothing_is_accepted(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    folder = edited(tmp_path, architecture, changes)
    packed = pack([[5, 63, 0, 5, 7, 1, 2, 60]])
    plain = load(write_folder(tmp_path / "plain", architecture))
    assert relative(hidden_of(load(folder), packed), hidden_of(plain, packed)) < 1e-12


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3_5", {"layer_types": ["linear_attention", "sliding_attention"]}),
        ("qwen3_5", {"layer_types": ["linear_attention"]}),
        ("qwen3_5", {"full_attention_interval": 4}),
        ("qwen3_5", {"linear_num_key_heads": 3}),
        ("qwen3_5", {"linear_num_value_heads": 0}),
        ("qwen3_5", {"linear_key_head_dim": 2**20}),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}),
        ("qwen3_5", {"linear_conv_kernel_dim": 17}),
        ("qwen3_5", {"hidden_act": "gelu"}),
        ("qwen3_5", {"attn_output_gate": False}),
        ("qwen3_5_moe", {"num_experts_per_tok": 5}),
        ("qwen3_next", {"mlp_only_layers": [2]}),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_contradiction_in_linear_attention_is_refused_by_field(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    error = error_of(lambda: config_of(edited(tmp_path, architecture, changes)))
    assert (error.code, error.field) == (
        ErrorCode.INVALID_ARGUMENT,
        f"config.{next(iter(changes))}",
    )


def test_heads_of_linear_attention_that_tensors_do_not_have_are_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path, "qwen3_5", {"linear_num_value_heads": 8})
    error = error_of(lambda: load(folder))
    assert error.code is ErrorCode.INVALID_ARGUMENT
    assert "linear_attn" in error.field


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickled_weights_are_refused_without_being_opened(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "base", "llama")
    (folder / "model.safetensors").rename(folder / name)
    (folder / name).chmod(0)
    error = error_of(lambda: open_tensors(ModelFolder.of(folder)))
    assert (error.code, error.field, error.got) == (ErrorCode.UNSUPPORTED, "model_folder", name)
    assert "safetensors" in error.expected


@pytest.mark.parametrize(
    ("architecture", "changes", "windows", "longest"),
    [
        ("mistral", {"sliding_window": 4096}, [4096, 4096], 32_768),
        ("mistral", {"sliding_window": 10**6}, [10**6] * 2, 32_768),
        ("mistral", {"sliding_window": 8, "layer_types": FULL_SLIDING[1:] * 2}, [8, 8], 32_768),
        ("qwen3_moe", QWEN_WINDOW, [8, 8], 32_768),
        ("qwen3_moe", QWEN_WINDOW | {"use_sliding_window": False}, [None, None], 32_768),
        (
            "qwen2",
            QWEN_WINDOW | {"layer_types": None, "max_window_layers": 1},
            [None, 8],
            32_768,
        ),
        (
            "qwen2",
            QWEN_WINDOW | {"layer_types": None, "max_window_layers": 2},
            [None, None],
            32_768,
        ),
        ("qwen3", QWEN_WINDOW | {"layer_types": FULL_SLIDING}, [None, 8], 32_768),
        # transformers has no window there, other readers may.
        ("llama", {"sliding_window": 8}, [None, None], 8),
        (
            "mistral",
            {
                "sliding_window": 60_000,
                "rope_parameters": None,
                "rope_scaling": {"type": "yarn", "factor": 2.0},
            },
            [60_000] * 2,
            65_536,
        ),
        # As Olmo 3 is published, in the words of transformers 4; every fourth layer is full.
        (
            "olmo3",
            {
                "layer_types": None,
                "num_hidden_layers": 4,
                "rope_parameters": None,
                "rope_theta": 500_000,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "attention_factor": 1.2079441541679836,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
            },
            [3, 3, 3, None],
            65_536,
        ),
        # As Gemma 3 is published, in the words of transformers 4.
        (
            "gemma3",
            {
                "layer_types": None,
                "sliding_window_pattern": 2,
                "sliding_window": 512,
                "rope_parameters": None,
                "rope_local_base_freq": 10_000,
                "rope_theta": 1_000_000,
                "rope_scaling": None,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "query_pre_attn_scalar": 256,
            },
            [512, None],
            32_768,
        ),
    ],
)
def test_windows_are_those_of_transformers_and_limit_no_sequence(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    windows: list[int | None],
    longest: int,
) -> None:
    """A published Mistral, whose window is 4096, was refused, and then trained up to its window."""
    config = config_of(edited(tmp_path, architecture, changes))
    found = [window_of(layer.mixer) for layer in family_of(config).layers(config)]
    assert (found, longest_sequence(config)) == (windows, longest)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_every_family_has_a_rule(architecture: str) -> None:
    """A field that a new version of transformers declares is looked at before it is served."""
    family = getattr(transformers, architecture).config_class
    looked_at = {
        *FIELD_RULES,
        *FAMILIES[architecture].rules,
        *ROPE_FIELDS,
        "attention_dropout",
        "architectures",
        # It is read as num_experts.
        "num_local_experts",
    }
    left_out = {"transformers_version", "return_dict", "id2label", "label2id", "problem_type"}
    off = {
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "output_router_logits",
    }
    declared = {field.name for field in dataclasses.fields(family)}
    assert declared <= looked_at | left_out | off
