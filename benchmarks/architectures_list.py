"""Lists popular architectures as their configurations describe them, with the number of parameters that was published.

What is not given is the default of transformers' class. A number stands as its source rounds it, in millions.
"""

from typing import Any, NamedTuple

__all__ = ["ARCHITECTURES", "Architecture"]


class Architecture(NamedTuple):
    """Describes a model by its configuration."""

    config: dict[str, Any]
    published: str
    """Parameters as they were published, in millions, or with a B in billions."""
    source: str
    """The page that states them, or one that copies it."""


def _llama(layers: int, width: int, inner: int, heads: int, key_heads: int, **others: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "dtype": "bfloat16",
    } | others


def _qwen(kind: str, layers: int, width: int, inner: int, heads: int, key_heads: int, **others: Any) -> dict[str, Any]:
    names = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
    found = _llama(layers, width, inner, heads, key_heads, max_position_embeddings=40960)
    return found | {"model_type": kind, "architectures": [names[kind]], "vocab_size": 151936} | others


def _named(kind: str, head: str, **others: Any) -> dict[str, Any]:
    return {"model_type": kind, "architectures": [head], **others}


_FACE = "https://huggingface.co/"
_HUB = "https://github.com/"
_LLAMA = _HUB + "meta-llama/llama-models/blob/main/models/"
_WEIGHTS = "0bdc04e778f78c7e7e92e32e6e3949d5bd333688/docs/getting-started/models/weights.md"
_MISTRAL_WEIGHTS = _HUB + "mistralai/platform-docs-public/blob/" + _WEIGHTS
_DEBERTA = "microsoft/deberta-v3-base/resolve/5f32929a4206c500f4044bf7778298aedc77531a/README.md"
_LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_GEMMA = _named("gemma3_text", "Gemma3ForCausalLM", vocab_size=262144, dtype="bfloat16", tie_word_embeddings=True)
_MISTRAL = _named("mistral", "MistralForCausalLM", dtype="bfloat16")
_ROBERTA = _named("roberta", "RobertaForMaskedLM", vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
_OPEN_CLIP = _HUB + "mlfoundations/open_clip/blob/main/docs/model_profile.csv"
_CLIP_LARGE = {
    "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
    "vision_config": _LARGE | {"patch_size": 14},
    "projection_dim": 768,
}
_DIFFUSERS = {"_diffusers_version": "0.30.0"}
_UNET = _DIFFUSERS | {"_class_name": "UNet2DConditionModel", "in_channels": 4, "out_channels": 4}
_SD_UNET = _UNET | {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
_SDXL_UNET = (
    _UNET
    | {"sample_size": 128, "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20]}
    | {"block_out_channels": [320, 640, 1280], "transformer_layers_per_block": [1, 2, 10]}
    | {"down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"]}
    | {"up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "use_linear_projection": True}
    | {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
    | {"projection_class_embeddings_input_dim": 2816}
)
_FLUX = _DIFFUSERS | {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True}
_WHISPER_LARGE = _named(
    "whisper", "WhisperForConditionalGeneration", d_model=1280, encoder_layers=32, decoder_layers=32
) | {"encoder_attention_heads": 20, "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120}

ARCHITECTURES: dict[str, Architecture] = {
    "Llama 3.2 1B": Architecture(
        _llama(16, 2048, 8192, 32, 8, head_dim=64, tie_word_embeddings=True), "1.23B", _LLAMA + "llama3_2/MODEL_CARD.md"
    ),
    "Llama 3.2 3B": Architecture(
        _llama(28, 3072, 8192, 24, 8, head_dim=128, tie_word_embeddings=True),
        "3.21B",
        _LLAMA + "llama3_2/MODEL_CARD.md",
    ),
    "Llama 3.1 8B": Architecture(_llama(32, 4096, 14336, 32, 8), "8B", _LLAMA + "llama3_1/MODEL_CARD.md"),
    "Llama 3.1 70B": Architecture(_llama(80, 8192, 28672, 64, 8), "70B", _LLAMA + "llama3_1/MODEL_CARD.md"),
    "Qwen2.5 7B": Architecture(
        _qwen("qwen2", 28, 3584, 18944, 28, 4, vocab_size=152064), "7.61B", _FACE + "Qwen/Qwen2.5-7B"
    ),
    "Qwen3 0.6B": Architecture(
        _qwen("qwen3", 28, 1024, 3072, 16, 8, head_dim=128, tie_word_embeddings=True),
        "0.6B",
        _FACE + "Qwen/Qwen3-0.6B",
    ),
    "Qwen3 8B": Architecture(_qwen("qwen3", 36, 4096, 12288, 32, 8, head_dim=128), "8.2B", _FACE + "Qwen/Qwen3-8B"),
    "Qwen3 30B-A3B": Architecture(
        _qwen("qwen3_moe", 48, 2048, 6144, 32, 4, head_dim=128, **_EXPERTS),
        "30.5B",
        _FACE + "Qwen/Qwen3-30B-A3B",
    ),
    "Gemma 3 1B": Architecture(
        _GEMMA
        | {"num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4}
        | {"num_key_value_heads": 1, "head_dim": 256},
        "1B",
        _FACE + "blog/gemma3",
    ),
    "Mistral 7B": Architecture(_MISTRAL, "7.3B", _MISTRAL_WEIGHTS),
    "Mixtral 8x7B": Architecture(
        _named("mixtral", "MixtralForCausalLM", dtype="bfloat16"),
        "46.7B",
        _MISTRAL_WEIGHTS,
    ),
    "Phi-4": Architecture(
        _named("phi3", "Phi3ForCausalLM", num_hidden_layers=40, hidden_size=5120, intermediate_size=17920)
        | {"num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352, "dtype": "bfloat16"}
        | {"max_position_embeddings": 16384, "original_max_position_embeddings": 16384, "pad_token_id": 100349},
        "14B",
        "https://arxiv.org/abs/2412.08905",
    ),
    "DeepSeek-V3": Architecture(
        _named("deepseek_v3", "DeepseekV3ForCausalLM", dtype="bfloat16"), "671B", _HUB + "deepseek-ai/DeepSeek-V3"
    ),
    "Mamba 2.8B": Architecture(
        _named("mamba", "MambaForCausalLM", num_hidden_layers=64, hidden_size=2560, vocab_size=50280),
        "2.8B",
        _HUB + "state-spaces/mamba",
    ),
    "GPT-2": Architecture(_named("gpt2", "GPT2LMHeadModel"), "124", _HUB + "openai/gpt-2/blob/master/model_card.md"),
    "GPT-2 XL": Architecture(
        _named("gpt2", "GPT2LMHeadModel", n_layer=48, n_embd=1600, n_head=25),
        "1.5B",
        _HUB + "openai/gpt-2/blob/master/model_card.md",
    ),
    "BERT base": Architecture(_named("bert", "BertForMaskedLM"), "110", _HUB + "google-research/bert"),
    "BERT large": Architecture(_named("bert", "BertForMaskedLM", **_LARGE), "340", _HUB + "google-research/bert"),
    "RoBERTa base": Architecture(_ROBERTA, "125", _HUB + "facebookresearch/fairseq/tree/main/examples/roberta"),
    "RoBERTa large": Architecture(
        _ROBERTA | _LARGE, "355", _HUB + "facebookresearch/fairseq/tree/main/examples/roberta"
    ),
    "DeBERTa v3 base": Architecture(
        _named("deberta-v2", "DebertaV2ForMaskedLM", hidden_size=768, num_hidden_layers=12, num_attention_heads=12)
        | {"intermediate_size": 3072, "relative_attention": True, "position_buckets": 256, "type_vocab_size": 0}
        | {"norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p", "vocab_size": 128100}
        | {"position_biased_input": False, "max_relative_positions": -1},
        "183",
        _FACE + _DEBERTA,
    ),
    "ModernBERT base": Architecture(
        _named("modernbert", "ModernBertForMaskedLM"), "149", "https://www.answer.ai/posts/2024-12-19-modernbert.md"
    ),
    "T5 base": Architecture(
        _named("t5", "T5ForConditionalGeneration", d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        "220",
        _HUB + "google-research/text-to-text-transfer-transformer",
    ),
    "T5 large": Architecture(
        _named("t5", "T5ForConditionalGeneration", d_model=1024, d_ff=4096, num_layers=24, num_heads=16),
        "770",
        _HUB + "google-research/text-to-text-transfer-transformer",
    ),
    "BART large": Architecture(
        _named("bart", "BartForConditionalGeneration"),
        "400",
        _HUB + "facebookresearch/fairseq/tree/main/examples/bart",
    ),
    "Whisper tiny": Architecture(_named("whisper", "WhisperForConditionalGeneration"), "39", _HUB + "openai/whisper"),
    "Whisper large v3": Architecture(
        _WHISPER_LARGE | {"num_mel_bins": 128, "vocab_size": 51866}, "1550", _HUB + "openai/whisper"
    ),
    "wav2vec 2.0 base": Architecture(_named("wav2vec2", "Wav2Vec2ForCTC"), "95", "https://arxiv.org/abs/2006.11477"),
    "ViT-B/16": Architecture(_named("vit", "ViTForImageClassification"), "86", "https://arxiv.org/abs/2010.11929"),
    "ViT-L/16": Architecture(
        _named("vit", "ViTForImageClassification", **_LARGE), "307", "https://arxiv.org/abs/2010.11929"
    ),
    "Swin-T": Architecture(_named("swin", "SwinForImageClassification"), "28", _HUB + "microsoft/Swin-Transformer"),
    "ConvNeXt-T": Architecture(
        _named("convnext", "ConvNextForImageClassification", num_labels=1000), "28", _HUB + "facebookresearch/ConvNeXt"
    ),
    "CLIP ViT-B/32": Architecture(_named("clip", "CLIPModel", text_config={}, vision_config={}), "151.28", _OPEN_CLIP),
    "CLIP ViT-L/14": Architecture(_named("clip", "CLIPModel", **_CLIP_LARGE), "427.62", _OPEN_CLIP),
    "SigLIP ViT-B/16": Architecture(
        _named("siglip", "SiglipModel", text_config={}, vision_config={}), "203.16", _OPEN_CLIP
    ),
    "Stable Diffusion 1.5, U-Net": Architecture(_SD_UNET, "860", _HUB + "CompVis/stable-diffusion"),
    "SDXL, U-Net": Architecture(_SDXL_UNET, "2.6B", "https://arxiv.org/abs/2307.01952"),
    "FLUX.1 dev, transformer": Architecture(
        _FLUX, "12B", _HUB + "black-forest-labs/flux/blob/main/model_cards/FLUX.1-dev.md"
    ),
}
