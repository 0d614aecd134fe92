"""`hfpaged plan`: what fits on a card, from a config alone. Nothing here imports torch or transformers."""
