"""`adamw_8bit_`: one parameter's step of AdamW with both moments in 8 bits, in place, in one launch."""

from .step import Moments, adamw_8bit_, new_moments

__all__ = ["Moments", "adamw_8bit_", "new_moments"]
