"""PagedAttention for the model that you already have in transformers."""
