"""What the code of model families fixes and their configs do not say, as far as it changes the number of weights."""

from __future__ import annotations

# Families whose head is the embedding where the config does not say so. Configs leave a family's default out.
_TIED = """
    bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert cohere
    cohere2 cohere2_moe cpmant ctrl data2vec-text electra ernie ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2
    gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_assistant
    gemma4_unified_text got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox_japanese granite_swa jetmoe lara_mini lfm2
    lfm3 mamba marian mbart megatron-bert minicpm3 modernbert-decoder moss_transcribe_diarize mpt mvp openai-gpt opt
    pegasus plbart prophetnet recurrent_gemma roberta roberta-prelayernorm roc_bert roformer smollm3 starcoder2 t5
    trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod youtu zamba zamba2 zaya
"""
TIED = frozenset(_TIED.split())

# An embedding for each position.
_LEARNED_POSITIONS = """
    bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small camembert data2vec-text
    electra ernie git gpt-sw3 gpt2 gpt_bigcode gpt_neo mbart megatron-bert mvp openai-gpt opt plbart prophetnet rembert
    roberta roberta-prelayernorm roc_bert trocr whisper xlm xlm-roberta xlm-roberta-xl xmod
"""
LEARNED_POSITIONS = frozenset(_LEARNED_POSITIONS.split())

# MLPs of two matrices, up and down, where others have a gate besides.
_TWO_MATRICES = """
    apertus apertus1p5_text arcee bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small
    bloom camembert codegen ctrl data2vec-text electra ernie exaone2 falcon fuyu git gpt-sw3 gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gptj jais2 marian mbart megatron-bert mpt mvp nanochat nemotron nemotron_h openai-gpt
    opt pegasus persimmon phi plbart prophetnet rembert roberta roberta-prelayernorm roc_bert roformer rwkv
    starcoder2 trocr whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod m2m_100 nllb-moe pegasus_x speech_to_text
    seamless_m4t seamless_m4t_v2 speecht5 led fsmt pix2struct
"""
TWO_MATRICES = frozenset(_TWO_MATRICES.split())

# Attention with a gate on its output, as wide as the queries.
OUTPUT_GATE = frozenset(
    ["dory", "hrm_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"]
)

# One expert that all tokens take, of which the config says nothing.
ONE_SHARED_EXPERT = frozenset(["llama4", "llama4_text"])
