"""The DeepSeek-V4 network definition: modules on `onnxscript.nn`, one per architectural part. Knows no target and no runtime."""
