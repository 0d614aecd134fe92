"""The window of layers that attend to the last tokens only."""

from __future__ import annotations

from hfpaged.planner.fields import Fields


def window_of(fields: Fields) -> int | None:
    """The window of sliding layers; None where the config turns them off. Raises InvalidConfigError."""
    if fields.get("use_sliding_window") is False:
        return None
    if fields.model_type == "modernbert-decoder" and "sliding_window" not in fields.values:
        return int(fields.get("local_attention")) // 2
    if fields.model_type == "mimo_v2_flash" and fields.values.get("sliding_window_size") is not None:
        return int(fields.values["sliding_window_size"]) + 1
    window = fields.get("sliding_window", 512 if fields.model_type == "dots3_note_text" else None)
    if window and fields.get("use_bidirectional_attention") in (True, "all"):
        return int(window) // 2 + 1
    return fields.count("sliding_window", window) if window else None
