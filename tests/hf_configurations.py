"""Configurations of Hugging Face models as users have them, small, one of each family; and two of the real size."""

from typing import Any

__all__ = ["FAMILIES", "LLAMA", "LLAMA_3_8B", "LLAMA_3_70B", "T5", "TEXT", "WHISPER"]

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
LLAMA = {**TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2}
ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 96,
}
AUDIO = {
    **{name: TEXT[name] for name in list(TEXT)[:5]},
    "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
PAIRED: dict[str, Any] = {"text_config": TEXT, "vision_config": {**TEXT, "image_size": 32, "patch_size": 8}}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
LLAMA_3_70B = {**LLAMA_3_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80} | {
    "num_attention_heads": 64
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
} | {"num_layers": 2, "num_heads": 4, "vocab_size": 96, "n_positions": 32, "decoder_start_token_id": 0}
WHISPER: dict[str, Any] = (
    {**ENCODER_DECODER, **SPECIAL_TOKENS, "model_type": "whisper", "num_mel_bins": 16}
    | {"architectures": ["WhisperForConditionalGeneration"], "max_source_positions": 32}
    | {"max_target_positions": 32}
)

FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": (LLAMA, "float32"),
    "gemma 2, sliding window": (
        {**TEXT, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 2}
        | {"head_dim": 8},
        "bfloat16",
    ),
    "mixtral, routed experts": (
        {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
        "float32",
    ),
    "bert": ({**TEXT, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, "bfloat16"),
    "bert, classifying text": (
        {**TEXT, "model_type": "bert", "architectures": ["BertForSequenceClassification"]},
        "float32",
    ),
    "roberta, classifying tokens": (
        {**TEXT, "model_type": "roberta", "architectures": ["RobertaForTokenClassification"]},
        "float32",
    ),
    "gpt2 without pad token, classifying": (
        {"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"], "n_embd": 32, "n_layer": 2}
        | {"n_head": 4, "vocab_size": 96, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1},
        "float32",
    ),
    "t5": (
        T5,
        "float32",
    ),
    "bart": (
        {**ENCODER_DECODER, "model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
        | {"max_position_embeddings": 64},
        "float32",
    ),
    "whisper": (
        WHISPER,
        "float32",
    ),
    "vit": (
        {**TEXT, "model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32}
        | {"patch_size": 8},
        "float32",
    ),
    "clip": ({**PAIRED, "model_type": "clip", "architectures": ["CLIPModel"]}, "float32"),
    "siglip": ({**PAIRED, "model_type": "siglip", "architectures": ["SiglipModel"]}, "bfloat16"),
    "swin": (
        {"model_type": "swin", "architectures": ["SwinForImageClassification"], "image_size": 32, "patch_size": 4}
        | {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        "float32",
    ),
    "wav2vec 2.0": ({**AUDIO, "model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "float32"),
    "hubert": (
        {**AUDIO, "model_type": "hubert", "architectures": ["HubertForSequenceClassification"], "layerdrop": 0.5},
        "float32",
    ),
    "audio spectrogram transformer": (
        {**TEXT, "model_type": "audio-spectrogram-transformer", "architectures": ["ASTForAudioClassification"]}
        | {"max_length": 64, "num_mel_bins": 16},
        "float32",
    ),
}
