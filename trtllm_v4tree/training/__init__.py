"""Trains a small DeepSeek-V4 on plain text with PyTorch; needs the extra `train`, and nothing of the engine imports it."""
