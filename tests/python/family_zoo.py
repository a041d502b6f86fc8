"""A table of model families of transformers at tiny sizes: what a streamed block has to put up with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import families
import torch
import transformers
from dit import DiT, dit_batch
from families import VOCABULARY, Family, image_batch, text_batch, translation_batch
from torch import nn

Batch = dict[str, torch.Tensor]

SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=4,
    # wide enough that no gradient is only rounding
    initializer_range=0.1, init_std=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    # experts
    num_experts=4, num_local_experts=4, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
    num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    moe_shared_expert_intermediate_size=16, first_k_dense_replace=1,
    # latent attention
    kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    # linear attention, state spaces
    linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_head_dim=8, linear_num_heads=4, mamba_d_state=8, mamba_n_heads=8, mamba_chunk_size=4, chunk_size=4,
    # images
    image_size=16, patch_size=4,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    name: str
    needs: str
    """Class of transformers, "" for none; versions differ in which they have."""
    make: Callable[[], nn.Module]
    batch: Callable[..., Batch] = text_batch
    kinked: bool = False
    """Some of its tokens come so near to the kink of its activation that fp32 and fp64 fall on different sides."""

    @property
    def exists(self) -> bool:
        return not self.needs or hasattr(transformers, self.needs)

    def build(self) -> nn.Module:
        return families.build(Family(self.name, self.make, self.batch, {}, ""))

    def batches(self, step: int = 0) -> list[Batch]:
        """Two micro-batches of unequal length."""
        return [self.batch(10 * step + 1), self.batch(10 * step + 2, rows=3, length=12, left_padding=5)]


def configuration(name: str, /, **settings: Any) -> Any:
    """`<name>Config` with those of the common sizes that it declares, and `settings`."""
    config = getattr(transformers, f"{name}Config")
    known = set(config.__dataclass_fields__) | set(config.attribute_map)
    return config(**{**{key: value for key, value in SIZES.items() if key in known}, **settings})


def causal(family: str, name: str, /, **settings: Any) -> Row:
    """A causal language model."""
    return Row(
        family,
        f"{name}Config",
        lambda: transformers.AutoModelForCausalLM.from_config(configuration(name, **settings)),
    )


def other(family: str, model: str, name: str, batch: Callable[..., Batch], /, **settings: Any) -> Row:
    """The class `model` of `<name>Config`."""
    return Row(family, model, lambda: getattr(transformers, model)(configuration(name, **settings)), batch)


IMAGE_TOKEN = 3


def llava_batch(seed: int, rows: int = 2, length: int = 12, left_padding: int = 3) -> Batch:
    """Each row begins (after the padding) with the four tokens of one image of 8 by 8."""
    batch = text_batch(seed, rows=rows, length=length, left_padding=left_padding)
    ids = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE_TOKEN, IMAGE_TOKEN + 1)
    for entry, padding in zip(ids, [left_padding] + [0] * (rows - 1), strict=True):
        entry[padding : padding + 4] = IMAGE_TOKEN
    labels = batch["labels"].masked_fill(ids == IMAGE_TOKEN, -100)
    pixels = torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids, attention_mask=batch["attention_mask"], labels=labels, pixel_values=pixels)


def qwen_vl_batch(seed: int, **sizes: Any) -> Batch:
    """The same with images of 4 by 4 patches of two frames, four patches a token; the patches of all images
    stand behind one another."""
    batch = llava_batch(seed, **sizes)
    rows = batch["input_ids"].shape[0]
    batch["pixel_values"] = torch.randn(rows * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
    batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * rows)
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).int()
    return batch


def speech_batch(seed: int, rows: int = 2, length: int = 6, **_: Any) -> Batch:
    features = torch.randn(rows, 8, 16, generator=torch.Generator().manual_seed(seed))
    labels = text_batch(seed, rows=rows, length=length, left_padding=0)["labels"]
    return dict(input_features=features, labels=labels)


def llava() -> nn.Module:
    vision = configuration("CLIPVision", image_size=8)
    text = configuration("Llama")
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=4
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen_vl(family: str, name: str, vision: dict[str, Any], **text: Any) -> Row:
    """A vision tower of three blocks and a language model of three."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(
            text_config=configuration(f"{name}Text", rope_parameters=rope, **text).to_dict(),
            vision_config=dict(depth=3, num_heads=4, patch_size=4, hidden_size=32, **vision),
            image_token_id=IMAGE_TOKEN,
            video_token_id=64,
            vision_start_token_id=65,
            vision_end_token_id=66,
        )
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return Row(family, f"{name}ForConditionalGeneration", make, qwen_vl_batch)


