"""How near the weights counted from a config are, by family: compared with transformers' models on the meta device,
each with the default config of its class.
"""

from __future__ import annotations

COMPARED = "5.24.0"  # of transformers

# Within one part in a hundred.
_NEAR = """
    afmoe apertus apertus1p5_text arcee aria aria_text axk1 axk2 bart beam bert bert-generation bigbird_pegasus
    biogpt bitnet blenderbot blenderbot-small blip bloom camembert codegen cohere cohere2 cohere2_moe cohere2_vision
    cwm data2vec-text deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge dory dots3_note_text electra emu3 ernie
    ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_h1 flex_olmo flint fuyu gemma gemma2 gemma3
    gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe
    glm4_moe_lite glm4v_moe glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hy_v3 hyperclovax
    hyperclovax_vision_v2 idefics3 inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_text internlm3
    iquestcoder jais2 jamba janus jetmoe kimi_k25 kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_vl lfm3 llama
    llama4 llama4_text llava llava_next llava_next_video llava_onevision longcat_flash longt5 m2m_100 marian mbart
    megatron-bert mellum mimo_v2_flash minicpm3 minicpmv4_6 minicpmv4_7 minimax_m2 minimax_m3_vl minimax_m3_vl_text
    ministral3 mistral mistral4 mistral_large4 mixtral modernbert-decoder moonshine mpt mt5 mvp nanochat nemotron_h
    olmo olmo2 olmo3 olmo_hybrid olmoe opt paligemma pegasus pegasus_x persimmon phi phi3 phimoe plbart qianfan_ocr
    qwen2 qwen2_5_vl qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_thinker
    recurrent_gemma rembert roberta roberta-prelayernorm roformer sarvam_mla sarvam_moe seamless_m4t seamless_m4t_v2
    seed_oss shieldgemma2 smollm3 smolvlm solar_open stablelm starcoder2 step3p7 t5 udop umt5 vaultgemma
    video_llama_3 vipllava xglm xlm xlm-roberta xlm-roberta-xl youtu zamba zamba2 zaya
"""
NEAR = frozenset(_NEAR.split())

# Further away, in parts of a hundred: above 0 where more is counted than there is.
ERRORS = {
    "apertus1p5": -2.7, "bailing_hybrid": -1.8, "big_bird": -1.0, "blip-2": -1.7, "canary": -9.2,
    "cohere_asr": -22.8, "cosmos3_edge": 18.9, "cosmos3_omni": -1.1, "cpmant": -1.4, "ctrl": -23.1,
    "deepseek_vl": 1.6, "deepseek_vl_hybrid": 1.4, "dia": 67.5, "dots3_note": 1.2, "ernie4_5_vl_moe": -23.6,
    "evolla": -16.4, "exaone4_5": 1.7, "florence2": -18.5, "fsmt": -9.4, "gemma3n": -9.2, "glm46v": 8.5,
    "glm4v": 8.5, "glm_ocr": -3.3, "glmga": 8.5, "got_ocr2": -1.9, "granite_docling": -13.0, "hy_v4": -1.4,
    "hy_v4_vl": -1.1, "idefics": -44.2, "idefics2": -9.0, "inkling_mm_model": -44.0, "instructblip": -7.8,
    "instructblipvideo": -7.8, "internvl": 5.0, "kosmos-2": 23.1, "kosmos-2.5": 6.5, "led": -12.2, "lfm3_vl": -2.5,
    "lighton_ocr": 14.9, "minicpm_ocr": 11.7, "mistral3": 2.3, "mllama": 5.8, "molmo2": -1.4, "moshi": 67.1,
    "moss_transcribe_diarize": 16.1, "muse_glimmer": -5.0, "muse_spark": 96.1, "nemotron_h_omni": -2.1,
    "nllb-moe": -46.5, "ovis2": 5.0, "paddleocr_vl": -2.8, "phi4_multimodal": -9.3, "pix2struct": 27.8,
    "pop2piano": -2.1, "pp_chart2table": -1.9, "pp_formulanet": 26.8, "prophetnet": -1.7,
    "qwen2_5_omni_thinker": -6.7, "qwen2_vl": 6.0, "qwen3_5": 4.8, "qwen3_5_moe": 1.2, "qwen3_vl": -1.1,
    "qwen3_vl_moe": -3.3, "roc_bert": -12.6, "speech_to_text": -6.1, "speecht5": -5.0, "switch_transformers": 1.5,
    "t5gemma": -23.6, "t5gemma2": -42.8, "trocr": -19.9, "video_llava": -4.4, "whisper": -1.2, "xmod": -6.7,
}  # fmt: skip


def told(model_type: str) -> str:
    """How a count is to be taken, for people."""
    if model_type in NEAR:
        return "counted from the config"
    if model_type not in ERRORS:
        return "estimated from the config: no model of this type was compared"
    side = "more" if ERRORS[model_type] > 0 else "less"
    return f"estimated from the config: for this type, {abs(ERRORS[model_type]):g} % {side} than there is was seen"
