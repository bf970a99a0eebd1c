"""Token ids in, token ids out; owns the engine."""

import triton_python_backend_utils as pb_utils

from trtllm_v4tree.serving.triton_models import TokenModel


class TritonPythonModel(TokenModel):
    def __init__(self) -> None:
        super().__init__(pb_utils)
