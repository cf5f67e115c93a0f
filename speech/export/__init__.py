"""A finished model for other programs: whisper.cpp, CTranslate2, ONNX, Core ML, or a plain Hugging Face folder."""
