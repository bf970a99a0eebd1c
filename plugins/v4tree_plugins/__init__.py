"""Triton kernels of the v4tree operators, their float64 references, and the TensorRT plugins made of them.

Knows nothing of the runtime: kernels read row tables and masks as `trtllm_v4tree.contract` describes them.
"""
