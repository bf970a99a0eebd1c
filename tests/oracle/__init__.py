"""Independent reference for the exactness tests: tiny checkpoints, transformers as oracle, random trees.

Nothing here imports `trtllm_v4tree`.
"""