def deepseek_v4() -> nn.Module:
    """Two layers route by a table of tokens, which is empty until it is loaded."""
    config = configuration(
        "DeepseekV4", num_key_value_heads=1, o_groups=2, o_lora_rank=8, index_n_heads=2, index_head_dim=8,
        index_topk=2, mlp_layer_types=["hash_moe", "moe", "hash_moe"],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(VOCABULARY)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.stack([tokens % 4, (tokens + 1 + tokens % 3) % 4], 1))
    return model


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LINEAR = ["linear_attention", "full_attention", "linear_attention"]
HYBRID = ["mamba", "attention", "mamba"]
PAIRS = ["sliding_attention", "full_attention"] * 2
PER_LAYER = dict(num_hidden_layers=4, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY)
LATENT = dict(num_key_value_heads=4)
SEQUENCE = dict(
    d_model=32, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=2,
)  # fmt: skip

ROUTERS = dict(output_router_logits=True, router_aux_loss_coef=0.5)

EXACT = [
    causal("llama", "Llama"),
    causal("qwen2", "Qwen2"),
    causal("qwen3", "Qwen3"),
    causal("mistral", "Mistral"),
    causal("phi3", "Phi3"),
    causal("olmo2", "Olmo2"),
    causal("glm4", "Glm4"),
    causal("gpt_neox", "GPTNeoX"),
    causal("gpt2", "GPT2"),
    causal("gpt2-scaled", "GPT2", scale_attn_by_inverse_layer_idx=True),
    causal("opt", "OPT", ffn_dim=48, word_embed_proj_dim=32),
    other("bert", "BertForMaskedLM", "Bert", text_batch),
    other("vit", "ViTForImageClassification", "ViT", image_batch, num_labels=5),
    other("dinov2", "Dinov2ForImageClassification", "Dinov2", image_batch, num_labels=5, mlp_ratio=2),
    causal("falcon", "Falcon"),
    causal("falcon-alibi", "Falcon", alibi=True),
    causal("bloom", "Bloom"),
    causal("mpt", "Mpt"),
    causal("gemma2", "Gemma2", layer_types=SLIDING),
    causal("gemma3", "Gemma3Text", layer_types=SLIDING),
    causal("gpt_oss", "GptOss", layer_types=SLIDING),
    causal("cohere2", "Cohere2", layer_types=SLIDING),
    causal("llama4", "Llama4Text", intermediate_size_mlp=48, no_rope_layer_interval=2, attention_chunk_size=4),
    causal("smollm3", "SmolLM3", no_rope_layer_interval=2),
    causal("deepseek_v2", "DeepseekV2", **LATENT),
    causal("deepseek_v3", "DeepseekV3", **LATENT),
    causal("mixtral", "Mixtral"),
    causal("qwen3_moe", "Qwen3Moe"),
    causal("qwen3_next", "Qwen3Next", layer_types=LINEAR),
    causal("qwen3_5", "Qwen3_5Text", layer_types=LINEAR),
    causal("mamba2", "Mamba2", num_heads=8, n_groups=2, state_size=8),
    causal("jamba", "Jamba", attn_layer_period=2, attn_layer_offset=1),
    causal("zamba2", "Zamba2", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2),
    other("t5", "T5ForConditionalGeneration", "T5", translation_batch, d_kv=8, d_ff=48, decoder_start_token_id=0),
    other("bart", "BartForConditionalGeneration", "Bart", translation_batch, **SEQUENCE),
    other(
        "whisper", "WhisperForConditionalGeneration", "Whisper", speech_batch,
        num_mel_bins=8, max_source_positions=8, max_target_positions=16, **SEQUENCE,
    ),
    Row("llava", "LlavaForConditionalGeneration", llava, llava_batch),
    qwen_vl("qwen2_vl", "Qwen2VL", dict(embed_dim=32, mlp_ratio=2)),
    qwen_vl(
        "qwen2_5_vl", "Qwen2_5_VL",
        dict(out_hidden_size=32, intermediate_size=48, window_size=16, fullatt_block_indexes=[1]),
    ),
    qwen_vl(
        "qwen3_vl", "Qwen3VL",
        dict(out_hidden_size=32, intermediate_size=48, num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
    ),
    qwen_vl(
        "qwen3_5-vl", "Qwen3_5",
        dict(out_hidden_size=32, intermediate_size=48, num_position_embeddings=16), layer_types=LINEAR,
    ),
    causal("hrm_text", "HrmText"),
    causal("dory", "Dory", num_hidden_layers=4, n_input_layers=1, n_output_layers=1),
    causal("zaya", "Zaya", router_hidden_size=16, num_experts_per_tok=1),
    causal("rwkv", "Rwkv"),
    causal("falcon_h1", "FalconH1", mamba_d_ssm=32),
    causal("kimi_linear", "KimiLinear", layer_types=LINEAR, **LATENT),
    causal("lfm2", "Lfm2", layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
    causal("minimax", "MiniMax", layer_types=LINEAR, block_size=4),
    causal("recurrent_gemma", "RecurrentGemma", lru_width=32),
    Row("deepseek_v4", "DeepseekV4Config", deepseek_v4),
    causal("glm4_moe", "Glm4Moe"),
    causal(
        "nemotron_h", "NemotronH", layers_block_type=["mamba", "attention", "moe", "mamba"],
        mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=8,
    ),
    causal("ernie4_5", "Ernie4_5"),
    causal("hunyuan", "HunYuanDenseV1"),
    causal("granite", "Granite"),
    causal("starcoder2", "Starcoder2"),
    causal("stablelm", "StableLm"),
    causal("cohere", "Cohere"),
    causal("olmo3", "Olmo3", layer_types=SLIDING),
    causal("exaone4", "Exaone4", layer_types=SLIDING),
    causal("gptj", "GPTJ", rotary_dim=4),
    causal("codegen", "CodeGen", rotary_dim=4),
    causal("nemotron", "Nemotron"),
    causal("jetmoe", "JetMoe", kv_channels=8),
    causal("olmoe", "Olmoe"),
    causal("glm", "Glm"),
    causal("helium", "Helium"),
    causal("arcee", "Arcee"),
    causal("apertus", "Apertus"),
    causal("phimoe", "Phimoe"),
    causal("xglm", "XGLM", ffn_dim=48),
    causal("seed_oss", "SeedOss"),
    causal(
        "longcat_flash", "LongcatFlash", num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=16,
        zero_expert_num=2, moe_topk=2, **LATENT,
    ),
    causal("granitemoehybrid", "GraniteMoeHybrid", layer_types=HYBRID, shared_intermediate_size=16),
    causal("bamba", "Bamba", attn_layer_indices=[1]),
    causal("modernbert_decoder", "ModernBertDecoder", local_attention=4),
    causal("big_bird", "BigBird", attention_type="original_full", is_decoder=True),
    # Tensors leave their blocks by hooks or through mappings, or blocks are not those of a language model.
    Row("dit", "", DiT, dit_batch),
    causal("mixtral-router", "Mixtral", **ROUTERS),
    causal("qwen3_moe-router", "Qwen3Moe", **ROUTERS),
    causal("olmoe-router", "Olmoe", **ROUTERS),
    causal("gpt_oss-router", "GptOss", layer_types=SLIDING, **ROUTERS),
    causal("granitemoehybrid-router", "GraniteMoeHybrid", layer_types=HYBRID, shared_intermediate_size=16, **ROUTERS),
    causal("jamba-router", "Jamba", attn_layer_period=2, attn_layer_offset=1, expert_layer_offset=0, **ROUTERS),
    causal(
        "gemma3n", "Gemma3nText", num_kv_shared_layers=2, layer_types=PAIRS, laurel_rank=4, altup_num_inputs=2,
        **PER_LAYER,
    ),
    # With heads of 512, the default, and unscaled scores fp32 itself is 4e-5 off.
    causal("gemma4", "Gemma4Text", num_kv_shared_layers=2, layer_types=PAIRS, global_head_dim=8, **PER_LAYER),
]  # fmt: skip

KINKED = {"CTRL"}

MORE = [
    replace(causal(name, name), kinked=name in KINKED)
    for name in """
    Afmoe Apertus1p5Text AriaText BailingHybrid Beam BertGeneration BioGpt BitNet BlenderbotSmall Camembert
    Cohere2Moe CTRL Cwm Data2VecText DiffLlama Doge Dots1 Electra Ernie Ernie4_5_Moe Exaone ExaoneMoe FalconMamba
    FlexOlmo Flint Gemma GPTBigCode GPTNeoXJapanese GraniteSWA GraniteMoe GraniteMoeSWA GraniteMoeShared
    HunYuanMoEV1 HYV3 HYV4 HyperCLOVAX InklingText InternLM3 IQuestCoder Jais2 Kolibri1 Laguna LaraMini Lfm3 Mamba
    MegatronBert Mellum MiMoV2Flash MiniMaxM2 MiniMaxM3VLText Ministral Ministral3 NanoChat Olmo OlmoHybrid
    OpenAIGPT Persimmon Phi ProphetNet Qwen2Moe Qwen3_5MoeText Qwen4ExpText RemBert Roberta RobertaPreLayerNorm RoFormer
    SarvamMoE SolarOpen TrOCR VaultGemma XLMRoberta XLMRobertaXL xLSTM
    """.split()
]
"""Further causal models, by their configurations' names; run where `--every-family` or `--models-page` asks for it."""
