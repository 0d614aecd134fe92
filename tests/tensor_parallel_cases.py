"""What test_tensor_parallel.py and its worker both know of their cases."""

# By the name of a tiny model: heads of keys and values that each of two ranks keeps, and layers.
FAMILIES = {
    "llama": (1, 2),
    "llama_mqa": (1, 2),  # 1 head does not divide
    "llama_three": (3, 2),  # nor do 3
    "mistral": (1, 2),
    "qwen2": (1, 2),
    "qwen3": (1, 3),
    "gemma2": (1, 4),
    "gpt_oss": (2, 2),  # whose plan splits no attention
    "phi3": (2, 2),  # gathers its fused projection
    "mixtral": (1, 2),
}
WAYS = {
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 2.0},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "prompt lookup": {"lengths": [30], "prompt_lookup_num_tokens": 3, "max_new_tokens": 25},
    "chunks": {"prefill_chunk_size": 5},
    "windows and beams": {"name": "mistral", "num_beams": 2, "max_new_tokens": 30},
}
FORMATS = ["int8", "fp8_e4m3", "int4", "k8v4"]
