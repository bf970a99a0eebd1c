"""Tree-structured speculative decoding for DeepSeek-V4."""
