"""The engine: requests, what of them goes into each step, and the one packed forward that computes it.

Nothing here is needed for `model.generate(past_key_values=PagedCache(model))`. `ContinuousBatcher` is the way in.
"""
