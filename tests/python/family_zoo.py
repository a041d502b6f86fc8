"""A table of model families of transformers at tiny sizes: what a streamed block has to put up with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from families import VOCABULARY, Family, image_batch, text_batch, translation_batch
from torch import nn

SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=4,
    initializer_range=0.1, init_std=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    # experts
    num_experts=4, num_local_experts=4, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
    num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
    # latent attention
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    # linear attention and state spaces
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_head_dim=8, linear_num_heads=4, mamba_d_state=8, chunk_size=4,
)  # fmt: skip


def configuration(name: str, /, **settings: Any) -> Any:
    """`<name>Config` with those of the common sizes that it declares, and `settings`."""
    config = getattr(transformers, f"{name}Config")
    known = set(config.__dataclass_fields__) | set(config.attribute_map)
    return config(**{**{key: value for key, value in SIZES.items() if key in known}, **settings})


def causal(name: str, /, **settings: Any) -> Callable[[], nn.Module]:
    """Makes a causal language model of `<name>Config`."""

    def make() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(configuration(name, **settings))

    return make


def of_class(model: str, config: str, /, **settings: Any) -> Callable[[], nn.Module]:
    """Makes a `model` of `<config>Config`."""
    return lambda: getattr(transformers, model)(configuration(config, **settings))


def row(name: str, make: Callable[[], nn.Module], batch: Callable[..., dict[str, torch.Tensor]] = text_batch) -> Family:
    return Family(name, make, batch, {}, "")


IMAGE_TOKEN = 3


def llava_batch(seed: int, rows: int = 2, length: int = 12, left_padding: int = 3) -> dict[str, torch.Tensor]:
    """Each row begins (after the padding) with the four tokens of one image of 8 by 8."""
    batch = text_batch(seed, rows=rows, length=length, left_padding=left_padding)
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE_TOKEN, IMAGE_TOKEN + 1)
    for entry, padding in zip(ids, [left_padding] + [0] * (rows - 1), strict=True):
        entry[padding : padding + 4] = IMAGE_TOKEN
    labels = batch["labels"].masked_fill(ids == IMAGE_TOKEN, -100)
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels, pixel_values=pixels)


def qwen_vl_batch(seed: int, **sizes: Any) -> dict[str, torch.Tensor]:
    """The same with images of 4 by 4 patches of two frames, four patches a token, the patches of all
    images behind one another."""
    batch = llava_batch(seed, **sizes)
    rows = batch["input_ids"].shape[0]
    batch["pixel_values"] = torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).int()
    return batch


def speech_batch(seed: int, rows: int = 2, length: int = 6, **_: Any) -> dict[str, torch.Tensor]:
    features = torch.randn(rows, 8, 16, generator=torch.Generator().manual_seed(seed))
    return dict(
        input_features=features, labels=text_batch(seed, rows=rows, length=length, left_padding=0)["labels"]
    )


def qwen_vl(name: str, vision: dict[str, Any], **text: Any) -> Callable[[], nn.Module]:
    """A vision tower of three blocks and a language model of three."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            text_config=configuration(f"{name}Text", rope_parameters=rope, **text).to_dict(),
            vision_config=dict(depth=3, num_heads=4, patch_size=4, **vision),
            image_token_id=IMAGE_TOKEN, video_token_id=64, vision_start_token_id=65, vision_end_token_id=66,
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


def llava() -> nn.Module:
    vision = configuration("CLIPVision", image_size=8, patch_size=4)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision, text_config=configuration("Llama"), image_token_index=IMAGE_TOKEN, image_seq_length=4
        )
    )


SEQUENCE = dict(
    d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2,
)
IMAGE = dict(image_size=16, patch_size=4, num_labels=5)
QWEN2_VISION = dict(embed_dim=32, hidden_size=32, mlp_ratio=2)
QWEN3_VISION = dict(hidden_size=32, out_hidden_size=32, intermediate_size=48, num_position_embeddings=16)
LINEAR_AND_FULL = ["linear_attention", "full_attention", "linear_attention"]
WINDOW_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention"]

