"""Plain numbers of 32 and 16 bits."""

from __future__ import annotations

from training.exchange.codecs.base import CastCodec
from training.exchange.codecs.registry import register

_FP32 = CastCodec("fp32", "float32", 4, (0.0, 0.0))
_BF16 = CastCodec("bf16", "bfloat16", 2, (0.3, 0.2))
_FP16 = CastCodec("fp16", "float16", 2, (0.2, 0.1))

register("fp32", lambda _: _FP32, "4 bytes an element; nothing is lost")
register("bf16", lambda _: _BF16, "2 bytes an element; 16 bits of mantissa are lost")
register("fp16", lambda _: _FP16, "2 bytes an element; 13 bits of mantissa are lost, and values beyond 65,504")