EXACT = [
    row("llama", causal("Llama")),
    row("qwen2", causal("Qwen2")),
    row("qwen3", causal("Qwen3")),
    row("mistral", causal("Mistral")),
    row("phi3", causal("Phi3")),
    row("olmo2", causal("Olmo2")),
    row("glm4", causal("Glm4")),
    row("gpt_neox", causal("GPTNeoX")),
    row("gpt2", causal("GPT2")),
    row("gpt2 scaled by layer", causal("GPT2", scale_attn_by_inverse_layer_idx=True)),
    row("opt", causal("OPT", ffn_dim=48, word_embed_proj_dim=32)),
    row("falcon", causal("Falcon")),
    row("falcon alibi", causal("Falcon", alibi=True)),
    row("bloom", causal("Bloom")),
    row("mpt", causal("Mpt")),
    row("gemma2", causal("Gemma2", layer_types=WINDOW_AND_FULL)),
    row("gemma3", causal("Gemma3Text", layer_types=WINDOW_AND_FULL)),
    row("gpt_oss", causal("GptOss", layer_types=WINDOW_AND_FULL)),
    row("cohere2", causal("Cohere2", layer_types=WINDOW_AND_FULL)),
    row("llama4", causal("Llama4Text", intermediate_size_mlp=48, no_rope_layer_interval=2, attention_chunk_size=4)),
    row("smollm3", causal("SmolLM3", no_rope_layer_interval=2)),
    row("deepseek_v2", causal("DeepseekV2", num_key_value_heads=4)),
    row("deepseek_v3", causal("DeepseekV3", num_key_value_heads=4)),
    row("mixtral", causal("Mixtral")),
    row("qwen3_moe", causal("Qwen3Moe")),
    row("ernie4_5", causal("Ernie4_5")),
    row("hunyuan", causal("HunYuanDenseV1")),
    row("granite", causal("Granite")),
    row("starcoder2", causal("Starcoder2")),
    row("stablelm", causal("StableLm")),
    row("cohere", causal("Cohere")),
    row("olmo3", causal("Olmo3", layer_types=WINDOW_AND_FULL)),
    row("exaone4", causal("Exaone4", layer_types=WINDOW_AND_FULL)),
    row("gptj", causal("GPTJ", rotary_dim=4)),
    row("codegen", causal("CodeGen", rotary_dim=4)),
    row("nemotron", causal("Nemotron")),
    row("jetmoe", causal("JetMoe", kv_channels=8)),
    row("olmoe", causal("Olmoe")),
    row("glm", causal("Glm")),
    row("helium", causal("Helium")),
    row("arcee", causal("Arcee")),
    row("apertus", causal("Apertus")),
    row("phimoe", causal("Phimoe")),
    row("xglm", causal("XGLM", ffn_dim=48)),
    row("seed_oss", causal("SeedOss")),
    row("glm4_moe", causal("Glm4Moe")),
    row("qwen3_next", causal("Qwen3Next", layer_types=LINEAR_AND_FULL, shared_expert_intermediate_size=16)),
    row("qwen3_5", causal("Qwen3_5Text", layer_types=LINEAR_AND_FULL)),
    row("mamba2", causal("Mamba2", num_heads=8, n_groups=2, state_size=8)),
    row("jamba", causal("Jamba", attn_layer_period=2, attn_layer_offset=1)),
    row(
        "zamba2",
        causal("Zamba2", num_hidden_layers=5, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"]),
    ),
    row("hrm_text", causal("HrmText")),
    row("dory", causal("Dory", num_hidden_layers=4, n_input_layers=1, n_output_layers=1)),
    row("zaya", causal("Zaya", num_experts_per_tok=1, router_hidden_size=16)),
    row("rwkv", causal("Rwkv")),
    row("falcon_h1", causal("FalconH1", mamba_d_ssm=32, mamba_n_heads=4, mamba_chunk_size=4)),
    row("kimi_linear", causal("KimiLinear", num_key_value_heads=4, layer_types=LINEAR_AND_FULL)),
    row("lfm2", causal("Lfm2", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False)),
    row("minimax", causal("MiniMax", layer_types=LINEAR_AND_FULL, block_size=4)),
    row("recurrent_gemma", causal("RecurrentGemma", lru_width=32)),
    row(
        "deepseek_v4",
        causal("DeepseekV4", num_key_value_heads=1, o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=8, index_topk=2),
    ),
    row(
        "nemotron_h",
        causal("NemotronH", layers_block_type=["mamba", "attention", "moe", "mamba"], mamba_num_heads=8,
               mamba_head_dim=8, n_groups=2, ssm_state_size=8, moe_shared_expert_intermediate_size=16),
    ),
    row("longcat_flash", causal("LongcatFlash", num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=16, zero_expert_num=2, moe_topk=2, num_key_value_heads=4)),
    row("granitemoehybrid", causal("GraniteMoeHybrid", layer_types=["mamba", "attention", "mamba"], shared_intermediate_size=16, mamba_n_heads=8, mamba_chunk_size=4)),
    row("bamba", causal("Bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_chunk_size=4)),
    row("modernbert_decoder", causal("ModernBertDecoder", local_attention=4)),
    row("bert", of_class("BertForMaskedLM", "Bert")),
    row("vit", of_class("ViTForImageClassification", "ViT", **IMAGE), image_batch),
    row("dinov2", of_class("Dinov2ForImageClassification", "Dinov2", mlp_ratio=2, **IMAGE), image_batch),
    row("t5", of_class("T5ForConditionalGeneration", "T5", d_model=32, d_kv=8, d_ff=48, decoder_start_token_id=0), translation_batch),
    row("bart", of_class("BartForConditionalGeneration", "Bart", **SEQUENCE), translation_batch),
    row(
        "whisper",
        of_class("WhisperForConditionalGeneration", "Whisper", num_mel_bins=8, max_source_positions=8,
                 max_target_positions=16, **SEQUENCE),
        speech_batch,
    ),
    row("llava", llava, llava_batch),
    row("qwen2_vl", qwen_vl("Qwen2VL", QWEN2_VISION), qwen_vl_batch),
    row(
        "qwen2_5_vl",
        qwen_vl("Qwen2_5_VL", dict(hidden_size=32, out_hidden_size=32, intermediate_size=48, window_size=16, fullatt_block_indexes=[1])),
        qwen_vl_batch,
    ),
    row("qwen3_vl", qwen_vl("Qwen3VL", dict(deepstack_visual_indexes=[0, 1], **QWEN3_VISION)), qwen_vl_batch),
    row("qwen3_5 vl", qwen_vl("Qwen3_5", QWEN3_VISION, layer_types=LINEAR_AND_FULL), qwen_vl_batch),
]

REFUSED = [
    row("mixtral router", causal("Mixtral", output_router_logits=True)),
    row("qwen3_moe router", causal("Qwen3Moe", output_router_logits=True)),
    row("jamba router", causal("Jamba", output_router_logits=True)),
    row("gpt_oss router", causal("GptOss", output_router_logits=True)),
    row("gemma3n", causal("Gemma3nText", num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, laurel_rank=4, altup_num_inputs=2)),
    row("gemma4", causal("Gemma4Text", num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY)),
    row("gemma4 unshared", causal("Gemma4Text", num_hidden_layers=4, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY)),
]
